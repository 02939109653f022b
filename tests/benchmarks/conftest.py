from .overhead import judge, node, operators  # noqa: F401
