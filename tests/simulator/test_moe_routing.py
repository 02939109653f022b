"""The routing operators of inference, against loops over tokens and slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from .helpers import values

pytestmark = pytest.mark.usefixtures("simulated")

npu = torch.ops.npu
TOKENS, EXPERTS, TOP_K = 5, 4, 2
IDS = torch.tensor([[3, 0], [1, 3], [0, 2], [3, 1], [2, 3]], dtype=torch.int32)
BY_COLUMN = torch.arange(10, dtype=torch.int32).view(TOP_K, TOKENS).t().contiguous()


def on_npu(function: Any, *args: Any, **kwargs: Any) -> Any:
    moved = [x.npu() if isinstance(x, Tensor) else x for x in args]
    named = {name: x.npu() if isinstance(x, Tensor) else x for name, x in kwargs.items()}
    result = function(*moved, **named)
    return result.cpu() if isinstance(result, Tensor) else tuple(x.cpu() for x in result)


def sorted_copies() -> list[tuple[int, int]]:
    """(token, slot), sorted by expert, then token, then slot."""
    return [(t, s) for _, t, s in sorted((int(IDS[t, s]), t, s) for t in range(TOKENS) for s in range(TOP_K))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("active", [0, 3, 5, 9])
def test_init_routing_counts_places_by_column(dtype: torch.dtype, active: int) -> None:
    x, order = values(TOKENS, 3, dtype=dtype), sorted_copies()
    expanded, index, experts = on_npu(npu.npu_moe_init_routing, x, BY_COLUMN, IDS, active)
    assert torch.equal(expanded, x[[t for t, _ in order[: min(active, TOKENS) * TOP_K]]])
    assert experts.tolist() == sorted(IDS.flatten().tolist())
    for row, (t, s) in enumerate(order):
        assert index[s * TOKENS + t] == row
    assert index.tolist() != [order.index((t, s)) for t in range(TOKENS) for s in range(TOP_K)]  # by row


def v2(x: Tensor, ids: Tensor = IDS, **changes: Any) -> Any:
    arguments = {"expert_num": EXPERTS, "active_num": 0, "expert_tokens_num_flag": True, **changes}
    return on_npu(npu.npu_moe_init_routing_v2, x, ids, **arguments)


def test_init_routing_v2_counts_places_by_row_as_the_permuting_operator_does() -> None:
    x, order = values(TOKENS, 3), sorted_copies()
    expanded, index, numbers, scale = v2(x)
    assert torch.equal(expanded, x[[t for t, _ in order]])
    assert index.tolist() == [order.index((t, s)) for t in range(TOKENS) for s in range(TOP_K)]
    permuted, sorted_indices = on_npu(npu.npu_moe_token_permute, x, IDS)
    assert torch.equal(expanded, permuted)
    assert torch.equal(index, sorted_indices)
    assert (numbers.tolist(), numbers.dtype) == ([2, 4, 6, 10], torch.int64)
    assert scale.isnan().all()  # undefined without a scale


def test_init_routing_v2_gives_sums_counts_or_pairs() -> None:
    ids = torch.tensor([[3, 0], [3, 0]], dtype=torch.int32)
    x = values(2, 3)
    assert v2(x, ids, expert_tokens_num_type=0)[2].tolist() == [2, 2, 2, 4]
    assert v2(x, ids, expert_tokens_num_type=1)[2].tolist() == [2, 0, 0, 2]
    pairs = v2(x, ids, expert_tokens_num_type=2)[2]
    assert pairs[:2].tolist() == [[0, 2], [3, 2]]
    nothing = torch.iinfo(torch.int64).min
    assert pairs[2:].flatten().tolist() == [nothing] * 4
    assert v2(x, ids, expert_tokens_num_flag=False)[2].tolist() == [nothing] * 4


@pytest.mark.parametrize("row_idx_type", [0, 1])
def test_init_routing_v2_of_some_experts_marks_the_other_places(row_idx_type: int) -> None:
    x, scale = values(TOKENS, 3), values(TOKENS, seed=1)
    active = [(t, s) for t, s in sorted_copies() if 1 <= IDS[t, s] < 3]
    expanded, index, numbers, scales = v2(
        x, scale=scale, active_expert_range=[1, 3], row_idx_type=row_idx_type, expert_tokens_num_type=1
    )
    assert torch.equal(expanded[: len(active)], x[[t for t, _ in active]])
    assert torch.equal(scales[: len(active)], scale[[t for t, _ in active]])
    assert expanded[len(active) :].isnan().all()
    assert scales[len(active) :].isnan().all()
    assert numbers.tolist() == [2, 2]
    if row_idx_type == 0:
        places = {(t, s): row for row, (t, s) in enumerate(active)}
        assert index.tolist() == [places.get((t, s), -1) for t in range(TOKENS) for s in range(TOP_K)]
    else:
        assert index[: len(active)].tolist() == [t * TOP_K + s for t, s in active]
        assert (index[len(active) :] == torch.iinfo(torch.int32).min).all()


def test_init_routing_v2_with_active_num_keeps_the_first_rows() -> None:
    x = values(TOKENS, 3)
    expanded = v2(x, active_num=4)[0]
    assert torch.equal(expanded, x[[t for t, _ in sorted_copies()[:4]]])


def test_init_routing_v2_with_a_capacity_drops_and_fills_up() -> None:
    x = values(TOKENS, 3)
    expanded, index, numbers, _ = v2(x, drop_pad_mode=1, expert_capacity=3, expert_tokens_num_type=1)
    own = {e: [(t, s) for t, s in sorted_copies() if IDS[t, s] == e] for e in range(EXPERTS)}
    assert numbers.tolist() == [2, 2, 2, 4]
    for e, places in own.items():
        for c in range(3):
            assert torch.equal(expanded[e, c], x[places[c][0]] if c < len(places) else torch.zeros(3))
        for c, (t, s) in enumerate(places):
            assert index[t * TOP_K + s] == (e * 3 + c if c < 3 else -1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quant_mode": 1}, "quant_mode: 1 quantises"),
        ({"quant_mode": 0}, "quant_mode: 0 quantises"),
        ({"active_num": -1}, "active_num: -1 is negative"),
        ({"expert_num": -1}, "expert_num"),
        ({"expert_num": 3}, "expert_idx: must be in"),
        ({"expert_num": 10241}, "expert_num"),
        ({"active_expert_range": [2, 5]}, "active_expert_range"),
        ({"active_expert_range": [2, 2]}, "active_expert_range|negative dimension"),
        ({"row_idx_type": 2}, "row_idx_type"),
        ({"expert_tokens_num_type": 3}, "expert_tokens_num_type|must be 0 or 1 or 2|only support"),
        ({"drop_pad_mode": 1, "expert_capacity": 3}, "expert_tokens_num_type: must be 1"),
        ({"drop_pad_mode": 1, "expert_capacity": 5, "expert_tokens_num_type": 1}, "expert_capacity: 5 for 5"),
        ({"offset": values(TOKENS)}, "offset"),
        ({"scale": values(3)}, "scale: 3 elements"),
        ({"ids": IDS.long()}, "expert_idx: dtype"),
        ({"ids": IDS - 1}, "expert_idx: must be in"),
        ({"x": values(4, 3)}, "expert_idx: 5 rows for 4 tokens"),
        ({"x": values(TOKENS, 3).double()}, "x: dtype"),
    ],
)
def test_init_routing_v2_refuses_what_is_not_documented(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        v2(**{"x": values(TOKENS, 3), **changes})


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((values(TOKENS, 3).double(), BY_COLUMN, IDS, 5), "tensor expected"),
        ((values(4, 3), BY_COLUMN, IDS, 5), "rows shoud be same"),  # torch_npu says so itself
        ((values(TOKENS, 3), BY_COLUMN[1:], IDS, 5), "row_idx"),
        ((values(TOKENS, 3), BY_COLUMN + 1, IDS, 5), "row_idx: must name every place once"),
        ((values(TOKENS, 3), BY_COLUMN, IDS.long(), 5), "int32 tensor expected"),
        ((values(TOKENS, 3), BY_COLUMN, IDS, -1), "active_num|negative"),
    ],
)
def test_init_routing_refuses_what_is_not_documented(arguments: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        on_npu(npu.npu_moe_init_routing, *arguments)


def combined(rows: Tensor, source: Tensor, by_row: bool, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    result = torch.zeros(TOKENS, rows.shape[-1], dtype=torch.float64)
    flat = rows.reshape(-1, rows.shape[-1]).double()
    for t in range(TOKENS):
        for s in range(TOP_K):
            place = int(source[t * TOP_K + s if by_row else s * TOKENS + t])
            row = flat[place] if place >= 0 else torch.zeros(flat.shape[1], dtype=torch.float64)
            result[t] += scales[t, s].double() * (row + (0 if bias is None else bias[IDS[t, s]].double()))
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_finalize_routing_weighs_and_sums_by_column_or_by_row(dtype: torch.dtype, mode: int) -> None:
    rows, bias = values(12, 3, dtype=dtype), values(EXPERTS, 3, seed=4, dtype=dtype)
    scales, skip1, skip2 = (values(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(5, 2), (5, 3), (5, 3)]))
    source = torch.randperm(12, generator=torch.Generator().manual_seed(0))[:10].int()
    if mode in (1, 3):
        rows, source[3] = rows.view(4, 3, 3), -1
    found = on_npu(npu.npu_moe_finalize_routing, rows, skip1, skip2, bias, scales, source, IDS, mode)
    exact = skip1.double() + skip2.double() + combined(rows, source, mode >= 2, scales, bias)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
    other = skip1.double() + skip2.double() + combined(rows, source, mode < 2, scales, bias)
    assert not torch.allclose(found.double(), other, atol=0.1)
    plain = on_npu(npu.npu_moe_finalize_routing, rows, None, None, None, scales, source, None, mode)
    torch.testing.assert_close(
        plain.double(), combined(rows, source, mode >= 2, scales), rtol=torch.finfo(dtype).eps, atol=1e-6
    )


def test_finalize_routing_pairs_with_both_forms_of_init_routing() -> None:
    x, scales = values(TOKENS, 3), values(TOKENS, TOP_K, seed=1)
    exact = x * scales.sum(1, keepdim=True)
    rows, index, _ = on_npu(npu.npu_moe_init_routing, x, BY_COLUMN, IDS, TOKENS)
    torch.testing.assert_close(
        on_npu(npu.npu_moe_finalize_routing, rows, None, None, None, scales, index, None, 0), exact
    )
    rows, index, _, _ = v2(x)
    torch.testing.assert_close(
        on_npu(npu.npu_moe_finalize_routing, rows, None, None, None, scales, index, None, 2), exact
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"expanded_permuted_rows": values(10, 3).double()}, "expanded_permuted_rows: dtype"),
        ({"scales": values(TOKENS, TOP_K, dtype=torch.bfloat16)}, "scales: dtype"),
        ({"skip1": values(TOKENS, 3)}, "skip1: must be None"),
        ({"bias": values(EXPERTS, 3)}, "export_for_source_row: needed"),
        ({"expanded_src_to_dst_row": torch.arange(10)}, "expanded_src_to_dst_row: dtype"),
        ({"expanded_src_to_dst_row": torch.arange(10, dtype=torch.int32) - 1}, "expanded_src_to_dst_row: must be in"),
        ({"expanded_src_to_dst_row": torch.arange(10, dtype=torch.int32) + 1}, "expanded_src_to_dst_row: must be in"),
        ({"drop_pad_mode": 1}, "expanded_permuted_rows: must have 3 dimensions"),
        ({"drop_pad_mode": 4}, "drop_pad_mode"),
        ({"k": 2}, "k: this argument is not simulated"),
    ],
)
def test_finalize_routing_refuses_what_is_not_documented(changes: dict[str, Any], reason: str) -> None:
    arguments = {
        "expanded_permuted_rows": values(10, 3),
        "skip1": None,
        "skip2": None,
        "bias": None,
        "scales": values(TOKENS, TOP_K),
        "expanded_src_to_dst_row": torch.arange(10, dtype=torch.int32),
        "export_for_source_row": None,
        **changes,
    }
    with pytest.raises(RuntimeError, match=reason):
        on_npu(npu.npu_moe_finalize_routing, **arguments)


COUNTS = torch.tensor([[2, 1, 1], [1, 3, 2]], dtype=torch.int32)


@pytest.mark.parametrize("counts", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8])
def test_re_routing_brings_tokens_from_the_order_of_ranks_to_that_of_experts(
    counts: torch.dtype, dtype: torch.dtype
) -> None:
    tokens, scales = values(10, 3).mul(9).to(dtype), values(10, seed=1)
    blocks, start = {}, 0
    for rank in range(2):
        for e in range(3):
            blocks[e, rank] = list(range(start, start + int(COUNTS[rank, e])))
            start += int(COUNTS[rank, e])
    order = [i for key in sorted(blocks) for i in blocks[key]]
    moved, moved_scales, index, numbers = on_npu(
        npu.npu_moe_re_routing, tokens, COUNTS.to(counts), per_token_scales=scales
    )
    assert torch.equal(moved, tokens[order])
    assert torch.equal(moved_scales, scales[order])
    assert (index.tolist(), index.dtype) == (order, torch.int32)
    assert (numbers.tolist(), numbers.dtype) == ([3, 4, 3], counts)
    assert on_npu(npu.npu_moe_re_routing, tokens, COUNTS.to(counts))[1].isnan().all()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": values(10, 3)}, "tokens: dtype"),
        ({"tokens": values(9, 3).half()}, "10 for 9 tokens"),
        ({"tokens": values(10, 16384).half()}, "must be below 16384"),
        ({"expert_token_num_per_rank": COUNTS - 1}, "every count above 0"),
        ({"expert_token_num_type": 0}, "expert_token_num_type"),
        ({"idx_type": 1}, "idx_type"),
    ],
)
def test_re_routing_refuses_what_is_not_documented(changes: dict[str, Any], reason: str) -> None:
    arguments = {"tokens": values(10, 3).half(), "expert_token_num_per_rank": COUNTS, **changes}
    with pytest.raises(RuntimeError, match=reason):
        on_npu(npu.npu_moe_re_routing, **arguments)


def test_compute_expert_tokens_gives_running_sums() -> None:
    ids = torch.tensor([0, 0, 1, 3, 3, 3], dtype=torch.int32)
    found = on_npu(npu.npu_moe_compute_expert_tokens, ids, 5)
    assert (found.tolist(), found.dtype) == ([2, 3, 3, 6, 6], torch.int32)


@pytest.mark.parametrize(
    ("ids", "experts", "reason"),
    [
        (torch.tensor([0, 1]), 2, "dtype"),
        (torch.tensor([1, 0], dtype=torch.int32), 2, "is not sorted"),
        (torch.tensor([0, 1], dtype=torch.int32), 2049, "num_expert"),
        (torch.tensor([0, 1], dtype=torch.int32), 0, "num_expert|greater than 0|error"),
        (torch.tensor([[0, 1]], dtype=torch.int32), 2, "dimensions|dimensional"),
    ],
)
def test_compute_expert_tokens_refuses_what_is_not_documented(ids: Tensor, experts: int, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        on_npu(npu.npu_moe_compute_expert_tokens, ids, experts)


def test_they_are_not_documented_for_ascend950(as_soc) -> None:
    as_soc("Ascend950")
    with pytest.raises(RuntimeError, match="not documented for this chip"):
        on_npu(npu.npu_moe_init_routing, values(TOKENS, 3), BY_COLUMN, IDS, 5)
    with pytest.raises(RuntimeError, match="not documented for this chip"):
        v2(values(TOKENS, 3))
    with pytest.raises(RuntimeError, match="not documented for this chip"):
        on_npu(npu.npu_moe_compute_expert_tokens, IDS.flatten().sort().values, 4)
