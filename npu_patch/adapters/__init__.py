"""Call sites: the signature of a model library on one side, an op on the other."""
