"""Losses."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import limits
from .base import Call, kernel

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_REDUCTIONS = ("mean", "sum", "none")


def _check(
    call: Call, name: str, rows: Tensor, target: Tensor, weight: Tensor | None, reduction: str, ignore_index: int
) -> None:
    call.require(call.soc.name not in limits.NOT_ON_950, name, "the operator is not documented for this chip")
    call.require(rows.dtype in _FLOATS, name, f"dtype {rows.dtype} is not supported")
    call.require(rows.dim() == 2, name, f"must be [N, C], has {rows.dim()} dimensions")
    count, classes = rows.shape
    call.require(0 < count <= limits.CROSS_ENTROPY_ROWS, name, f"{count} rows, of 1 to {limits.CROSS_ENTROPY_ROWS}")
    call.require(classes > 0, name, "no classes")
    call.require(target.dtype == torch.int64, "target", f"dtype {target.dtype} is not int64")
    call.require(target.shape == (count,), "target", f"shape {list(target.shape)} is not [{count}]")
    call.require(reduction in _REDUCTIONS, "reduction", f"{reduction!r} is none of {', '.join(_REDUCTIONS)}")
    call.require(ignore_index < classes, "ignore_index", f"{ignore_index} is not below the {classes} classes")
    # Not checked on the device, where a class out of range reads other memory. A negative ignore_index ignores nothing.
    call.require(
        bool(((target >= 0) & (target < classes)).all()),
        "target",
        f"classes must be in [0, {classes}); a negative ignore_index stands for none",
    )
    if weight is not None:
        call.require(weight.dtype == torch.float32, "weight", f"dtype {weight.dtype} is not float32")
        call.require(weight.shape == (classes,), "weight", f"shape {list(weight.shape)} is not [{classes}]")


def _row_weights(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    rows = torch.ones(target.shape) if weight is None else weight[target]
    return rows * (target != ignore_index) if ignore_index >= 0 else rows


@kernel("npu_cross_entropy_loss", models=("input", "target", "weight", "reduction", "ignore_index"))
def npu_cross_entropy_loss(
    call: Call, input: Tensor, target: Tensor, weight: Tensor | None, reduction: str, ignore_index: int
) -> tuple[Tensor, Tensor, None, None]:
    """``(loss, log_prob, zloss, lse)`` in float32, rounded to the input's dtype; the last two are empty.

    Where a gradient is wanted, a mean with a weight or an ignored class is documented as unsupported, and refused.
    """
    _check(call, "input", input, target, weight, reduction, ignore_index)
    if reduction == "mean" and call.needs_grad("input"):
        call.require(weight is None, "weight", "has no gradient with reduction 'mean'")
        call.require(ignore_index < 0, "ignore_index", "has no gradient with reduction 'mean'")
    log_prob = input.float().log_softmax(-1)
    weights = _row_weights(target, weight, ignore_index)
    rows = -log_prob.gather(1, target[:, None])[:, 0] * weights
    if reduction == "none":
        loss = rows
    else:
        loss = (rows.sum() / weights.sum() if reduction == "mean" else rows.sum()).reshape(1)
    return loss.to(input.dtype), log_prob.to(input.dtype), None, None


@kernel(
    "npu_cross_entropy_loss_backward",
    models=("grad_loss", "log_prob", "target", "weight", "grad_zloss", "lse_for_zloss", "reduction", "ignore_index"),
)
def npu_cross_entropy_loss_backward(
    call: Call,
    grad_loss: Tensor,
    log_prob: Tensor,
    target: Tensor,
    weight: Tensor | None,
    grad_zloss: Tensor | None,
    lse_for_zloss: Tensor | None,
    reduction: str,
    ignore_index: int,
) -> Tensor:
    """``exp(log_prob) * g - onehot * g`` of each row, g the row's part of the gradient.

    torch_npu's formula hands over the empty outputs of the forward as ``grad_zloss`` and ``lse_for_zloss``; the
    documents say that they are not used.
    """
    _check(call, "log_prob", log_prob, target, weight, reduction, ignore_index)
    call.require(grad_loss.dtype == log_prob.dtype, "grad_loss", f"dtype {grad_loss.dtype} is not {log_prob.dtype}")
    count = target.shape[0]
    if reduction == "none":
        call.require(grad_loss.shape == (count,), "grad_loss", f"shape {list(grad_loss.shape)} is not [{count}]")
    else:
        call.require(grad_loss.numel() == 1, "grad_loss", f"shape {list(grad_loss.shape)} is not one element")
    weights = _row_weights(target, weight, ignore_index)
    rows = grad_loss.float().reshape(-1) * weights
    if reduction == "mean":
        rows = rows / weights.sum()
    gradient = log_prob.float().exp() * rows[:, None]
    gradient.scatter_add_(1, target[:, None], -rows[:, None])
    return gradient.to(log_prob.dtype)
