from .fakes import fake  # noqa: F401
