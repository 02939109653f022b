"""The routing operators of inference, which have no gradient.

Two conventions meet here. Column-major: ``npu_moe_init_routing`` and modes 0 and 1 of ``npu_moe_finalize_routing`` put
slot ``k`` of token ``i`` at ``k * tokens + i``. Row-major: ``npu_moe_init_routing_v2`` and modes 2 and 3 put it at
``i * top_k + k``.
Source: operator documents torch_npu.npu_moe_* (op-plugin) and the aclnn documents (ops-transformer/moe).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import limits
from .base import UNDEFINED, Call, kernel, poison

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _check(call: Call, name: str, x: Tensor, dims: int, dtypes: tuple[torch.dtype, ...]) -> None:
    call.require(x.dtype in dtypes, name, f"dtype {x.dtype} is not supported")
    call.require(x.dim() == dims, name, f"must have {dims} dimensions, has {x.dim()}")
    call.require(x.numel() > 0, name, "empty tensors are not documented")


def _check_range(call: Call, name: str, x: Tensor, first: int, end: int) -> None:
    call.require(bool(((x >= first) & (x < end)).all()), name, f"must be in [{first}, {end})")


def _undefined(*shape: int, dtype: torch.dtype) -> Tensor:
    result = torch.empty(shape, dtype=dtype)
    poison(result)
    return result


def _check_chip(call: Call, name: str) -> None:
    call.require(call.soc.name not in limits.NOT_ON_950, name, "the operator is not documented for this chip")


@kernel("npu_moe_init_routing", models=("x", "row_idx", "expert_idx", "active_num"))
def npu_moe_init_routing(
    call: Call, x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``(expanded_x, expanded_row_idx, expanded_expert_idx)``; ``active_num`` counts tokens, not rows."""
    _check_chip(call, "x")
    _check(call, "x", x, 2, _FLOATS)
    call.require(x.numel() < 1 << 24, "x", f"{x.numel()} elements, must be below {1 << 24}")
    _check(call, "expert_idx", expert_idx, 2, (torch.int32,))
    _check(call, "row_idx", row_idx, 2, (torch.int32,))
    count, top_k = expert_idx.shape
    call.require(x.shape[0] == count, "expert_idx", f"{count} rows for {x.shape[0]} tokens")
    call.require(row_idx.shape == expert_idx.shape, "row_idx", f"shape {list(row_idx.shape)}")
    places = row_idx.reshape(-1).long()
    every = torch.arange(places.numel())
    call.require(torch.equal(places.sort().values, every), "row_idx", "must name every place once")
    call.require(active_num >= 0, "active_num", f"{active_num} is negative")
    experts, order = expert_idx.reshape(-1).sort(stable=True)
    source = places[order]
    expanded = torch.empty_like(source)
    expanded[source] = every
    return x[source[: min(count, active_num) * top_k] % count], expanded.int(), experts


_INIT_V2 = (
    "x",
    "expert_idx",
    "scale",
    "active_num",
    "expert_capacity",
    "expert_num",
    "drop_pad_mode",
    "expert_tokens_num_type",
    "expert_tokens_num_flag",
    "quant_mode",
    "active_expert_range",
    "row_idx_type",
)


@kernel("npu_moe_init_routing_v2", models=_INIT_V2)
def npu_moe_init_routing_v2(
    call: Call,
    x: Tensor,
    expert_idx: Tensor,
    scale: Tensor | None,
    active_num: int,
    expert_capacity: int,
    expert_num: int,
    drop_pad_mode: int,
    expert_tokens_num_type: int,
    expert_tokens_num_flag: bool,
    quant_mode: int,
    active_expert_range: list[int],
    row_idx_type: int,
) -> tuple[Tensor, Tensor, object, object]:
    """``(expanded_x, expanded_row_idx, expert_token_cumsum_or_count, expanded_scale)``.

    Where ``quant_mode`` defaults to 0, in older torch_npu, the default quantises: it must be given as -1.
    """
    _check_init_v2(call, x, expert_idx, scale, expert_num, quant_mode)
    call.require(row_idx_type in (0, 1), "row_idx_type", f"{row_idx_type} is neither 0 nor 1")
    call.require(expert_tokens_num_type in (0, 1, 2), "expert_tokens_num_type", f"{expert_tokens_num_type}")
    first, end = active_expert_range or (0, expert_num)
    call.require(0 <= first < end <= expert_num, "active_expert_range", f"[{first}, {end}) of {expert_num} experts")
    flat, top_k = expert_idx.reshape(-1).long(), expert_idx.shape[1]
    key = flat.masked_fill((flat < first) | (flat >= end), expert_num)
    order = key.argsort(stable=True)
    active = int((key < expert_num).sum())
    counts = torch.bincount(key, minlength=expert_num + 1)[first:end]
    numbers: object = UNDEFINED
    if expert_tokens_num_flag:
        numbers = _numbers(counts, expert_tokens_num_type, first, expert_num)
    if drop_pad_mode == 1:
        call.require((first, end) == (0, expert_num), "active_expert_range", "must be all experts with drop_pad_mode 1")
        call.require(expert_tokens_num_type == 1, "expert_tokens_num_type", "must be 1 with drop_pad_mode 1")
        call.require(0 < expert_capacity < x.shape[0], "expert_capacity", f"{expert_capacity} for {x.shape[0]} tokens")
        call.require(row_idx_type == 0 and scale is None, "drop_pad_mode", "1 with this is not simulated")
        return *_dropped(x, key, order, counts, top_k, expert_capacity), numbers, UNDEFINED
    call.require(drop_pad_mode == 0, "drop_pad_mode", f"{drop_pad_mode} is neither 0 nor 1")
    call.require(active_num >= 0, "active_num", f"{active_num} is negative, as its default is")
    rows = min(active_num, flat.numel()) if active_num else flat.numel()
    valid = order[: min(active, rows)]
    expanded = _undefined(rows, x.shape[1], dtype=x.dtype)
    expanded[: len(valid)] = x[valid // top_k]
    expanded_scale: object = UNDEFINED
    if scale is not None:
        expanded_scale = _undefined(rows, dtype=torch.float32)
        expanded_scale[: len(valid)] = scale[valid // top_k]  # type: ignore[index]
    if row_idx_type == 1:
        index = _undefined(flat.numel(), dtype=torch.int32)
        index[:active] = order[:active].int()
    else:
        index = torch.full((flat.numel(),), -1, dtype=torch.int32)
        index[order[:active]] = torch.arange(active, dtype=torch.int32)
    return expanded, index, numbers, expanded_scale


def _check_init_v2(
    call: Call, x: Tensor, expert_idx: Tensor, scale: Tensor | None, expert_num: int, quant_mode: int
) -> None:
    _check_chip(call, "x")
    call.require(quant_mode == -1, "quant_mode", f"{quant_mode} quantises, which is not simulated")
    _check(call, "x", x, 2, (*_FLOATS, torch.int8))
    _check(call, "expert_idx", expert_idx, 2, (torch.int32,))
    call.require(expert_idx.shape[0] == x.shape[0], "expert_idx", f"{expert_idx.shape[0]} rows for {x.shape[0]} tokens")
    call.require(
        0 < expert_num <= limits.MOE_ROUTING_EXPERTS,
        "expert_num",
        f"{expert_num} is not in [1, {limits.MOE_ROUTING_EXPERTS}]",
    )
    _check_range(call, "expert_idx", expert_idx, 0, expert_num)
    if scale is not None:
        _check(call, "scale", scale, 1, (torch.float32,))
        call.require(scale.shape[0] == x.shape[0], "scale", f"{scale.shape[0]} elements for {x.shape[0]} tokens")


def _numbers(counts: Tensor, kind: int, first: int, expert_num: int) -> Tensor:
    """Running sums, counts, or pairs of expert and count of those that have tokens; behind the pairs is nothing."""
    if kind != 2:
        return counts.cumsum(0) if kind == 0 else counts
    pairs = _undefined(expert_num, 2, dtype=torch.int64)
    busy = counts.nonzero()[:, 0]
    pairs[: len(busy)] = torch.stack((busy + first, counts[busy]), 1)
    return pairs


def _dropped(x: Tensor, key: Tensor, order: Tensor, counts: Tensor, top_k: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Each expert's first ``capacity`` tokens, filled up with zeros; -1 for those that are dropped."""
    experts = counts.shape[0]
    within = torch.arange(order.numel()) - (counts.cumsum(0) - counts)[key[order]]
    kept = within < capacity
    place = (key[order] * capacity + within)[kept]
    expanded = torch.zeros(experts * capacity, x.shape[1], dtype=x.dtype)
    expanded[place] = x[order[kept] // top_k]
    index = torch.full((order.numel(),), -1, dtype=torch.int32)
    index[order[kept]] = place.int()
    return expanded.view(experts, capacity, -1), index


@kernel(
    "npu_moe_finalize_routing",
    models=(
        "expanded_permuted_rows",
        "skip1",
        "skip2",
        "bias",
        "scales",
        "expanded_src_to_dst_row",
        "export_for_source_row",
        "drop_pad_mode",
    ),
)
def npu_moe_finalize_routing(
    call: Call,
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int,
) -> Tensor:
    """``skip1 + skip2 + sum of scale * (row + bias of its expert)``; without ``scales`` there is one slot."""
    _check_chip(call, "expanded_permuted_rows")
    call.require(drop_pad_mode in (0, 1, 2, 3), "drop_pad_mode", f"{drop_pad_mode} is not 0, 1, 2 or 3")
    drops = drop_pad_mode in (1, 3)
    rows, source = expanded_permuted_rows, expanded_src_to_dst_row
    _check(call, "expanded_permuted_rows", rows, 3 if drops else 2, _FLOATS)
    dtype = rows.dtype
    rows = rows.reshape(-1, rows.shape[-1]).float()
    _check(call, "expanded_src_to_dst_row", source, 1, (torch.int32,))
    top_k = 1 if scales is None else scales.shape[1]
    count = source.numel() // top_k
    _check_range(call, "expanded_src_to_dst_row", source, -1 if drops else 0, rows.shape[0])
    shapes = {"skip1": (count, rows.shape[1]), "skip2": (count, rows.shape[1]), "scales": (count, top_k)}
    for name, given in (("skip1", skip1), ("skip2", skip2), ("bias", bias), ("scales", scales)):
        if given is not None:
            _check(call, name, given, 2, (dtype,))
            call.require(name == "bias" or given.shape == shapes[name], name, f"shape {list(given.shape)}")
    call.require(skip1 is None or skip2 is not None, "skip1", "must be None where skip2 is")
    index = source.long()
    slots = index.view(count, top_k) if drop_pad_mode >= 2 else index.view(top_k, count).t()
    values = rows[slots.clamp_min(0)].masked_fill((slots < 0).unsqueeze(-1), 0)
    if bias is not None:
        if export_for_source_row is None:
            call.refuse("export_for_source_row", "needed with bias")
        _check(call, "export_for_source_row", export_for_source_row, 2, (torch.int32,))
        _check_range(call, "export_for_source_row", export_for_source_row, 0, bias.shape[0])
        values = values + bias.float()[export_for_source_row.long()]
    if scales is not None:
        values = values * scales.float().unsqueeze(-1)
    out = values.sum(1)
    for skip in (skip1, skip2):
        out = out if skip is None else out + skip.float()
    return out.to(dtype)


@kernel(
    "npu_moe_re_routing",
    models=("tokens", "expert_token_num_per_rank", "per_token_scales", "expert_token_num_type", "idx_type"),
)
def npu_moe_re_routing(
    call: Call,
    tokens: Tensor,
    expert_token_num_per_rank: Tensor,
    per_token_scales: Tensor | None,
    expert_token_num_type: int,
    idx_type: int,
) -> tuple[Tensor, object, Tensor, Tensor]:
    """From the order of ranks to that of experts: ``(tokens, scales, old place of each row, counts of experts)``."""
    counts = expert_token_num_per_rank
    _check(call, "tokens", tokens, 2, (torch.float16, torch.bfloat16, torch.int8))
    call.require(tokens.shape[1] < 16384, "tokens", f"size {tokens.shape[1]}, must be below 16384")
    _check(call, "expert_token_num_per_rank", counts, 2, (torch.int32, torch.int64))
    call.require(expert_token_num_type == 1, "expert_token_num_type", "only 1 is supported")
    call.require(idx_type == 0, "idx_type", "only 0 is supported")
    call.require(bool((counts > 0).all()), "expert_token_num_per_rank", "the documents want every count above 0")
    total = int(counts.sum())
    call.require(total == tokens.shape[0], "expert_token_num_per_rank", f"{total} for {tokens.shape[0]} tokens")
    experts = torch.arange(counts.shape[1]).expand(counts.shape).reshape(-1)
    order = experts.repeat_interleave(counts.reshape(-1).long()).argsort(stable=True)
    scales: object = UNDEFINED
    if per_token_scales is not None:
        _check(call, "per_token_scales", per_token_scales, 1, (torch.float32,))
        scales = per_token_scales[order]
    return tokens[order], scales, order.int(), counts.sum(0, dtype=counts.dtype)


@kernel("npu_moe_compute_expert_tokens", models=("sorted_expert_for_source_row", "num_expert"))
def npu_moe_compute_expert_tokens(call: Call, sorted_expert_for_source_row: Tensor, num_expert: int) -> Tensor:
    """Running sums of the tokens of each expert, int32."""
    ids = sorted_expert_for_source_row
    _check_chip(call, "sorted_expert_for_source_row")
    _check(call, "sorted_expert_for_source_row", ids, 1, (torch.int32,))
    call.require(ids.numel() < 1 << 24, "sorted_expert_for_source_row", f"must have less than {1 << 24} elements")
    call.require(0 < num_expert <= 2048, "num_expert", f"{num_expert} is not in [1, 2048]")
    call.require(bool((ids.diff() >= 0).all()), "sorted_expert_for_source_row", "is not sorted")
    return torch.searchsorted(ids, torch.arange(num_expert, dtype=torch.int32), right=True).int()
