"""The type checker of `spmd_types` is a torch function mode: without any mode it is not asked."""

from __future__ import annotations

import pytest
import torch

from npu_patch.adapters.torchtitan.typecheck import type_checking, watched


def test_the_checker_is_seen_while_it_watches():
    checker = pytest.importorskip("spmd_types._checker")
    assert not watched()
    with checker.typecheck():
        assert watched()
        assert type_checking()
        with checker.no_typecheck():
            assert not watched()
    assert not type_checking()


def test_another_function_mode_is_no_checker():
    with torch.overrides.TorchFunctionMode():
        assert not watched()
