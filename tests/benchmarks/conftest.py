import pytest

pytest.register_assert_rewrite("tests.benchmarks.overhead")

from .overhead import judge, node, operators  # noqa: E402, F401
