"""Matrix multiplication by groups of rows, against loops over the groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from .helpers import TOLERANCE, assert_near, values

pytestmark = pytest.mark.usefixtures("simulated")

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
COUNTS = torch.tensor([2, 0, 3])
npu = torch.ops.npu


def call(x: Tensor, weight: Tensor | list[Tensor], **changes: Any) -> Tensor:
    given = {"group_list": COUNTS, "split_item": 3, "group_type": 0, "group_list_type": 1, **changes}
    moved = {name: one.npu() if isinstance(one, Tensor) else one for name, one in given.items()}
    if given.get("bias") is not None:
        moved["bias"] = [given["bias"].npu()]
    weights = weight if isinstance(weight, list) else [weight]
    result: Tensor = npu.npu_grouped_matmul([on_npu(x)], [on_npu(one) for one in weights], **moved)[0].cpu()
    return result


def on_npu(tensor: Tensor) -> Tensor:
    """Strides kept."""
    last = tensor.dim() - 1
    if last and not tensor.is_contiguous() and tensor.transpose(last, last - 1).is_contiguous():
        return tensor.transpose(last, last - 1).npu().transpose(last, last - 1)
    return tensor.npu()


def rows_of(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    first, last = x[:2] @ weight[0], x[2:5] @ weight[2]
    if bias is not None:
        first, last = first + bias[0], last + bias[2]
    return torch.cat([first, last])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "list", "list of transposed"])
@pytest.mark.parametrize("group_list", [(COUNTS, 1), (COUNTS.cumsum(0), 0)])
@pytest.mark.parametrize("split_item", [2, 3])
def test_rows_of_each_group_are_multiplied_by_its_matrix(dtype, layout, group_list, split_item) -> None:
    x, weight = values(5, 4, dtype=dtype), values(3, 4, 6, dtype=dtype)
    given: Any = weight
    if "transposed" in layout:
        given = weight.transpose(1, 2).contiguous().transpose(1, 2)
    if "list" in layout:
        if dtype == torch.float32:
            pytest.skip("float32 in one tensor only")
        given = [one for one in given]  # noqa: C416
    options = {"group_list": group_list[0], "group_list_type": group_list[1], "split_item": split_item}
    y = call(x, given, **options)
    assert y.dtype == dtype
    assert_near(y, rows_of(x.double(), weight.double()), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_bias_is_added_before_the_only_rounding(dtype) -> None:
    x, weight, bias = values(5, 4, dtype=dtype), values(3, 4, 6, dtype=dtype), values(3, 6, seed=1, dtype=dtype)
    given = bias.float() if dtype == torch.bfloat16 else bias
    y = call(x, weight, bias=given)
    exact = rows_of(x.double(), weight.double(), bias.double())
    assert_near(y, exact, TOLERANCE[dtype])
    assert ((y.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps / 2 * 1.01 + 1e-5).all()


def test_rows_past_the_last_group_are_undefined() -> None:
    y = call(values(7, 4), values(3, 4, 6))
    assert [bool(row.isnan().all()) for row in y] == [False] * 5 + [True] * 2


@pytest.mark.parametrize("dtype", FLOATS)
def test_columns_of_each_group_are_multiplied_and_an_empty_group_is_undefined(dtype) -> None:
    x, right = values(5, 4, dtype=dtype), values(5, 6, seed=1, dtype=dtype)
    y = call(x.t(), right, group_type=2)
    assert y.shape == (3, 4, 6)
    assert_near(y[0], x[:2].double().t() @ right[:2].double(), TOLERANCE[dtype])
    assert_near(y[2], x[2:].double().t() @ right[2:].double(), TOLERANCE[dtype])
    assert y[1].isnan().all()


X, W = values(5, 4), values(3, 4, 6)
HALVES = [one.half() for one in W]


@pytest.mark.parametrize(
    ("x", "weight", "changes", "reason"),
    [
        (X.double(), W.double(), {}, "x: dtype"),
        (X, W.half(), {}, "weight: dtype"),
        (X, list(W), {}, "float32 is supported in one tensor only"),
        (X, W, {"bias": values(3, 6).half()}, "bias: dtype"),
        (X.bfloat16(), W.bfloat16(), {"bias": values(3, 6).bfloat16()}, "bias: dtype"),
        (X, W, {"bias": values(3, 5)}, "bias: shape"),
        (X.half(), HALVES, {"bias": values(3, 6).half()}, "one tensor only"),
        (X.half(), [HALVES[0], HALVES[1], HALVES[2].t().contiguous().t()], {}, "some are transposed"),
        (X, W, {"group_list": COUNTS.int()}, "group_list: dtype"),
        (X, W, {"group_list": COUNTS[:2]}, "2 of 3 groups"),
        (X, W, {"group_list": COUNTS + 1}, "8 rows in groups, there are 5"),
        (X, W, {"group_list": torch.tensor([3, -1, 3])}, "below zero"),
        (X, W, {"group_list": torch.tensor([3, 2, 5]), "group_list_type": 0}, "decrease"),
        (X, W, {"group_list_type": 2}, "group_list_type"),
        (X, W, {"split_item": 1, "group_list": torch.tensor([1, 2, 5]), "group_list_type": 0}, "split_item"),
        (X, W, {"group_type": -1}, "group_type"),
        (X, W[:1], {"group_list": torch.tensor([5])}, "1 groups, of 2"),
        (X[:, :1], values(1025, 1, 1), {"group_list": torch.zeros(1025, dtype=torch.int64)}, "must be contiguous|1025"),
        (values(5, 1).half(), [values(1, 1).half()] * 129, {"group_list": torch.ones(129).long()}, "129 groups"),
        (X[:0], W, {"group_list": COUNTS * 0}, "empty"),
        (values(4, 5).t(), W, {}, "must be contiguous for group_type 0"),
        (values(5, 3), W, {}, "k is 4"),
        (X[:, :1].contiguous(), values(3, 1, 65536), {}, "a last dimension of 65536"),
        (values(5, 65536), values(3, 65536, 1), {}, "a last dimension of 65536"),
        (X, values(5, 6), {"group_type": 2}, "must be a transposed matrix"),
        (X.t(), values(3, 5, 6), {"group_type": 2}, "one tensor|length of weight"),
        (X.t(), values(6, 5).t(), {"group_type": 2}, "must be contiguous for group_type 2"),
        (X.t(), values(4, 6), {"group_type": 2}, "m is 4"),
        (X.t(), values(5, 6), {"group_type": 2, "bias": values(3, 6)}, "bias"),
    ],
)
def test_what_is_not_documented_is_refused(x, weight, changes, reason) -> None:
    with pytest.raises(RuntimeError, match=reason):
        call(x, weight, **changes)


def test_a_matrix_that_is_neither_contiguous_nor_transposed_is_refused() -> None:
    weight = values(3, 4, 12).npu()[..., ::2]
    options = {"group_list": COUNTS.npu(), "split_item": 3, "group_type": 0, "group_list_type": 1}
    with pytest.raises(RuntimeError, match="neither contiguous nor a transposed"):
        npu.npu_grouped_matmul([X.npu()], [weight], **options)


def test_autocast_does_not_reach_the_kernel() -> None:
    exact = call(X, W)
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert torch.equal(call(X, W), exact)


def test_the_operator_has_no_derivative(capfd: pytest.CaptureFixture[str]) -> None:
    x, options = X.npu().requires_grad_(), {"split_item": 3, "group_type": 0, "group_list_type": 1}
    (y,) = npu.npu_grouped_matmul([x], [W.npu()], group_list=COUNTS.npu(), **options)
    y.sum().backward()
    assert "an autograd kernel was not registered" in capfd.readouterr().err
    assert x.grad is None
