"""The limits of the rotary operator for A2 and A3, one by one."""

from __future__ import annotations

import pytest
import torch

from npu_patch.ops import rope

from .tools import random

LAYOUT = "table layout is not 1S1D, BS1D, S11D or of the input's shape"
SHARED = "interleave needs tables shared by the batch and the heads"
BACKWARD = "gradient to the tables with batch times heads above 1024"


def judge(shape: tuple[int, ...], table: tuple[int, ...], mode: str = "half", learned: bool = False) -> str | None:
    return rope.judge(shape, table, torch.float32, torch.device("npu"), mode, learned)


@pytest.mark.parametrize(
    ("shape", "table", "reason"),
    [
        ((1, 1, 5, 2, 8), (1, 1, 5, 1, 8), "the input and the tables are not both 3-D or both 4-D"),
        ((5, 4, 8), (5, 2, 8), "table layout is not T1D or TND"),
        ((5, 4, 8), (5, 4, 8), None),
        ((4, 5, 2, 8), (2, 5, 1, 8), "the tables do not broadcast to the input"),
        ((4, 5, 2, 8), (1, 5, 1, 8), None),
        ((4, 5, 2, 8), (4, 5, 1, 8), None),
        ((1, 5, 4, 8), (1, 5, 2, 8), "the tables do not broadcast to the input"),
        ((5, 2, 3, 8), (5, 1, 1, 8), None),  # (S, B, N, D)
        ((2, 5, 3, 8), (2, 1, 3, 8), None),  # (B, N, S, D)
        ((5, 2, 3, 8), (5, 2, 3, 8), None),
        ((2, 5, 3, 8), (1, 1, 1, 8), LAYOUT),
        ((2, 5, 3, 8), (1, 5, 3, 8), LAYOUT),
        ((1000, 1, 1, 2), (1, 1, 1, 2), "batch or heads of 1000 or above"),
        ((999, 1, 1, 2), (1, 1, 1, 2), None),
        ((1, 1, 1000, 2), (1, 1, 1, 2), "batch or heads of 1000 or above"),
        ((1, 1, 999, 2), (1, 1, 1, 2), None),
        ((2, 999, 2), (2, 1, 2), None),
        ((1, 2, 2, 894), (1, 2, 1, 894), None),
    ],
    ids=str,
)
def test_half(shape: tuple[int, ...], table: tuple[int, ...], reason: str | None) -> None:
    assert judge(shape, table) == reason


@pytest.mark.parametrize(
    ("shape", "table", "reason"),
    [
        ((2, 5, 3, 8), (1, 5, 1, 8), None),
        ((1, 5, 3, 8), (1, 5, 1, 8), None),
        ((2, 5, 3, 8), (2, 5, 1, 8), SHARED),
        ((1, 5, 3, 8), (1, 5, 3, 8), SHARED),
        ((27, 2, 37, 2), (1, 2, 1, 2), None),
        ((25, 2, 40, 2), (1, 2, 1, 2), "batch times heads of 1000 or above"),
        ((5, 2, 8), (5, 1, 8), None),
    ],
    ids=str,
)
def test_interleave(shape: tuple[int, ...], table: tuple[int, ...], reason: str | None) -> None:
    assert judge(shape, table, "interleave") == reason


@pytest.mark.parametrize(
    ("shape", "table", "reason"),
    [
        ((32, 2, 32, 2), (1, 2, 1, 2), None),
        ((25, 2, 41, 2), (1, 2, 1, 2), BACKWARD),
        ((5, 2, 3, 8), (1, 2, 1, 8), None),
        ((5, 2, 3, 8), (5, 2, 3, 8), None),
        ((4, 5, 3, 8), (4, 5, 1, 8), None),
        ((5, 5, 3, 8), (5, 5, 1, 8), "gradient to the tables with a batch not below the sequence length"),
    ],
    ids=str,
)
def test_learned_tables(shape: tuple[int, ...], table: tuple[int, ...], reason: str | None) -> None:
    assert judge(shape, table, learned=True) == reason


@pytest.mark.parametrize("which", ["cos", "sin"])
def test_one_learned_table_is_one_too_many(which: str) -> None:
    x, table = random(5, 2, 5, 8, grad=False), random(5, 1, 5, 8, grad=False)
    learned = table.clone().requires_grad_()
    cos, sin = (learned, table) if which == "cos" else (table, learned)
    reason = "gradient to the tables with a batch not below the sequence length"
    assert rope.unsupported(x, cos, sin, "half") == reason
    assert rope.unsupported(x, table, table, "half") is None


@pytest.mark.parametrize("which", ["cos", "sin"])
def test_one_learned_table_gets_its_gradient(which: str) -> None:
    x, cos, sin = random(2, 5, 3, 8), random(1, 5, 1, 8, seed=1, grad=False), random(1, 5, 1, 8, seed=2, grad=False)
    learned = (cos if which == "cos" else sin).requires_grad_()
    swapped = torch.cat((-x[..., 4:], x[..., :4]), -1)
    expected = torch.autograd.grad((x * cos + swapped * sin).square().sum(), (x, learned))
    found = torch.autograd.grad(rope.rotate(x, cos, sin, "half").square().sum(), (x, learned))
    torch.testing.assert_close(found, expected)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("which", [0, 1, 2])
def test_each_tensor_is_a_plain_one(which: int) -> None:
    tensors = [random(1, 5, 2, 8, grad=False), random(1, 5, 1, 8, grad=False), random(1, 5, 1, 8, grad=False)]
    tensors[which] = tensors[which].as_subclass(Subclass)
    assert rope.unsupported(*tensors, "half") == "Subclass is not a plain tensor"
    tensors[which] = torch.nn.Parameter(tensors[which].as_subclass(torch.Tensor), requires_grad=False)
    assert rope.unsupported(*tensors, "half") is None


def test_layout_of_heads_before_tokens() -> None:
    assert rope.is_bnsd((2, 4, 5, 8), (1, 1, 5, 8))
    assert rope.is_bnsd((2, 1, 5, 8), (1, 1, 5, 8))
    assert rope.is_bnsd((2, 4, 1, 8), (1, 1, 1, 8))
    assert not rope.is_bnsd((2, 1, 1, 8), (1, 1, 1, 8))
    assert not rope.is_bnsd((2, 5, 5, 8), (2, 5, 5, 8))
    assert not rope.is_bnsd((2, 4, 5, 8), (1, 1, 1, 8))
    assert not rope.is_bnsd((4, 5, 8), (4, 1, 8))


def test_an_adjoint_is_needed_where_a_backward_is_recorded() -> None:
    x, plain = random(2, 8), random(2, 8, grad=False)
    assert rope.needs_adjoint(x)
    assert rope.needs_adjoint(x, plain)
    assert rope.needs_adjoint(plain, x)
    assert not rope.needs_adjoint(plain)
    assert not rope.needs_adjoint(plain, plain)
    with torch.no_grad():
        assert not rope.needs_adjoint(x, x)
