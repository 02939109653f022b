"""The rotation of query and key, once the rows of the tables are known.

torchtitan rotates in float32 whatever the model's type.  So does this: the tensors are cast up into one buffer, rotated
by one operator and cast back, with float32 tables.  Where an original rotates in the type of its input, or where the
user asks for that (`rope:tables=input`), every tensor goes straight to the operator, with tables in its type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops import rope as op
from ...ops.guards import FLOATS, FUNCTORCH, NOT_ON_NPU, subclass_reason, transforming
from .rope_rows import Rows
from .typecheck import TYPE_CHECKING_REASON, type_checking

Tensors = tuple[Tensor, ...]


class Plan(NamedTuple):
    """How tensors of known shapes and types are rotated.

    Args:
        rows: of the tables, in the type of the rotation.
        together: cast up into one float32 buffer; else each by itself, in its own type.
        folded: the batch is folded into the sequence, since the rows are per sample.
        swapped: the tensors are (B, N, L, D) and not (B, L, N, D).
    """

    rows: Rows
    together: bool
    folded: bool
    swapped: bool


def call_reason(tensors: Tensors) -> str | None:
    """What may differ from call to call, whatever the shapes."""
    for x in tensors:
        if type(x) is not Tensor and (reason := subclass_reason(x)):
            return reason
    if transforming():
        return FUNCTORCH
    return TYPE_CHECKING_REASON if type_checking() else None


def plan(tensors: Tensors, rows: Rows, wide: bool, swapped: bool = False) -> str | Plan:
    """The plan, or why the operator cannot take the tensors; for such as `call_reason` has passed.

    It depends on shapes, types and devices alone, so it is made once per rows: for all layers of a step.

    Args:
        tensors: one or two, (B, L, N, D) with the same B, L and D.
        rows: float32, for L, or for B * L where they are per sample.
        wide: rotate in float32; else in the type of the tensors.
        swapped: the tensors are (B, N, L, D).
    """
    question = (wide, swapped, *((x.shape, x.dtype, x.device) for x in tensors))
    known: str | Plan | None = rows.plans.get(question)
    if known is None:
        known = _judge(tensors, rows, wide, swapped)
        rows.plans[question] = known
    return known


def _judge(tensors: Tensors, rows: Rows, wide: bool, swapped: bool) -> str | Plan:
    if reason := pair_reason(tensors, swapped):
        return reason
    batch, length, _, size = _shape(tensors[0], swapped)
    together = wide and any(x.dtype is not torch.float32 for x in tensors)
    folded = rows.cos.shape[1] != length
    if rows.cos.shape[1] not in (length, batch * length) or rows.cos.shape[-1] != size:
        return "the tables are not for this length and width"
    if rows.cos.device != tensors[0].device:
        return "the tables are on another device"
    if not together and len({x.dtype for x in tensors}) > 1:
        return "query and key differ in type"
    heads = [_shape(x, swapped)[2] for x in tensors]
    dtype = torch.float32 if together else tensors[0].dtype
    for n in [sum(heads)] if together else heads:
        shape = (1, batch * length, n, size) if folded else (batch, length, n, size)
        if reason := op.judge(shape, rows.cos.shape, dtype, tensors[0].device, rows.mode, False):
            return reason
    return Plan(rows.cast(dtype), together, folded, swapped)


def pair_reason(tensors: Tensors, swapped: bool = False) -> str | None:
    """What the tensors must be before anything is made for them."""
    if any(x.device.type != "npu" for x in tensors):
        return NOT_ON_NPU
    if any(x.dim() != 4 for x in tensors):
        return "query or key is not 4-D"
    shapes = {(s[0], s[1], s[3]) for s in (_shape(x, swapped) for x in tensors)}
    if len(shapes) > 1 or len({x.device for x in tensors}) > 1:
        return "query and key are not (B, L, N, D) with the same B, L and D"
    if any(x.dtype not in FLOATS for x in tensors):
        return "query or key is neither float32, bfloat16 nor float16"
    if any(x.numel() == 0 for x in tensors):
        return "the input is empty"
    return None


def _shape(x: Tensor, swapped: bool) -> Sequence[int]:
    """(B, L, N, D)."""
    a, b, c, d = x.shape
    return (a, c, b, d) if swapped else (a, b, c, d)


def rotate(tensors: Tensors, chosen: Plan) -> Tensors:
    """The tensors rotated, each in its shape and type."""
    rows, together, folded, swapped = chosen
    cos, sin, mode = rows.cos, rows.sin, rows.mode
    adjoint = rows.adjoint() if op.needs_adjoint(tensors[0], tensors[-1]) else None
    if together:
        if adjoint is not None:
            result: Tensors = _RotateWide.apply(cos, sin, adjoint, mode, folded, swapped, *tensors)
            return result
        if len(tensors) == 2 and not folded and not swapped:
            return _turn_pair(*tensors, cos, sin, mode, op.rotate_by_constants)
        return _turn(tensors, cos, sin, mode, folded, swapped)
    # swap: these tables are never those of (B, N, S, D).
    turn = op.rotate_by_constants
    if not folded and not swapped:
        if len(tensors) == 2:
            first, last = tensors
            return turn(first, cos, sin, mode, adjoint, False), turn(last, cos, sin, mode, adjoint, False)
        return tuple(turn(x, cos, sin, mode, adjoint, False) for x in tensors)
    outputs = []
    for x in tensors:
        view = x.transpose(1, 2) if swapped else x
        flat = view.reshape(1, -1, *view.shape[2:]) if folded else view
        y = turn(flat, cos, sin, mode, adjoint, False).view(view.shape)
        outputs.append(y.transpose(1, 2) if swapped else y)
    return tuple(outputs)


def _turn(tensors: Tensors, cos: Tensor, sin: Tensor, mode: str, folded: bool, swapped: bool) -> Tensors:
    """All rotated by one operator; cast up on the way into a buffer and back on the way out of the result."""
    if len(tensors) == 2 and not folded and not swapped:
        return _turn_pair(*tensors, cos, sin, mode, op.rotate)
    views = [x.transpose(1, 2) for x in tensors] if swapped else tensors
    batch, length, _, size = views[0].shape
    heads = [view.shape[2] for view in views]
    room = views[0].new_empty((batch, length, sum(heads), size), dtype=torch.float32)
    ends = [sum(heads[: i + 1]) for i in range(len(heads))]
    for view, n, end in zip(views, heads, ends, strict=True):
        room[:, :, end - n : end].copy_(view)
    buffer = room.view(1, batch * length, -1, size) if folded else room
    turned = op.rotate(buffer, cos, sin, mode, swap=False).view(room.shape)
    outputs = []
    for x, n, end in zip(tensors, heads, ends, strict=True):
        part = turned[:, :, end - n : end]
        # Contiguous results: the attention operator would copy strided ones, in its forward and again in its backward.
        if swapped:
            outputs.append(part.transpose(1, 2).to(x.dtype, memory_format=torch.contiguous_format))
        else:
            outputs.append(part.to(x.dtype))
    return tuple(outputs)


def _turn_pair(
    first: Tensor, last: Tensor, cos: Tensor, sin: Tensor, mode: str, turn: Callable[..., Tensor]
) -> Tensors:
    """`_turn` of two tensors as they are, the usual call, without its lists.

    Args:
        turn: `ops.rope.rotate`, or `rotate_by_constants` where no gradient is recorded.
    """
    batch, length, heads, size = first.shape
    room = first.new_empty((batch, length, heads + last.shape[2], size), dtype=torch.float32)
    room[:, :, :heads].copy_(first)
    room[:, :, heads:].copy_(last)
    turned = turn(room, cos, sin, mode, None, False)
    return turned[:, :, :heads].to(first.dtype), turned[:, :, heads:].to(last.dtype)


class _RotateWide(torch.autograd.Function):
    """Tensors in half precision, rotated in float32; saves two tables and no activation."""

    @staticmethod
    def forward(
        ctx: Any, cos: Tensor, sin: Tensor, adjoint: Tensor, mode: str, folded: bool, swapped: bool, *tensors: Tensor
    ) -> Tensors:
        ctx.save_for_backward(cos, adjoint)
        ctx.how = mode, folded, swapped
        return _turn(tensors, cos, sin, mode, folded, swapped)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        cos, adjoint = ctx.saved_tensors
        return (None, None, None, None, None, None, *_turn(gradients, cos, adjoint, *ctx.how))


def rotate_traced(tensors: Tensors, rows: Rows, wide: bool) -> str | Tensors:
    """The same in operators that torch.compile and autograd see one by one, or why not."""
    batch, length = tensors[0].shape[:2]
    folded = rows.cos.shape[1] != length
    outputs = []
    for x in tensors:
        view = x.reshape(1, batch * length, *x.shape[2:]) if folded else x
        view = view.float() if wide else view
        cos, sin = rows.cos.to(view.dtype), rows.sin.to(view.dtype)
        if reason := op.unsupported(view, cos, sin, rows.mode):
            return reason
        outputs.append(op.rotate(view, cos, sin, rows.mode).reshape(x.shape).type_as(x))
    return tuple(outputs)
