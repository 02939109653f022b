"""What the grouped multiplication cannot take, by reason."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from npu_patch.ops import availability
from npu_patch.ops import gmm as op
from npu_patch.ops.gmm_list import grouped_matmul_list, unsupported_list

from .tools import random


class Subclass(torch.Tensor):
    pass


def groups(experts: int = 2, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.ones(experts, device="npu").to(dtype)


def stacked(experts: int = 2, k: int = 4, n: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    return random(experts, k, n, grad=False).to(dtype)


def rows(k: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return random(2, k, grad=False).to(dtype)


SHAPES = "rows and matrices are not (rows, k) and (experts, k, n)"
COUNTS = "the counts are not one integer for each expert"
TYPES = "rows, matrices and biases differ in type"
CASES = {
    "not on an NPU": [lambda: (torch.ones(2, 4), torch.ones(2, 4, 6), torch.ones(2, dtype=torch.int64))],
    "rows, matrices and counts are not on one device": [
        lambda: (rows(), stacked(), groups().cpu()),
        lambda: (rows(), stacked().cpu(), groups()),
        lambda: (rows(), stacked(), groups(), torch.ones(2, 6)),
    ],
    "rows of type float64": [lambda: (rows(dtype=torch.float64), stacked(dtype=torch.float64), groups())],
    "rows of type int32": [lambda: (rows(dtype=torch.int32), stacked(dtype=torch.int32), groups())],
    TYPES: [
        lambda: (rows(dtype=torch.bfloat16), stacked(), groups()),
        lambda: (rows(), stacked(dtype=torch.float16), groups()),
        lambda: (rows(), stacked(), groups(), random(2, 6, dtype=torch.bfloat16)),
    ],
    SHAPES: [
        lambda: (rows(5), stacked(), groups()),
        lambda: (random(1, 2, 4), stacked(), groups()),
        lambda: (rows(), stacked()[0], groups()),
    ],
    COUNTS: [
        lambda: (rows(), stacked(), groups(3)),
        lambda: (rows(), stacked(), groups().view(1, 2)),
        lambda: (rows(), stacked(), groups(dtype=torch.float32)),
    ],
    "the biases are not (experts, n)": [
        lambda: (rows(), stacked(), groups(), random(6)),
        lambda: (rows(), stacked(), groups(), random(2, 1)),
    ],
    "the matrices are empty": [
        lambda: (rows(), stacked(n=0), groups()),
        lambda: (rows(0), stacked(k=0), groups()),
        lambda: (rows(), stacked(0), groups(0)),
    ],
    "matrices of size 65536 or above": [
        lambda: (rows(1), stacked(k=1, n=65536), groups()),
        lambda: (rows(65536), stacked(k=65536, n=1), groups()),
        lambda: (rows(65536), stacked(n=65536, k=1).transpose(1, 2), groups()),
    ],
    "more than 1024 experts": [lambda: (rows(1), stacked(1025, 1, 1), groups(1025))],
}
PAIRS = [(reason, make) for reason, makes in CASES.items() for make in makes]


@pytest.mark.parametrize(("reason", "make"), PAIRS)
def test_what_cannot_be_taken_has_a_reason(reason, make):
    assert op.unsupported(*make()) == reason


def call(x: Tensor, weight: Tensor, group_list: Tensor, bias: Tensor | None = None) -> None:
    x, weight = x.requires_grad_(x.is_floating_point()), weight.requires_grad_(weight.is_floating_point())
    y = op.grouped_matmul(x, weight, group_list, cumulative=False, bias=bias)
    y.backward(torch.ones_like(y))


@pytest.mark.parametrize(("reason", "make"), PAIRS)
def test_without_the_guard_it_fails(reason, make):
    given = make()
    if reason == COUNTS and given[2].dtype == torch.float32:
        pytest.skip("would be rounded to integers")
    with pytest.raises((RuntimeError, NotImplementedError, IndexError)):
        call(*given)


def test_the_last_sizes_of_the_limits_are_taken():
    for given in ((rows(1), stacked(k=1, n=65535), groups()), (rows(1), stacked(1024, 1, 1), groups(1024))):
        given[2].zero_()
        assert op.unsupported(*given) is None
        call(*given)


@pytest.mark.parametrize("index", range(4))
def test_a_subclass_has_a_reason(index):
    given = [rows(), stacked(), groups(), random(2, 6, grad=False)]
    given[index] = given[index].as_subclass(Subclass)
    assert op.unsupported(*given) == "Subclass is not a plain tensor"


def test_the_operator_takes_a_subclass_and_loses_the_class():
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [rows().as_subclass(Subclass)], [stacked()], group_list=groups(), split_item=3, group_type=0, group_list_type=1
    )
    assert op.unsupported(y.as_subclass(Subclass), stacked(k=6), groups()) is not None


def test_a_function_transform_has_a_reason():
    reasons, weight, counts = [], stacked(), groups()

    def f(x: Tensor) -> Tensor:
        reasons.append(op.unsupported(x, weight, counts))
        return x.sum()

    torch.func.grad(f)(rows())
    torch.vmap(f)(random(3, 2, 4, grad=False))
    with torch.autograd.forward_ad.dual_level():
        f(rows())
    assert reasons == ["a torch.func transform or forward-mode differentiation is active"] * 3


def test_under_a_function_transform_it_fails_without_the_guard():
    weight, counts = stacked(), groups()
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda x: op.grouped_matmul(x, weight, counts, cumulative=False).sum())(rows())


def test_float32_has_a_reason_on_ascend950(monkeypatch):
    monkeypatch.setattr(op, "is_ascend950", lambda: True)
    given = (rows(), stacked(), groups())
    facts = given[0].shape, given[0].dtype, given[0].device, given[1].shape, given[1].dtype, given[2].shape
    assert op._judge(*facts, torch.int64, None, None) == "float32 on Ascend950"
    assert availability.soc_name()


MIXED = {
    "no expert": lambda: (rows(), [], groups(0)),
    "the matrices of the experts differ in shape": lambda: (rows(), [stacked()[0], stacked(n=5)[0]], groups()),
    "the matrices of the experts differ in type or device": lambda: (
        rows(),
        [stacked()[0], stacked(dtype=torch.float16)[0]],
        groups(),
    ),
    TYPES: lambda: (rows(), list(stacked(dtype=torch.float16)), groups()),
    SHAPES: lambda: (rows(5), list(stacked()), groups()),
    COUNTS: lambda: (rows(), list(stacked(3)), groups()),
    "not on an NPU": lambda: (torch.ones(2, 4), list(torch.ones(2, 4, 6)), torch.ones(2, dtype=torch.int64)),
    "matrices of size 65536 or above": lambda: (rows(1), list(stacked(k=1, n=65536)), groups()),
    "more than 1024 experts": lambda: (rows(1), list(stacked(1025, 1, 1)), groups(1025)),
}


@pytest.mark.parametrize("reason", MIXED)
def test_lists_that_cannot_be_taken_have_a_reason(reason):
    given = MIXED[reason]()
    assert unsupported_list(*given) == reason
    if "differ in type" in reason and given[0].dtype == given[1][0].dtype:
        return  # stacking would promote them
    with pytest.raises((RuntimeError, IndexError, NotImplementedError)):
        grouped_matmul_list(*given, cumulative=False)


def test_a_subclass_in_a_list_has_a_reason():
    given = [stacked()[0], stacked()[0].as_subclass(Subclass)]
    assert unsupported_list(rows(), given, groups()) == "Subclass is not a plain tensor"
    mixed = [stacked()[0], stacked()[0].cpu()]
    assert unsupported_list(rows(), mixed, groups()) == "the matrices of the experts differ in type or device"
