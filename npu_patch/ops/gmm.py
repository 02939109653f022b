"""Grouped matrix multiplication: the rows of each expert times the expert's matrix, in one launch.

    y[rows of e] = x[rows of e] @ weight[e] + bias[e]

`npu_grouped_matmul` has no derivative of its own (a backward pass would only warn, and leave no gradient), so that both
gradients are grouped multiplications here: by the transposed matrices, and of the rows of each expert with each other.

What its documents leave undefined is defined here: rows that belong to no expert become zero where they may exist, and
an expert without rows gets a zero gradient.  One expert alone is outside the documents and multiplied by torch.mm.

Source: operator documents torch_npu.npu_grouped_matmul (op-plugin) and aclnnGroupedMatmulV5 (ops-transformer).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .availability import is_ascend950
from .guards import FLOATS, FUNCTORCH, NOT_ON_NPU, PLAIN_TYPES, dtype_name, subclass_reason, transforming
from .per_tensor import Derived
from .verdicts import Verdicts

_SIZE = 65536
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
    x: Tensor, weight: Tensor, group_list: Tensor, *, cumulative: bool, bias: Tensor | None = None, tail: bool = False
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

    Returns:
        (rows, n), in the dtype of x, accumulated in float32.

    Raises:
        RuntimeError: the operator refuses the arguments; ask `unsupported` first.
    """
    if x.shape[0] == 0 or weight.shape[0] == 1:
        return _one_expert(x, weight, group_list, bias, tail)
    groups = Groups(_INT64(group_list), cumulative)
    result: Tensor
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or (bias is not None and _learned(bias))):
        result = _Multiply.apply(x, weight, bias, *groups, tail)
    else:
        result = _multiply(x, weight, bias, groups, tail)
    return result


def _learned(bias: Tensor) -> bool:
    return bias.requires_grad


class Groups(NamedTuple):
    """int64 counts or sums, as the operator takes them."""

    group_list: Tensor
    cumulative: bool

    def kind(self) -> int:
        return 0 if self.cumulative else 1

    def sums(self) -> Tensor:
        return self.group_list if self.cumulative else _SUMS(self.group_list)

    def empty(self) -> Tensor:
        """(experts, 1, 1), True for experts without rows."""
        return (_EMPTY_SUMS if self.cumulative else _EMPTY_COUNTS)(self.group_list)


def _empty_sums(sums: Tensor) -> Tensor:
    return torch.eq(sums, torch.nn.functional.pad(sums[:-1], (1, 0))).view(-1, 1, 1)


_INT64 = Derived(Tensor.long)
_SUMS = Derived(lambda counts: counts.cumsum(0))
_EMPTY_SUMS = Derived(_empty_sums)
_EMPTY_COUNTS = Derived(lambda counts: torch.eq(counts, 0).view(-1, 1, 1))


def _past_the_last(rows: int, groups: Groups) -> Tensor:
    """(rows, 1), True for rows that belong to no expert."""
    return (torch.arange(rows, device=groups.group_list.device) >= groups.sums()[-1]).unsqueeze(1)


def _one_expert(x: Tensor, weight: Tensor, group_list: Tensor, bias: Tensor | None, tail: bool) -> Tensor:
    """By torch.mm: what the operator's documents leave out."""
    masked = tail and x.shape[0] > 0
    if masked:
        past = (torch.arange(x.shape[0], device=x.device) >= group_list[0]).unsqueeze(1)
        x = x.masked_fill(past, 0.0)
    y = torch.mm(x, weight[0]) if bias is None else torch.addmm(bias[0], x, weight[0])
    return y.masked_fill(past, 0.0) if masked else y


def _laid_out(weight: Tensor) -> Tensor:
    """The operator tells a transposed matrix by its strides; anything but that and a contiguous one is neither."""
    return weight if weight.is_contiguous() or weight.transpose(1, 2).is_contiguous() else weight.contiguous()


def _operator(x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups, kind: int) -> Tensor:
    result: Tensor = torch.ops.npu.npu_grouped_matmul.default(
        [x],
        [weight],
        bias=None if bias is None else [bias],
        group_list=groups.group_list,
        split_item=3,
        group_type=kind,
        group_list_type=groups.kind(),
    )[0]
    return result


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups, tail: bool) -> Tensor:
    if bias is not None and bias.dtype == torch.bfloat16:
        bias = bias.float()  # documented for bfloat16 rows
    y = _operator(x.contiguous(), _laid_out(weight), bias, groups, 0)
    return y.masked_fill_(_past_the_last(x.shape[0], groups), 0.0) if tail else y


def _outer(x: Tensor, grad: Tensor, groups: Groups, empty: Tensor, transposed: bool) -> Tensor:
    """`x[rows of e].T @ grad[rows of e]` of each expert, (experts, k, n); stored as (experts, n, k) if transposed."""
    left, right = (grad, x) if transposed else (x, grad)
    result = _operator(left.contiguous().t(), right.contiguous(), None, groups, 2)
    result.masked_fill_(empty, 0.0)
    return result.transpose(1, 2) if transposed else result


def _is_transposed(weight: Tensor) -> bool:
    return not weight.is_contiguous() and weight.transpose(1, 2).is_contiguous()


def _sum_by_expert(grad: Tensor, groups: Groups, dtype: torch.dtype, tail: bool) -> Tensor:
    """(experts, n), summed in float32; `grad` is zero where rows belong to no expert."""
    experts = torch.bucketize(torch.arange(grad.shape[0], device=grad.device), groups.sums(), right=True)
    if tail:
        experts = experts.clamp_(max=groups.group_list.shape[0] - 1)
    total = torch.zeros(groups.group_list.shape[0], grad.shape[1], dtype=torch.float32, device=grad.device)
    return total.index_add_(0, experts, grad.float()).to(dtype)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group_list: Tensor, cumulative: bool, tail: bool
    ) -> Tensor:
        rows_wanted, weight_wanted = ctx.needs_input_grad[:2]
        groups = Groups(group_list, cumulative)
        # Made here, where the products of a layer share the counts: a backward pass may see a copy of them in each.
        empty = groups.empty() if weight_wanted else None
        ctx.save_for_backward(x if weight_wanted else None, weight if rows_wanted else None, group_list, empty)
        ctx.cumulative, ctx.tail = cumulative, tail
        ctx.transposed = _is_transposed(weight)
        ctx.dtype = None if bias is None else bias.dtype
        return _multiply(x, weight, bias, groups, tail)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, weight, group_list, empty = ctx.saved_tensors
        groups = Groups(group_list, ctx.cumulative)
        rows_wanted, weight_wanted, bias_wanted = ctx.needs_input_grad[:3]
        twice = torch.is_grad_enabled() and not is_compiling()  # create_graph
        grad_x = grad_weight = grad_bias = None
        if rows_wanted:
            back = weight.transpose(1, 2)
            if twice:
                grad_x = grouped_matmul(grad, back, group_list, cumulative=ctx.cumulative, tail=ctx.tail)
            else:
                grad_x = _multiply(grad, back, None, groups, ctx.tail)
        if weight_wanted:
            if twice:
                grad_weight = _Outer.apply(x, grad, group_list, ctx.cumulative, ctx.transposed, ctx.tail)
            else:
                grad_weight = _outer(x, grad, groups, empty, ctx.transposed)
        if bias_wanted:
            if ctx.tail:
                grad = grad.masked_fill(_past_the_last(grad.shape[0], groups), 0.0)
            grad_bias = _sum_by_expert(grad, groups, ctx.dtype, ctx.tail)
        return grad_x, grad_weight, grad_bias, None, None, None


class _Outer(torch.autograd.Function):
    """The gradient of the matrices, which has one too."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, grad: Tensor, group_list: Tensor, cumulative: bool, transposed: bool, tail: bool
    ) -> Tensor:
        ctx.save_for_backward(x, grad, group_list)
        ctx.cumulative, ctx.tail = cumulative, tail
        groups = Groups(group_list, cumulative)
        return _outer(x, grad, groups, groups.empty(), transposed)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, twice: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None, None]:
        x, grad, group_list = ctx.saved_tensors
        options = {"cumulative": ctx.cumulative, "tail": ctx.tail}
        grad_x = grouped_matmul(grad, twice.transpose(1, 2), group_list, **options)
        return grad_x, grouped_matmul(x, twice, group_list, **options), None, None, None, None
