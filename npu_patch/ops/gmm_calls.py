"""Calls of `npu_grouped_matmul`, and what its documents leave undefined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .per_tensor import Derived

#: Columns of ones that sum rows: as many as the matrix unit takes at once.
_ONES = 16


class Groups(NamedTuple):
    """int64 counts or sums, as the operator takes them."""

    group_list: Tensor
    cumulative: bool

    @classmethod
    def of(cls, group_list: Tensor, cumulative: bool) -> Groups:
        # A tensor that remembered itself would live forever.
        return cls(group_list if group_list.dtype == torch.int64 else _INT64(group_list), cumulative)

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


def past_the_last(rows: int, groups: Groups) -> Tensor:
    """(rows, 1), True for rows that belong to no expert."""
    return (torch.arange(rows, device=groups.group_list.device) >= groups.sums()[-1]).unsqueeze(1)


def is_transposed(weight: Tensor) -> bool:
    """A transposed view of contiguous matrices, and not contiguous itself."""
    return not weight.is_contiguous() and weight.transpose(-2, -1).is_contiguous()


def laid_out(weight: Tensor) -> Tensor:
    """The operator tells a transposed matrix by its strides; anything but that and a contiguous one is neither."""
    return weight if weight.is_contiguous() or weight.transpose(-2, -1).is_contiguous() else weight.contiguous()


def multiply(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, groups: Groups, tail: bool) -> Tensor:
    """Rows of each expert times its matrix; `weights` is one (experts, k, n), or (k, n) for each expert."""
    if bias is not None and x.dtype == torch.bfloat16:
        bias = bias.float()  # as documented
    y = _operator(x.contiguous(), [laid_out(weight) for weight in weights], bias, groups, 0)
    return y.masked_fill_(past_the_last(x.shape[0], groups), 0.0) if tail else y


def outer(x: Tensor, grad: Tensor, groups: Groups, transposed: bool, empty: Tensor | None = None) -> Tensor:
    """`x[rows of e].T @ grad[rows of e]` of each expert, (experts, k, n); stored as (experts, n, k) if transposed.

    `empty` is that of the groups, if it is known.
    """
    left, right = (grad, x) if transposed else (x, grad)
    result = _operator(_dense(left).t(), [right.contiguous()], None, groups, 2)
    result.masked_fill_(groups.empty() if empty is None else empty, 0.0)
    return result.transpose(1, 2) if transposed else result


def accumulate(total: Tensor, x: Tensor, grad: Tensor, groups: Groups, transposed: bool) -> None:
    """Adds what `outer` returns to float32 `total`, (experts, k, n) or (experts, n, k) if transposed, unrounded.

    The operator reads its group list as a running sum whatever it is told (`group_list_type` is ignored on A2 and A3).
    """
    left, right = (grad, x) if transposed else (x, grad)
    torch.ops.npu.npu_grouped_matmul_add_.default(total, left.contiguous(), right.contiguous(), groups.sums())


def _dense(x: Tensor) -> Tensor:
    """Contiguous, and with the strides of a contiguous tensor also where there is but one row."""
    return x.contiguous().view(-1).view(x.shape)


def ones_for(grad: Tensor) -> Tensor:
    """`outer(ones_for(grad), grad, ...)[:, 0]` is the sum of the rows of each expert."""
    return grad.new_ones((grad.shape[0], _ONES))


def _operator(x: Tensor, weights: list[Tensor], bias: Tensor | None, groups: Groups, kind: int) -> Tensor:
    result: Tensor = torch.ops.npu.npu_grouped_matmul.default(
        [x],
        weights,
        bias=None if bias is None else [bias],
        group_list=groups.group_list,
        split_item=3,
        group_type=kind,
        group_list_type=groups.kind(),
    )[0]
    return result
