"""Matrix multiplication by groups of rows: ``npu_grouped_matmul`` without quantisation.

    group_type 0:  y[rows of e] = x[rows of e] @ weight[e] + bias[e]
    group_type 2:  y[e] = x[:, columns of e] @ weight[rows of e]

Source: operator documents torch_npu.npu_grouped_matmul (op-plugin) and aclnnGroupedMatmulV5 (ops-transformer).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import limits
from .base import Call, kernel

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_NAN = float("nan")


def _transposed(matrix: Tensor) -> bool:
    """How the operator tells a transposed matrix: by its strides alone."""
    return matrix.stride(-2) == 1 and matrix.stride(-1) == matrix.shape[-2]


def _check_dtypes(call: Call, x: Tensor, weights: list[Tensor], bias: Tensor | None) -> None:
    floats = _FLOATS[:2] if call.soc.name == "Ascend950" else _FLOATS
    call.require(x.dtype in floats, "x", f"dtype {x.dtype} is not supported")
    for weight in weights:
        call.require(weight.dtype == x.dtype, "weight", f"dtype {weight.dtype} is not that of x, {x.dtype}")
    if len(weights) > 1:
        call.require(x.dtype != torch.float32, "weight", "float32 is supported in one tensor only")
    if bias is not None:
        wanted = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
        call.require(bias.dtype == wanted, "bias", f"dtype {bias.dtype} is not {wanted}")


def _check_sizes(call: Call, name: str, matrix: Tensor) -> None:
    """The limit holds for the last dimension of the stored layout."""
    last = matrix.shape[-2] if _transposed(matrix) else matrix.shape[-1]
    call.require(last < limits.GMM_SIZE, name, f"a last dimension of {last}, must be below {limits.GMM_SIZE}")


def _counts(call: Call, group_list: Tensor, kind: int | None, rows: int) -> list[int]:
    """Rows of each group."""
    call.require(group_list.dtype == torch.int64, "group_list", f"dtype {group_list.dtype} is not int64")
    call.require(group_list.dim() == 1, "group_list", f"must be one-dimensional, has {group_list.dim()} dimensions")
    call.require(kind in (0, 1), "group_list_type", f"{kind} is neither 0 nor 1; 2 is not simulated")
    counts = group_list if kind == 1 else group_list.diff(prepend=group_list.new_zeros(1))
    call.require(bool((counts >= 0).all()), "group_list", "counts below zero, or sums that decrease")
    total = int(counts.sum())
    call.require(total <= rows, "group_list", f"{total} rows in groups, there are {rows}")
    return counts.tolist()


@kernel(
    "npu_grouped_matmul",
    models=("x", "weight", "bias", "group_list", "split_item", "group_type", "group_list_type"),
)
def npu_grouped_matmul(
    call: Call,
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor] | None,
    group_list: Tensor | None,
    split_item: int | None,
    group_type: int | None,
    group_list_type: int | None,
) -> tuple[Tensor]:
    """One ``x``; one ``weight`` with a matrix for each group, or one tensor for each.  Returns one tensor.

    Accumulates in float32.  Rows past the last group are not written, and whether an empty group of ``group_type 2`` is
    is not documented: NaN.
    """
    call.require(len(x) == 1, "x", f"{len(x)} tensors, one is simulated")
    call.require(split_item in (2, 3), "split_item", f"{split_item} is neither 2 nor 3")
    call.require(group_type in (0, 2), "group_type", f"{group_type} is neither 0 nor 2")
    if group_list is None:
        call.refuse("group_list", "is needed for one x and one result")
    (rows,) = x
    call.require(rows.dim() == 2, "x", f"must have two dimensions, has {rows.dim()}")
    call.require(rows.numel() > 0, "x", "empty tensors are not documented")
    biases = bias[0] if bias else None
    _check_dtypes(call, rows, weight, biases)
    for name, matrix in (("x", rows), *(("weight", one) for one in weight)):
        _check_sizes(call, name, matrix)
    if group_type == 2:
        return (_by_columns(call, rows, weight, biases, group_list, group_list_type),)
    return (_by_rows(call, rows, weight, biases, group_list, group_list_type),)


def _by_rows(
    call: Call, x: Tensor, weight: list[Tensor], bias: Tensor | None, group_list: Tensor, kind: int | None
) -> Tensor:
    call.require(x.is_contiguous(), "x", "must be contiguous for group_type 0")
    if len(weight) == 1:
        call.require(weight[0].dim() == 3, "weight", f"must be [groups, k, n], has {weight[0].dim()} dimensions")
    else:
        call.require(bias is None, "bias", "is simulated for weights in one tensor only")
        uniform = len({_transposed(one) for one in weight if 1 not in one.shape}) <= 1
        call.require(uniform, "weight", "some are transposed matrices and others are not")
    most = limits.GMM_GROUPS if len(weight) == 1 else limits.GMM_LIST
    matrices = list(weight[0]) if len(weight) == 1 else weight
    call.require(1 < len(matrices) <= most, "group_list", f"{len(matrices)} groups, of 2 to {most}")
    call.require(group_list.numel() == len(matrices), "group_list", f"{group_list.numel()} of {len(matrices)} groups")
    for matrix in matrices:
        call.require(matrix.dim() == 2, "weight", f"must be [k, n], has {matrix.dim()} dimensions")
        call.require(
            matrix.is_contiguous() or _transposed(matrix), "weight", "is neither contiguous nor a transposed matrix"
        )
        call.require(matrix.shape[0] == x.shape[1], "weight", f"k is {matrix.shape[0]}, in x it is {x.shape[1]}")
    y = torch.full((x.shape[0], matrices[0].shape[1]), _NAN)
    if bias is not None:
        call.require(bias.shape == (len(matrices), y.shape[1]), "bias", f"shape {list(bias.shape)}")
    start = 0
    for index, count in enumerate(_counts(call, group_list, kind, x.shape[0])):
        part = x[start : start + count].float() @ matrices[index].float()
        y[start : start + count] = part if bias is None else part + bias[index].float()
        start += count
    return y.to(x.dtype)


def _by_columns(
    call: Call, x: Tensor, weight: list[Tensor], bias: Tensor | None, group_list: Tensor, kind: int | None
) -> Tensor:
    call.require(bias is None, "bias", "is not supported for group_type 2")
    call.require(len(weight) == 1 and weight[0].dim() == 2, "weight", "must be one tensor [m, n] for group_type 2")
    (right,) = weight
    call.require(_transposed(x), "x", "must be a transposed matrix for group_type 2")
    call.require(right.is_contiguous(), "weight", "must be contiguous for group_type 2")
    call.require(right.shape[0] == x.shape[1], "weight", f"m is {right.shape[0]}, in x it is {x.shape[1]}")
    groups = group_list.numel()
    call.require(1 < groups <= limits.GMM_GROUPS, "group_list", f"{groups} groups, of 2 to {limits.GMM_GROUPS}")
    y = torch.full((groups, x.shape[0], right.shape[1]), _NAN)
    start = 0
    for index, count in enumerate(_counts(call, group_list, kind, x.shape[1])):
        if count:
            y[index] = x[:, start : start + count].float() @ right[start : start + count].float()
        start += count
    return y.to(x.dtype)


@kernel("npu_grouped_matmul_add_", models=("input", "x", "weight", "group_list", "group_list_type"))
def npu_grouped_matmul_add_(
    call: Call, input: Tensor, x: Tensor, weight: Tensor, group_list: Tensor, group_list_type: int | None
) -> Tensor:
    """``input[e] += x[rows of e].T @ weight[rows of e]``, in float32.

    Before Ascend950 the running sum is read whatever ``group_list_type`` says; an empty group adds nothing.
    """
    call.require(input.dtype == torch.float32, "input", f"dtype {input.dtype} is not float32")
    call.require(x.dtype in _FLOATS[:2], "x", f"dtype {x.dtype} is neither float16 nor bfloat16")
    call.require(weight.dtype == x.dtype, "weight", f"dtype {weight.dtype} is not that of x, {x.dtype}")
    for name, one in (("input", input), ("x", x), ("weight", weight)):
        call.require(one.is_contiguous(), name, "must be contiguous")
    groups = group_list.numel()
    call.require(input.shape == (groups, x.shape[1], weight.shape[1]), "input", f"shape {list(input.shape)}")
    call.require(weight.shape[0] == x.shape[0], "weight", f"{weight.shape[0]} rows, x has {x.shape[0]}")
    kind = group_list_type if call.soc.name == "Ascend950" else 0
    y, start = input.clone(), 0
    for index, count in enumerate(_counts(call, group_list, kind, x.shape[0])):
        y[index] += x[start : start + count].float().t() @ weight[start : start + count].float()
        start += count
    return y
