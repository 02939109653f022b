"""There is one table of ops, and everything that it names exists."""

from __future__ import annotations

import inspect

import pytest
import torch

from npu_patch import registry
from npu_patch.registry import LIBRARIES, OPS


def test_every_op_is_found_in_some_library_and_no_library_finds_another():
    names = [op.name for op in OPS]
    assert len(set(names)) == len(names)
    assert {op for library in LIBRARIES for op in library.finders} == set(names)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_everything_that_a_library_names_can_be_loaded(library):
    modules = registry.load(library.modules)()
    assert modules
    assert all(name.partition(".")[0] == library.name for name in modules)
    for finder in library.finders.values():
        assert len(inspect.signature(registry.load(finder)).parameters) == 1


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_operator_of_the_table_exists_in_torch_npu(op):
    torch.zeros(1, device="npu")
    assert op.operators
    assert [name for name in op.operators if not hasattr(torch.ops.npu, name)] == []


def test_aliases_do_not_collide_with_names_or_with_each_other():
    aliases = [alias for op in OPS for alias in op.aliases]
    assert len(set(aliases)) == len(aliases)
    assert not set(aliases) & {op.name for op in OPS}
