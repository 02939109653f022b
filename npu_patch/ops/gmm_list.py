"""Grouped matrix multiplication where the matrices of the experts are separate tensors.

Float16 and bfloat16 matrices of up to 128 experts are handed to the operator as they lie.  Beyond that it takes one
tensor only: the matrices are stacked for each call, and nobody keeps the copy.

Source: operator document aclnnGroupedMatmulV5 (ops-transformer).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import gmm
from .gmm_calls import Groups, is_transposed, multiply
from .guards import PLAIN_TYPES, subclass_reason

_LIST = 128


def unsupported_list(x: Tensor, weights: Sequence[Tensor], group_list: Tensor) -> str | None:
    """Why `grouped_matmul_list` cannot take this call, or None.

    Args:
        x: (rows, k).
        weights: (k, n) for each expert.
        group_list: (experts,), see `gmm.unsupported`.
    """
    if not weights:
        return "no expert"
    first = weights[0]
    for one in weights:
        if type(one) not in PLAIN_TYPES and (reason := subclass_reason(one)):
            return reason
        if one.dim() != 2 or one.shape != first.shape:
            return "the matrices of the experts differ in shape"
        if one.dtype != first.dtype or one.device != first.device:
            return "the matrices of the experts differ in type or device"
    return gmm.unsupported(x, first.unsqueeze(0).expand(len(weights), -1, -1), group_list)


def grouped_matmul_list(
    x: Tensor, weights: Sequence[Tensor], group_list: Tensor, *, cumulative: bool, tail: bool = False
) -> Tensor:
    """The rows of each expert times its matrix, each a tensor of its own with a gradient of its own.

    An expert without rows gets a gradient of zeros.

    Args:
        x: (rows, k), rows sorted by expert; float16, bfloat16 or float32.
        weights: (k, n) for each expert, in the dtype of x; most often `.t()` of a linear layer's weight.
        group_list, cumulative, tail: see `gmm.grouped_matmul`.

    Returns:
        (rows, n), in the dtype of x, accumulated in float32.
    """
    if len(weights) == 1:
        return gmm.one_expert(x, weights[0], group_list, None, tail)
    if x.shape[0] == 0:
        return gmm.grouped_matmul(x, torch.stack(tuple(weights)), group_list, cumulative=cumulative)
    groups = Groups.of(group_list, cumulative)
    if torch.is_grad_enabled() and (x.requires_grad or any(one.requires_grad for one in weights)):
        result: Tensor = _MultiplyList.apply(x, *groups, tail, *weights)
        return result
    return multiply(x, _for_operator(weights), None, groups, tail)


def _for_operator(weights: Sequence[Tensor]) -> list[Tensor]:
    """The list itself, one stacked tensor where the operator takes no list, or copies where layouts are mixed."""
    transposed = all(is_transposed(one) for one in weights)
    if weights[0].dtype == torch.float32 or len(weights) > _LIST:
        return [_stacked(weights, transposed)]
    return list(weights) if transposed else [one.contiguous() for one in weights]


def _stacked(weights: Sequence[Tensor], transposed: bool) -> Tensor:
    """(experts, k, n), laid out as the matrices are."""
    return torch.stack([one.t() for one in weights]).transpose(1, 2) if transposed else torch.stack(tuple(weights))


class _MultiplyList(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group_list: Tensor, cumulative: bool, tail: bool, *weights: Tensor) -> Tensor:
        rows_wanted, weights_wanted = ctx.needs_input_grad[0], any(ctx.needs_input_grad[4:])
        ctx.save_for_backward(group_list, x if weights_wanted else None, *(weights if rows_wanted else ()))
        ctx.cumulative, ctx.tail = cumulative, tail
        ctx.transposed = all(is_transposed(one) for one in weights)
        return multiply(x, _for_operator(weights), None, Groups(group_list, cumulative), tail)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        group_list, x, *weights = ctx.saved_tensors
        groups = Groups(group_list, ctx.cumulative)
        wanted = ctx.needs_input_grad[4:]
        grad_x: Tensor | None = None
        grads: tuple[Tensor | None, ...] = (None,) * len(wanted)
        if ctx.needs_input_grad[0]:
            back = [one.t() for one in weights]
            if gmm.differentiated():
                stack = _stacked(back, not ctx.transposed)
                grad_x = gmm.grouped_matmul(grad, stack, group_list, cumulative=ctx.cumulative, tail=ctx.tail)
            else:
                grad_x = multiply(grad, _for_operator(back), None, groups, ctx.tail)
        if any(wanted):
            every = gmm.outer_of(x, grad, groups, ctx.transposed, ctx.tail).unbind()
            grads = tuple(one if want else None for one, want in zip(every, wanted, strict=True))
        return grad_x, None, None, None, *grads
