"""Grouped matrix multiplication: the rows of each expert times the expert's matrix, in one launch.

    y[rows of e] = x[rows of e] @ weight[e] + bias[e]

`npu_grouped_matmul` has no derivative of its own (a backward pass would only warn, and leave no gradient), so that both
gradients are grouped multiplications here: by the transposed matrices, and of the rows of each expert with each other.

What its documents leave undefined is defined here: rows that belong to no expert become zero where they may exist, and
an expert without rows gets a zero gradient.  One expert alone is outside the documents and multiplied by torch.mm.

Source: operator documents torch_npu.npu_grouped_matmul (op-plugin) and aclnnGroupedMatmulV5 (ops-transformer).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .availability import is_ascend950
from .gmm_calls import Groups, accumulate, is_transposed, multiply, ones_for, outer
from .guards import FLOATS, FUNCTORCH, NOT_ON_NPU, PLAIN_TYPES, dtype_name, subclass_reason, transforming
from .verdicts import Verdicts

_SIZE = 65536  # of a last dimension
_GROUPS = 1024
_INTEGERS = (torch.int32, torch.int64)


def unsupported(x: Tensor, weight: Tensor, group_list: Tensor, bias: Tensor | None = None) -> str | None:
    """Why `grouped_matmul` cannot take this call, or None.

    Args:
        x: (rows, k).
        weight: (experts, k, n).
        group_list: (experts,), rows of each expert or their running sum.  Its content is not looked at: that would wait
            for the device.
        bias: (experts, n), or None.
    """
    given = (x, weight, group_list) if bias is None else (x, weight, group_list, bias)
    plain = all(type(one) in PLAIN_TYPES for one in given)
    if not plain and (reason := subclass_reason(*given)):
        return reason
    if transforming():
        return FUNCTORCH
    if any(one.device != x.device for one in given):
        return "rows, matrices and counts are not on one device"
    shape, dtype = (None, None) if bias is None else (bias.shape, bias.dtype)
    facts = (
        x.shape,
        x.dtype,
        x.device,
        weight.shape,
        weight.dtype,
        group_list.shape,
        group_list.dtype,
        shape,
        dtype,
    )
    return _verdicts[facts] if plain and not is_compiling() else _judge(*facts)


def _judge(
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    weight: torch.Size,
    weight_dtype: torch.dtype,
    groups: torch.Size,
    groups_dtype: torch.dtype,
    bias: torch.Size | None,
    bias_dtype: torch.dtype | None,
) -> str | None:
    if device.type != "npu":
        return NOT_ON_NPU
    if dtype not in FLOATS:
        return f"rows of type {dtype_name(dtype)}"
    if dtype == torch.float32 and is_ascend950():
        return "float32 on Ascend950"
    if weight_dtype != dtype or (bias is not None and bias_dtype != dtype):
        return "rows, matrices and biases differ in type"
    if len(shape) != 2 or len(weight) != 3 or weight[1] != shape[1]:
        return "rows and matrices are not (rows, k) and (experts, k, n)"
    if groups_dtype not in _INTEGERS or len(groups) != 1 or groups[0] != weight[0]:
        return "the counts are not one integer for each expert"
    if bias is not None and tuple(bias) != (weight[0], weight[2]):
        return "the biases are not (experts, n)"
    if 0 in weight:
        return "the matrices are empty"
    if weight[1] >= _SIZE or weight[2] >= _SIZE:
        return f"matrices of size {_SIZE} or above"
    if weight[0] > _GROUPS:
        return f"more than {_GROUPS} experts"
    return None


_verdicts = Verdicts(_judge)


def grouped_matmul(
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    *,
    cumulative: bool,
    bias: Tensor | None = None,
    tail: bool = False,
    main_grad: bool = False,
) -> Tensor:
    """The rows of each expert times its matrix.  Nothing waits for the device.

    Args:
        x: (rows, k), rows sorted by expert; float16, bfloat16 or float32.
        weight: (experts, k, n) in the dtype of x; contiguous or a transposed view of a contiguous (experts, n, k) one,
            anything else is copied for the operator.  Its gradient has the same layout.
        group_list: (experts,), int32 or int64, rows of each expert.
        cumulative: `group_list` is their running sum instead.
        bias: (experts, n) in the dtype of x, added before rounding.
        tail: x may have rows past those of the last expert; their results and gradients are zero.  Without it the
            caller vouches that there are none.
        main_grad: 16-bit parameters that have a contiguous float32 tensor of their shape in `main_grad` get their
            gradient added to it, unrounded, and none in `grad`.  Not with one expert, without rows, with create_graph
            and under torch.compile: there it is the usual gradient.

    Returns:
        (rows, n), in the dtype of x, accumulated in float32.

    Raises:
        RuntimeError: the operator refuses the arguments; ask `unsupported` first.
    """
    if x.shape[0] == 0 or weight.shape[0] == 1:
        return one_expert(x, weight[0], group_list, bias, tail)
    groups = Groups.of(group_list, cumulative)
    result: Tensor
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (x, weight, bias)):
        owner = _owner(weight) if main_grad and not is_compiling() else None
        result = _Multiply.apply(x, weight, bias, *groups, tail, owner)
    else:
        result = multiply(x, [weight], bias, groups, tail)
    return result


def one_expert(x: Tensor, weight: Tensor, group_list: Tensor, bias: Tensor | None, tail: bool) -> Tensor:
    """By torch.mm: what the operator's documents leave out."""
    masked = tail and x.shape[0] > 0
    if masked:
        past = (torch.arange(x.shape[0], device=x.device) >= group_list[0]).unsqueeze(1)
        x = x.masked_fill(past, 0.0)
    with torch.autocast(x.device.type, enabled=False):  # the operator is not subject to it
        y = torch.mm(x, weight) if bias is None else torch.addmm(bias[0], x, weight)
    return y.masked_fill(past, 0.0) if masked else y


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group_list: Tensor,
        cumulative: bool,
        tail: bool,
        owner: weakref.ref[Tensor] | None,
    ) -> Tensor:
        ctx.owner = owner
        rows_wanted, weight_wanted = ctx.needs_input_grad[:2]
        groups = Groups(group_list, cumulative)
        # Made here, where the products of a layer share the counts: a backward pass may see a copy of them in each.
        empty = groups.empty() if weight_wanted else None
        ctx.save_for_backward(x if weight_wanted else None, weight if rows_wanted else None, group_list, empty)
        ctx.cumulative, ctx.tail = cumulative, tail
        ctx.transposed = is_transposed(weight)
        return multiply(x, [weight], bias, groups, tail)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None]:
        x, weight, group_list, empty = ctx.saved_tensors
        rows_wanted, weight_wanted, bias_wanted = ctx.needs_input_grad[:3]
        groups = Groups(group_list, ctx.cumulative)
        grad_x = grad_weight = grad_bias = None
        if rows_wanted:
            back = weight.transpose(1, 2)
            if differentiated():
                grad_x = grouped_matmul(grad, back, group_list, cumulative=ctx.cumulative, tail=ctx.tail)
            else:
                grad_x = multiply(grad, [back], None, groups, ctx.tail)
        total = None if ctx.owner is None or differentiated() else _main_grad(ctx.owner())
        if weight_wanted and total is not None:
            accumulate(total, x, grad, groups, ctx.transposed)
        elif weight_wanted:
            grad_weight = outer_of(x, grad, groups, ctx.transposed, ctx.tail, empty)
        if bias_wanted:
            grad_bias = outer_of(ones_for(grad), grad, groups, False, ctx.tail, empty)[:, 0]
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _owner(weight: Tensor) -> weakref.ref[Tensor] | None:
    """The parameter that `weight` is, or is a transposed view of, if its gradient may go to `main_grad`."""
    owner = weight if weight.is_leaf else weight._base
    if not hasattr(torch.ops.npu, "npu_grouped_matmul_add_"):
        return None
    if owner is None or not owner.is_leaf or _main_grad(owner) is None or weight.data_ptr() != owner.data_ptr():
        return None
    seen = weight.transpose(1, 2) if is_transposed(weight) else weight
    return weakref.ref(owner) if seen.shape == owner.shape and seen.stride() == owner.stride() else None


def _main_grad(owner: Tensor | None) -> Tensor | None:
    total = getattr(owner, "main_grad", None)
    if owner is None or type(total) is not Tensor or owner.dtype not in (torch.float16, torch.bfloat16):
        return None
    fits = total.shape == owner.shape and total.device == owner.device and total.is_contiguous()
    return total if fits and total.dtype == torch.float32 else None


def differentiated() -> bool:
    """Whether the backward that runs is differentiated itself (create_graph)."""
    return torch.is_grad_enabled() and not is_compiling()


def outer_of(
    x: Tensor, grad: Tensor, groups: Groups, transposed: bool, tail: bool, empty: Tensor | None = None
) -> Tensor:
    """The gradient of the matrices, attached to the graph where that is wanted."""
    if not differentiated():
        return outer(x, grad, groups, transposed, empty)
    result: Tensor = _Outer.apply(x, grad, *groups, transposed, tail)
    return result


class _Outer(torch.autograd.Function):
    """The gradient of the matrices, which has one too."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, grad: Tensor, group_list: Tensor, cumulative: bool, transposed: bool, tail: bool
    ) -> Tensor:
        ctx.save_for_backward(x, grad, group_list)
        ctx.cumulative, ctx.tail = cumulative, tail
        return outer(x, grad, Groups(group_list, cumulative), transposed)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, twice: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        x, grad, group_list = ctx.saved_tensors
        x_wanted, grad_wanted = ctx.needs_input_grad[:2]
        options = {"cumulative": ctx.cumulative, "tail": ctx.tail}
        grad_x = grouped_matmul(grad, twice.transpose(1, 2), group_list, **options) if x_wanted else None
        return grad_x, grouped_matmul(x, twice, group_list, **options) if grad_wanted else None, None, None, None, None
