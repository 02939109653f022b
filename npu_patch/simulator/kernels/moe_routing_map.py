"""Tokens sorted by expert and back, by a map of tokens and experts.

Without ``drop_and_pad`` every token has the same number of experts, and ``sorted_indices[token * top_k + j]`` is the
row of its copy for the ``j``-th of them in ascending order. With it every expert takes ``capacity`` tokens, and
``sorted_indices`` are the tokens of the rows.
Source: operator documents torch_npu.npu_moe_token_permute_with_routing_map and _unpermute_with_routing_map (op-plugin),
and the aclnn documents of them and their gradients (ops-transformer/moe).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import limits
from .base import UNDEFINED, Call, kernel

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _check_rows(call: Call, name: str, rows: Tensor) -> None:
    call.require(call.soc.name not in limits.NOT_ON_950, name, "the operator is not documented for this chip")
    call.require(rows.dtype in _FLOATS, name, f"dtype {rows.dtype} is not supported")
    call.require(rows.dim() == 2, name, f"must be [rows, size], has {rows.dim()} dimensions")
    call.require(rows.numel() > 0, name, "empty tensors are not documented")


def _check_map(call: Call, routing_map: Tensor, tokens: int, top_k: int | None) -> Tensor:
    """The map as bool; ``top_k`` None where every expert has its capacity."""
    name = "routing_map"
    call.require(routing_map.dtype in (torch.bool, torch.int8), name, f"dtype {routing_map.dtype} is not supported")
    call.require(routing_map.dim() == 2, name, f"must be [tokens, experts], has {routing_map.dim()} dimensions")
    call.require(routing_map.shape[0] == tokens, name, f"{routing_map.shape[0]} rows for {tokens} tokens")
    call.require(max(routing_map.shape) < limits.MOE_INDICES, name, f"a size is not below {limits.MOE_INDICES}")
    if top_k is not None:
        call.require(0 < top_k < limits.MOE_TOP_K, "top_k", f"{top_k} is not in [1, {limits.MOE_TOP_K})")
        counts = routing_map.bool().sum(1)
        call.require(
            bool((counts == top_k).all()),
            name,
            f"each token must have the {top_k} experts that the number of rows means, they have {counts.unique()}",
        )
    return routing_map.bool()


def _check_probs(call: Call, probs: Tensor, rows: Tensor, routing_map: Tensor) -> None:
    call.require(probs.dtype == rows.dtype, "probs", f"dtype {probs.dtype} is not that of the tokens {rows.dtype}")
    call.require(
        probs.shape == routing_map.shape, "probs", f"shape {list(probs.shape)} is not {list(routing_map.shape)}"
    )


def _check_index(call: Call, name: str, index: Tensor, below: int) -> Tensor:
    call.require(index.dtype == torch.int32, name, f"dtype {index.dtype} is not int32")
    wide = index.long()
    call.require(bool(((wide >= 0) & (wide < below)).all()), name, f"must be in [0, {below})")
    return wide


def _by_expert(table: Tensor, token_of_row: Tensor) -> Tensor:
    """The elements of a [tokens, experts] table that belong to the rows of each expert's capacity."""
    return table.t().gather(1, token_of_row.view(table.shape[1], -1)).reshape(-1)


@kernel(
    "npu_moe_token_permute_with_routing_map",
    models=("tokens", "routing_map", "probs", "num_out_tokens", "drop_and_pad"),
)
def npu_moe_token_permute_with_routing_map(
    call: Call,
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None,
    num_out_tokens: int | None,
    drop_and_pad: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The default of ``num_out_tokens`` is the number of tokens: with more than one expert each, it drops rows."""
    _check_rows(call, "tokens", tokens)
    count = tokens.shape[0]
    rows = count if num_out_tokens is None else num_out_tokens
    chosen = _check_map(call, routing_map, count, None if drop_and_pad else rows // count)
    if probs is not None:
        _check_probs(call, probs, tokens, routing_map)
    if drop_and_pad:
        capacity = rows // chosen.shape[1]
        call.require(0 < capacity <= count, "num_out_tokens", f"means a capacity of {capacity} for {count} tokens")
        index = chosen.t().int().argsort(descending=True, stable=True)[:, :capacity].reshape(-1)
        return tokens[index], None if probs is None else _by_expert(probs, index), index.int()
    token_of_row = chosen.t().nonzero()[:, 1]
    weights = None if probs is None else probs.t()[chosen.t()]
    return tokens[token_of_row], weights, token_of_row.argsort(stable=True).int()


@kernel(
    "npu_moe_token_permute_with_routing_map_grad",
    models=(
        "permuted_token_out_grad",
        "probs_grad",
        "sorted_indices",
        "routing_map",
        "experts_num",
        "tokens_num",
        "drop_and_pad",
    ),
)
def npu_moe_token_permute_with_routing_map_grad(
    call: Call,
    permuted_token_out_grad: Tensor,
    probs_grad: Tensor | None,
    sorted_indices: Tensor,
    routing_map: Tensor,
    experts_num: int,
    tokens_num: int,
    drop_and_pad: bool,
) -> tuple[Tensor, Tensor | None]:
    grad = permuted_token_out_grad
    _check_rows(call, "permuted_token_out_grad", grad)
    top_k = None if drop_and_pad else grad.shape[0] // tokens_num
    chosen = _check_map(call, routing_map, tokens_num, top_k)
    index = _check_index(call, "sorted_indices", sorted_indices, tokens_num if drop_and_pad else grad.shape[0])
    if probs_grad is not None:
        call.require(probs_grad.dtype == grad.dtype, "probs_grad", f"dtype {probs_grad.dtype} is not {grad.dtype}")
    if top_k is not None:
        grad_tokens = grad.float()[index].unflatten(0, (tokens_num, top_k)).sum(1)
    else:
        grad_tokens = torch.zeros(tokens_num, grad.shape[1]).index_add(0, index, grad.float())
    if probs_grad is None:
        return grad_tokens.to(grad.dtype), None
    by_expert = torch.zeros(experts_num, tokens_num, dtype=grad.dtype)
    if top_k is None:
        by_expert.scatter_(1, index.view(experts_num, -1), probs_grad.view(experts_num, -1))
    else:
        by_expert[chosen.t()] = probs_grad
    return grad_tokens.to(grad.dtype), by_expert.t().contiguous()


def _unpermute(
    call: Call,
    permuted: Tensor,
    sorted_indices: Tensor,
    restore_shape: list[int],
    probs: Tensor | None,
    routing_map: Tensor | None,
    drop_and_pad: bool,
) -> tuple[Tensor, object, object, Tensor | None]:
    _check_rows(call, "permuted_tokens", permuted)
    tokens, size = restore_shape
    call.require(size == permuted.shape[1], "restore_shape", f"{size} columns for {permuted.shape[1]}")
    rows = permuted.float()
    weights = None
    if probs is not None and routing_map is None:
        call.refuse("routing_map", "needed with probs")
    top_k = permuted.shape[0] // tokens
    chosen = None if routing_map is None else _check_map(call, routing_map, tokens, None if drop_and_pad else top_k)
    index = _check_index(call, "sorted_indices", sorted_indices, tokens if drop_and_pad else permuted.shape[0])
    if probs is not None and chosen is not None:
        _check_probs(call, probs, permuted, chosen)
        weights = _by_expert(probs, index) if drop_and_pad else probs.t()[chosen.t()]
        rows = rows * weights.float().unsqueeze(-1)
    if not drop_and_pad:
        call.require(0 < top_k <= limits.MOE_TOP_K, "top_k", f"{top_k} is not in [1, {limits.MOE_TOP_K}]")
        call.require(top_k * tokens == index.numel(), "sorted_indices", f"{index.numel()} for {tokens} tokens")
        out = rows[index].unflatten(0, (tokens, top_k)).sum(1)
        return out.to(permuted.dtype), UNDEFINED, UNDEFINED, weights
    ids, order = index.sort(stable=True)
    out = torch.zeros(tokens, size).index_add(0, index, rows)
    return out.to(permuted.dtype), order.int(), ids.int(), weights


_UNPERMUTE = ("permuted_tokens", "sorted_indices", "restore_shape", "probs", "routing_map", "drop_and_pad")


@kernel("_npu_moe_token_unpermute_with_routing_map", models=_UNPERMUTE)
def _npu_moe_token_unpermute_with_routing_map(
    call: Call,
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: list[int],
    probs: Tensor | None,
    routing_map: Tensor | None,
    drop_and_pad: bool,
) -> tuple[Tensor, object, object, Tensor | None]:
    """``(tokens, out_index, permuted_token_id, permuted_probs)``; the indices mean something with drop_and_pad only."""
    return _unpermute(call, permuted_tokens, sorted_indices, restore_shape, probs, routing_map, drop_and_pad)


@kernel("npu_moe_token_unpermute_with_routing_map", models=_UNPERMUTE)
def npu_moe_token_unpermute_with_routing_map(
    call: Call,
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: list[int],
    probs: Tensor | None,
    routing_map: Tensor | None,
    drop_and_pad: bool,
) -> Tensor:
    """What is called in inference mode."""
    return _unpermute(call, permuted_tokens, sorted_indices, restore_shape, probs, routing_map, drop_and_pad)[0]


@kernel(
    "npu_moe_token_unpermute_with_routing_map_grad",
    models=(
        "unpermuted_tokens_grad",
        "out_index",
        "permuted_token_id",
        "routing_map",
        "permuted_tokens",
        "probs",
        "drop_and_pad",
        "restore_shape",
    ),
)
def npu_moe_token_unpermute_with_routing_map_grad(
    call: Call,
    unpermuted_tokens_grad: Tensor,
    out_index: Tensor,
    permuted_token_id: Tensor,
    routing_map: Tensor | None,
    permuted_tokens: Tensor | None,
    probs: Tensor | None,
    drop_and_pad: bool,
    restore_shape: list[int],
) -> tuple[Tensor, Tensor | None]:
    """Without drop_and_pad ``out_index`` is the forward's ``sorted_indices``, and ``permuted_token_id`` is not read."""
    grad = unpermuted_tokens_grad
    _check_rows(call, "unpermuted_tokens_grad", grad)
    tokens, count = restore_shape[0], out_index.numel()
    index = _check_index(call, "out_index", out_index, count)
    token_of_row = torch.empty_like(index)
    if drop_and_pad:
        token_of_row[index] = _check_index(call, "permuted_token_id", permuted_token_id, tokens)
    else:
        token_of_row[index] = torch.arange(count) // (count // tokens)
    spread = grad.float()[token_of_row]
    if probs is None:
        return spread.to(grad.dtype), None
    if routing_map is None or permuted_tokens is None:
        call.refuse("routing_map" if routing_map is None else "permuted_tokens", "needed with probs")
    chosen = _check_map(call, routing_map, tokens, None if drop_and_pad else count // tokens)
    _check_probs(call, probs, grad, chosen)
    dots = (spread * permuted_tokens.float()).sum(-1).to(grad.dtype)
    by_expert = torch.zeros(chosen.shape[1], tokens, dtype=grad.dtype)
    if drop_and_pad:
        weights = _by_expert(probs, token_of_row)
        by_expert.scatter_(1, token_of_row.view(chosen.shape[1], -1), dots.view(chosen.shape[1], -1))
    else:
        weights = probs.t()[chosen.t()]
        by_expert[chosen.t()] = dots
    return (spread * weights.float().unsqueeze(-1)).to(grad.dtype), by_expert.t().contiguous()
