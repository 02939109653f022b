from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from .helpers import assert_near, assert_same_function, values

pytestmark = pytest.mark.usefixtures("simulated")

OPS = torch.ops.npu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def scores(x: Tensor, norm_type: int) -> Tensor:
    return x.sigmoid() if norm_type == 1 else x.softmax(-1)


def chosen(x: Tensor, index: Tensor, norm_type: int, scale: float = 1.0, eps: float = 1e-20) -> Tensor:
    y = scores(x, norm_type).gather(1, index)
    return (y / (y.sum(-1, keepdim=True) + eps) if norm_type == 1 else y) * scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_type", [0, 1])
def test_sigmoid_weights_are_divided_by_their_sum_and_softmax_weights_are_not(
    norm_type: int, dtype: torch.dtype
) -> None:
    x = values(9, 16, dtype=dtype)
    y, index, all_scores = OPS.npu_moe_gating_top_k(
        x.npu(), 4, norm_type=norm_type, routed_scaling_factor=2.5, out_flag=True
    )
    exact = x.double()
    assert (y.dtype, index.dtype, all_scores.dtype) == (dtype, torch.int32, torch.float32)
    assert_near(all_scores, scores(exact, norm_type), 3e-6)
    assert torch.equal(index.cpu().long().sort(-1).values, exact.topk(4).indices.sort(-1).values)
    assert_near(y, chosen(exact, index.cpu().long(), norm_type, 2.5), 3e-6 if dtype == torch.float32 else 2**-7)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    x, bias = values(6, 8), torch.zeros(8)
    bias[5] = 10.0
    y, index, _ = OPS.npu_moe_gating_top_k(x.npu(), 2, bias=bias.npu(), norm_type=1)
    assert (index[:, 0] == 5).all()
    assert_near(y, chosen(x.double(), index.cpu().long(), 1), 3e-6)


@pytest.mark.parametrize(("mode", "expected"), [(0, {4, 5}), (1, {0, 1})])
def test_groups_count_by_their_best_expert_or_by_their_best_two(mode: int, expected: set[int]) -> None:
    x = torch.tensor([[2.0, 1.9, -9.0, -9.0, 2.1, 0.5, -9.0, -9.0]])
    index = OPS.npu_moe_gating_top_k(x.npu(), 2, k_group=1, group_count=2, group_select_mode=mode, norm_type=1)[1]
    assert set(index.cpu().flatten().tolist()) == expected


def test_of_equal_scores_the_lower_expert_comes_first() -> None:
    x = torch.zeros(2, 8).npu()
    x[1, 6] = 1.0
    calls = (
        lambda: OPS.npu_moe_gating_top_k(x, 3, norm_type=1),
        lambda: OPS.npu_moe_gating_top_k(x, 3),
        lambda: OPS.npu_moe_gating_top_k_softmax(x, None, 3),
        lambda: OPS.npu_moe_gating_top_k_softmax_v2(x, k=3, renorm=1),
    )
    for call in calls:
        assert call()[1].tolist() == [[0, 1, 2], [6, 0, 1]]


def test_scores_that_were_not_asked_for_are_not_written() -> None:
    x = values(3, 8).npu().requires_grad_()
    y, _, all_scores = OPS.npu_moe_gating_top_k(x, 2, norm_type=1)
    assert all_scores.isnan().all()
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.isnan().any()  # the gradient reads them


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_sigmoid_weights(dtype: torch.dtype) -> None:
    index = OPS.npu_moe_gating_top_k(values(7, 12, dtype=dtype).npu(), 3, norm_type=1)[1].cpu().long()
    assert_same_function(
        lambda x: OPS.npu_moe_gating_top_k(x, 3, norm_type=1, out_flag=True, routed_scaling_factor=2.5, eps=0.5)[0],
        lambda x: chosen(x, index, 1, 2.5, 0.5),
        [values(7, 12, dtype=dtype)],
        None if dtype == torch.float32 else 2**-6,
    )


def test_softmax_weights_have_no_gradient() -> None:
    x = values(3, 8).npu().requires_grad_()
    y = OPS.npu_moe_gating_top_k(x, 2, norm_type=0, out_flag=True)[0]
    with pytest.raises(RuntimeError, match="softmax has no gradient"):
        y.sum().backward()


def test_the_gradient_is_not_documented_for_ascend950(as_soc: Callable[[str], None]) -> None:
    as_soc("Ascend950")
    with pytest.raises(RuntimeError, match="not documented for this chip"):
        OPS.npu_moe_gating_top_k_backward(
            torch.rand(2, 4).npu(),
            values(2, 2).npu(),
            torch.tensor([[0, 1], [2, 3]], dtype=torch.int32).npu(),
            norm_type=1,
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k": 0}, r"k: 0 is not in \[1, 8\]"),
        ({"k": 9}, r"k: 9 is not in \[1, 8\]"),
        ({"group_count": 3}, "cannot be split"),
        ({"group_count": 4}, "2 experts in a group"),
        ({"group_count": 2, "k_group": 3}, "k_group: 3"),
        ({"group_count": 2, "k_group": 1, "k": 5}, r"k: 5 is not in \[1, 4\]"),
        ({"renorm": 1}, "renorm: 1"),
        ({"norm_type": 2}, "norm_type: 2"),
        ({"bias": torch.zeros(8, dtype=torch.bfloat16)}, "dtype of x and bias"),
        ({"bias": torch.zeros(7)}, "bias first dim"),
    ],
)
def test_calls_outside_of_the_documents_are_refused(changes: dict[str, Any], words: str) -> None:
    arguments = {"k": 2, "norm_type": 1} | changes
    arguments = {name: one.npu() if isinstance(one, Tensor) else one for name, one in arguments.items()}
    with pytest.raises(RuntimeError, match=words):
        OPS.npu_moe_gating_top_k(values(3, 8).npu(), arguments.pop("k"), **arguments)


@pytest.mark.parametrize(("experts", "groups"), [(2049, 1), (2 * 65 * 33, 65)])
def test_too_many_experts_are_refused(experts: int, groups: int) -> None:
    with pytest.raises(RuntimeError, match="at most 2048"):
        OPS.npu_moe_gating_top_k(values(1, experts).npu(), 1, group_count=groups, k_group=groups, norm_type=1)


def test_expert_ids_outside_are_refused_in_the_gradient() -> None:
    index = torch.tensor([[0, 4]], dtype=torch.int32).npu()
    with pytest.raises(RuntimeError, match=r"experts must be in \[0, 4\)"):
        OPS.npu_moe_gating_top_k_backward(torch.rand(1, 4).npu(), values(1, 2).npu(), index, norm_type=1)


# ---- softmax ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 12), (2, 3, 12)])
def test_softmax_then_the_best(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = values(*shape, dtype=dtype)
    y, index, row = OPS.npu_moe_gating_top_k_softmax(x.npu(), None, 3)
    rows = index.numel() // 3
    expected = x.double().softmax(-1).gather(-1, index.cpu().long())
    assert_near(y, expected, 3e-6 if dtype == torch.float32 else 2**-7)
    assert torch.equal(row.cpu().view(rows, 3), torch.arange(3 * rows, dtype=torch.int32).view(3, rows).t())
    second, third, everything = OPS.npu_moe_gating_top_k_softmax_v2(x.npu(), k=3, output_softmax=True)
    assert torch.equal(second, y)
    assert torch.equal(third, index)
    assert_near(everything, x.double().softmax(-1), 3e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_best_then_softmax(dtype: torch.dtype) -> None:
    x = values(5, 12, dtype=dtype)
    y, index, nothing = OPS.npu_moe_gating_top_k_softmax_v2(x.npu(), k=3, renorm=1, output_softmax=True)
    expected = x.double().gather(-1, index.cpu().long()).softmax(-1)
    assert_near(y, expected, 3e-6 if dtype == torch.float32 else 2**-7)
    assert nothing.numel() == 0


def test_finished_rows_get_the_number_of_experts() -> None:
    x, finished = values(3, 5).npu(), torch.tensor([False, True, False]).npu()
    for index in (
        OPS.npu_moe_gating_top_k_softmax(x, finished, 2)[1],
        OPS.npu_moe_gating_top_k_softmax_v2(x, k=2, finished=finished)[1],
    ):
        assert (index[1] == 5).all()
        assert (index[0] < 5).all()


def test_softmax_operators_have_no_gradient() -> None:
    x = values(3, 5).npu().requires_grad_()
    with pytest.raises(RuntimeError, match="not implemented"):
        OPS.npu_moe_gating_top_k_softmax(x, None, 2)[0].sum().backward()


@pytest.mark.parametrize(("k", "experts", "words"), [(6, 5, "k should be in"), (1025, 2000, "k: 1025 is not in")])
def test_more_experts_than_there_are_or_than_documented_are_refused(k: int, experts: int, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        OPS.npu_moe_gating_top_k_softmax(values(2, experts).npu(), None, k)
