"""Cross entropy of class indices, rows of an ignored class left out: `npu_cross_entropy_loss`.

The operator takes a negative ignore_index for "ignore nothing" and has no gradient for a mean with an ignored class, so
it is asked for the loss of every row, with ignored rows pointed at class 0, and the rows are masked and summed here.

A fused linear cross entropy, which would not write the logits at all, is not offered.  Models compute their logits
before they call a loss function, and return them, so they would have to be computed all the same; torch_npu's three
operators for it come and go between wheels, have neither a shape function nor a derivative, and the document of their
gradient contradicts itself (softmax times the transposed weight).

Source: operator documents torch_npu.npu_cross_entropy_loss (op-plugin), aclnnCrossEntropyLoss and
aclnnCrossEntropyLossGrad (ops-nn/loss).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .availability import is_ascend950
from .guards import FUNCTORCH, NOT_ON_NPU, PLAIN_TYPES, dtype_name, subclass_reason, transforming

_ROWS = 199_999  # one document says at most 200000, the other less


def unsupported(logits: Tensor, target: Tensor) -> str | None:
    """Why the fused operator cannot take this call, or None.

    Args:
        logits: (rows, classes).
        target: (rows,).
    """
    if logits.device.type != "npu":
        return NOT_ON_NPU
    if transforming():
        return FUNCTORCH
    if (type(logits) not in PLAIN_TYPES or type(target) not in PLAIN_TYPES) and (
        reason := subclass_reason(logits, target)
    ):
        return reason
    if is_ascend950():  # in some documents it is supported there, in others not
        return "npu_cross_entropy_loss is not documented for Ascend950"
    if logits.dtype != torch.float32:  # the operator rounds log-probabilities and rows to the dtype of the logits
        return f"logits of type {dtype_name(logits.dtype)}"
    if target.dtype != torch.int64:
        return f"labels of type {dtype_name(target.dtype)}"
    if target.device != logits.device:
        return "the labels are on another device"
    if logits.dim() != 2 or target.dim() != 1 or target.shape[0] != logits.shape[0]:
        return "logits and labels are not (rows, classes) and (rows,)"
    if logits.numel() == 0:
        return "the logits are empty"
    if logits.shape[0] > _ROWS:
        return f"more than {_ROWS} rows"
    return None


def cross_entropy(logits: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Sum or mean of `logsumexp(logits) - logits[target]` over the rows whose target is not `ignore_index`.

    Args:
        logits: (rows, classes), float32.
        target: (rows,), int64: classes, or `ignore_index`, which may be any number.
        ignore_index: rows with this target count nothing.
        reduction: "sum" or "mean"; the mean of no rows is nan.

    Returns:
        A scalar, float32.

    Raises:
        RuntimeError: the operator refuses the arguments; ask `unsupported` first.
    """
    if reduction not in ("sum", "mean"):
        raise ValueError(f"reduction {reduction!r} is neither 'sum' nor 'mean'")
    loss: Tensor = _CrossEntropy.apply(logits.contiguous(), target, ignore_index, reduction == "mean")[0]
    return loss


def _classes(target: Tensor, ignored: Tensor, ignore_index: int) -> Tensor:
    """The targets, with class 0 for ignored rows; any other that is no class stays, for the operator to refuse."""
    return torch.add(target, ignored, alpha=-ignore_index)  # in one launch


class _CrossEntropy(torch.autograd.Function):
    """Saves the log-probabilities and the targets, as the original does, and no mask of its own.

    The log-probabilities are a result, so that as saved they belong to the graph: the gradient has one too.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, mean: bool) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ignored = target == ignore_index
        rows, log_prob, _, _ = torch.ops.npu.npu_cross_entropy_loss.default(
            logits, _classes(target, ignored, ignore_index), None, "none"
        )
        loss = rows.masked_fill_(ignored, 0.0).sum()  # not multiplied: the loss of an ignored row may be infinite
        ctx.ignore_index = ignore_index
        if not mean:
            ctx.save_for_backward(log_prob, target)
            return loss, log_prob
        count = target.shape[0] - ignored.sum(dtype=torch.float32)
        ctx.save_for_backward(log_prob, target, count)
        return loss / count, log_prob

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, grad_log_prob: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        log_prob, target, *count = ctx.saved_tensors
        result = None
        if grad is not None:
            ignored = target == ctx.ignore_index
            classes = _classes(target, ignored, ctx.ignore_index)
            scale = grad / count[0] if count else grad
            rows = scale.expand(target.shape).masked_fill(ignored, 0.0)
            if torch.is_grad_enabled() and not is_compiling():  # create_graph: the operator has no derivative
                rows = rows.unsqueeze(1)
                result = (log_prob.exp() * rows).scatter_add(1, classes.unsqueeze(1), -rows)
            else:
                result = torch.ops.npu.npu_cross_entropy_loss_backward.default(
                    rows, log_prob, classes, reduction="none"
                )
        if grad_log_prob is not None:  # in the second pass
            through = grad_log_prob - log_prob.exp() * grad_log_prob.sum(1, keepdim=True)
            result = through if result is None else result + through
        return result, None, None, None
