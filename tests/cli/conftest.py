from tests.packaging.environments import built, elsewhere, installed, libraries  # noqa: F401
