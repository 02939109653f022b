"""Tokens sorted by expert and back: `npu_moe_token_permute` and `npu_moe_token_unpermute`.

The operators' own gradients are not used as they are: with float32 weights and half-precision tokens the one of
`npu_moe_token_unpermute` was seen to give nan on the device, so both sides of it always have one type here.

Source: operator documents torch_npu.npu_moe_token_permute and torch_npu.npu_moe_token_unpermute (op-plugin),
aclnnMoeTokenPermute, aclnnMoeTokenUnpermute and their gradients (ops-transformer).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .availability import schema_has
from .guards import FLOATS, FUNCTORCH, NOT_ON_NPU, PLAIN_TYPES, dtype_name, subclass_reason, transforming
from .verdicts import Verdicts

_TOP_K = 512
_INDICES = (1 << 24) - 1  # the operator sorts ids and counts through float32


def unsupported(tokens: Tensor, indices: Tensor) -> str | None:
    """Why `permute` cannot take this call, or None.

    Args:
        tokens: (tokens, size).
        indices: (tokens, top_k), expert ids.  That they are at least 0 and below 2**24 - 1 is not checked.
    """
    plain = type(tokens) in PLAIN_TYPES and type(indices) in PLAIN_TYPES
    if not plain and (reason := subclass_reason(tokens, indices)):
        return reason
    if transforming():
        return FUNCTORCH
    if indices.device != tokens.device:
        return "the expert ids are on another device"
    facts = (tokens.shape, tokens.dtype, tokens.device, indices.shape, indices.dtype)
    return _verdicts[facts] if plain and not is_compiling() else _judge(*facts)


def _judge(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, ids: torch.Size, ids_dtype: torch.dtype
) -> str | None:
    if device.type != "npu":
        return NOT_ON_NPU
    if dtype not in FLOATS:
        return f"tokens of type {dtype_name(dtype)}"
    if ids_dtype not in (torch.int32, torch.int64):
        return f"expert ids of type {dtype_name(ids_dtype)}"
    if len(shape) != 2 or len(ids) != 2 or ids[0] != shape[0]:
        return "tokens and expert ids are not (tokens, size) and (tokens, top_k)"
    if shape[1] == 0:
        return "the tokens have no size"
    if not 1 <= ids[1] <= _TOP_K:
        return f"each token has no expert or more than {_TOP_K}"
    if shape[0] * ids[1] >= _INDICES:
        return f"{_INDICES} expert ids or more"
    return None


def unsupported_combine(permuted: Tensor, sorted_indices: Tensor, weights: Tensor | None) -> str | None:
    """Why `combine` cannot take this call, or None.

    Args:
        permuted: (tokens * top_k, size).
        sorted_indices: as `permute` returns it.
        weights: (tokens, top_k), or None.
    """
    given = (permuted, sorted_indices) if weights is None else (permuted, sorted_indices, weights)
    plain = all(type(x) in PLAIN_TYPES for x in given)
    if not plain and (reason := subclass_reason(*given)):
        return reason
    if transforming():
        return FUNCTORCH
    if any(x.device != permuted.device for x in given):
        return "the weights or the order are on another device"
    shape, dtype = (None, None) if weights is None else (weights.shape, weights.dtype)
    order = sorted_indices
    facts = (permuted.shape, permuted.dtype, permuted.device, order.shape, order.dtype, shape, dtype)
    return _combine_verdicts[facts] if plain and not is_compiling() else _judge_combine(*facts)


def _judge_combine(
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    order: torch.Size,
    order_dtype: torch.dtype,
    weights: torch.Size | None,
    weights_dtype: torch.dtype | None,
) -> str | None:
    if device.type != "npu":
        return NOT_ON_NPU
    if dtype not in FLOATS:
        return f"expert outputs of type {dtype_name(dtype)}"
    if order_dtype != torch.int32 or len(order) != 1:
        return "the order is not that of npu_moe_token_permute"
    if len(shape) != 2 or shape[1] == 0 or shape[0] != order[0]:
        return "the expert outputs are not one row for each copy of a token"
    if weights is None or weights_dtype is None:
        return None
    if weights_dtype not in FLOATS:
        return f"router weights of type {dtype_name(weights_dtype)}"
    if len(weights) != 2 or weights[0] * weights[1] != shape[0] or weights[1] > _TOP_K:
        return "the router weights are not (tokens, top_k)"
    return None


_verdicts = Verdicts(_judge)
_combine_verdicts = Verdicts(_judge_combine)


def permute(tokens: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """One copy of each token for each of its experts, the copies sorted by expert; within an expert in their old order.

    Args:
        tokens: (tokens, size), float16, bfloat16 or float32.
        indices: (tokens, top_k), int32 or int64: ids of experts.

    Returns:
        (tokens * top_k, size) in the dtype of the tokens, and (tokens * top_k,) int32: the copy of `token` for its
        expert in `slot` is row `sorted_indices[token * top_k + slot]`.  The gradient of a token is summed in float32.

    Raises:
        RuntimeError: the operator refuses the arguments; ask `unsupported` first.
    """
    if tokens.shape[0] == 0:  # the documents do not mention it
        return tokens.repeat(indices.shape[1], 1), indices.new_empty(0, dtype=torch.int32)
    if tokens.requires_grad and torch.is_grad_enabled():
        return _Permute.apply(tokens, indices)
    permuted, sorted_indices = torch.ops.npu.npu_moe_token_permute.default(tokens, indices)
    return permuted, sorted_indices


def combine(
    permuted: Tensor, sorted_indices: Tensor, weights: Tensor | None, *, rounded: bool, top_k: int = 1
) -> Tensor:
    """The sum over the experts of each token of `row * weight`, in the order before `permute`.

    Products and sums are computed in the wider of the two dtypes, at least as exactly as by PyTorch's operators.  Kept
    for the backward pass are the rows in their own dtype, the weights and the indices.

    Args:
        permuted: (tokens * top_k, size), float16, bfloat16 or float32.
        sorted_indices: (tokens * top_k,), from `permute`.
        weights: (tokens, top_k), or None for a plain sum.
        rounded: weights that are wider than the rows: each product is rounded to the dtype of the rows before the sum.
        top_k: experts of each token where there are no weights.

    Returns:
        (tokens, size), in the dtype of the rows; for wider weights that do not round, in the dtype of the weights.

    Raises:
        RuntimeError: the operator refuses the arguments; ask `unsupported_combine` first.
    """
    if permuted.shape[0] == 0:
        return _combine_nothing(permuted, weights, rounded, top_k)
    if weights is None:
        return _sum(permuted, sorted_indices, top_k)
    if weights.dtype != permuted.dtype:
        weights = weights.to(torch.promote_types(permuted.dtype, weights.dtype))  # none where it is the wider one
    result: Tensor = _Combine.apply(permuted, sorted_indices, weights, rounded)
    return result


def _combine_nothing(permuted: Tensor, weights: Tensor | None, rounded: bool, top_k: int) -> Tensor:
    """No tokens: by PyTorch's operators, attached to both inputs."""
    if weights is None:
        return permuted.unflatten(0, (0, top_k)).sum(1)
    result = (permuted.unflatten(0, weights.shape) * weights.unsqueeze(-1)).sum(1)
    return result.to(permuted.dtype) if rounded else result


def _sum(rows: Tensor, sorted_indices: Tensor, top_k: int) -> Tensor:
    """The sum of the copies of each token; the adjoint of `permute`."""
    if rows.requires_grad and torch.is_grad_enabled():
        result: Tensor = _Sum.apply(rows, sorted_indices, top_k)
        return result
    return _sum_without_gradient(rows, sorted_indices, top_k)


def _sum_without_gradient(rows: Tensor, sorted_indices: Tensor, top_k: int) -> Tensor:
    tokens = sorted_indices.shape[0] // top_k
    result: Tensor
    if schema_has("npu_moe_token_permute_grad_v2"):
        result = torch.ops.npu.npu_moe_token_permute_grad_v2.default(rows, sorted_indices, tokens, rows.dtype, top_k)
    else:  # without weights npu_moe_token_unpermute sums nothing
        ones = rows.new_ones(tokens, top_k)
        result = torch.ops.npu.npu_moe_token_unpermute.default(rows, sorted_indices, ones)
    return result


def _spread(x: Tensor, sorted_indices: Tensor, top_k: int) -> Tensor:
    """`permute` again, by the order that it returned: sorting it gives the same order."""
    return permute(x.contiguous(), sorted_indices.view(-1, top_k))[0]


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        permuted, sorted_indices = torch.ops.npu.npu_moe_token_permute.default(tokens, indices)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(sorted_indices)
        ctx.save_for_backward(sorted_indices)
        ctx.top_k = indices.shape[1]
        return permuted, sorted_indices

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, None]:  # type: ignore[override]
        if grad is None:
            return None, None
        (sorted_indices,) = ctx.saved_tensors
        return _sum(grad.contiguous(), sorted_indices, ctx.top_k), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sorted_indices: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(sorted_indices)
        ctx.top_k = top_k
        return _sum_without_gradient(rows, sorted_indices, top_k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (sorted_indices,) = ctx.saved_tensors
        return _spread(grad, sorted_indices, ctx.top_k), None, None


def _sorted_weights(weights: Tensor, sorted_indices: Tensor) -> Tensor:
    """The weight of each row, (rows, 1)."""
    flat = weights.reshape(-1)
    return torch.empty_like(flat).index_put_((sorted_indices,), flat).unsqueeze(1)


class _Combine(torch.autograd.Function):
    """`weights` have the dtype of the rows, or float32."""

    @staticmethod
    def forward(ctx: Any, permuted: Tensor, sorted_indices: Tensor, weights: Tensor, rounded: bool) -> Tensor:
        learned = ctx.needs_input_grad[2]  # the weights' gradient needs the rows, the rows' the weights
        ctx.save_for_backward(sorted_indices, weights, permuted if learned else None)
        ctx.dtype = permuted.dtype
        # What npu_moe_token_unpermute calls returns its input too, which torch.compile warns that it will not take.
        if is_compiling() or (rounded and weights.dtype != permuted.dtype):
            weighted = torch.empty_like(permuted, dtype=permuted.dtype if rounded else weights.dtype)
            torch.mul(permuted, _sorted_weights(weights, sorted_indices), out=weighted)
            return _sum_without_gradient(weighted, sorted_indices, weights.shape[1])
        rows = permuted.to(weights.dtype)
        result: Tensor = torch.ops.npu.npu_moe_token_unpermute.default(rows, sorted_indices, weights)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:  # type: ignore[override]
        sorted_indices, weights, permuted = ctx.saved_tensors
        rows_wanted, _, weights_wanted, _ = ctx.needs_input_grad
        if torch.is_grad_enabled() and not is_compiling():
            return _differentiable(grad, sorted_indices, weights, permuted, ctx.dtype)
        if not weights_wanted:
            spread = _spread(grad, sorted_indices, weights.shape[1])
            grad_rows = torch.empty_like(spread, dtype=ctx.dtype)
            return torch.mul(spread, _sorted_weights(weights, sorted_indices), out=grad_rows), None, None, None
        rows, grad = permuted.to(weights.dtype), grad.to(weights.dtype).contiguous()
        if schema_has("npu_moe_token_unpermute_grad_v2"):
            grad_rows, grad_weights = torch.ops.npu.npu_moe_token_unpermute_grad_v2.default(
                grad, sorted_indices, rows.shape[0], rows.dtype, weights, permuted_tokens=rows
            )
        else:
            grad_rows, grad_weights = torch.ops.npu.npu_moe_token_unpermute_grad.default(
                rows, grad, sorted_indices, weights
            )
        return grad_rows.to(ctx.dtype) if rows_wanted else None, None, grad_weights, None


def _differentiable(
    grad: Tensor, sorted_indices: Tensor, weights: Tensor, permuted: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, None, Tensor | None, None]:
    """The same gradients under create_graph, for which the operator's own gradient has no derivative."""
    grad_slots = grad.to(weights.dtype).unsqueeze(1)
    grad_rows = (grad_slots * weights.unsqueeze(-1)).flatten(0, 1)[sorted_indices.argsort()].to(dtype)
    if permuted is None:
        return grad_rows, None, None, None
    slots = permuted[sorted_indices.long()].unflatten(0, weights.shape)
    return grad_rows, None, (grad_slots * slots).sum(-1), None
