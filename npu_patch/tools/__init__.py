"""Commands that look at a machine or a model."""
