"""Rotary position embedding: ``npu_rotary_mul`` and its backward."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import limits
from .base import UNDEFINED, Call, kernel

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class _Layout:
    """One reading of the dimensions of x, and the dimensions in which the table may be as large as x."""

    name: str
    batch: int
    heads: int
    tokens: int
    #: Dimensions where the table has x's size; it has size 1 in the others.
    tables: tuple[tuple[int, ...], ...]

    def matches(self, x: Tensor, table: Tensor) -> bool:
        return any(
            all(table.shape[i] == (x.shape[i] if i in full else 1) for i in range(x.dim() - 1)) for full in self.tables
        )

    def interleave_matches(self, x: Tensor, table: Tensor) -> bool:
        """Interleave takes only tables that are the same for the whole batch and all heads."""
        return all(table.shape[i] == (x.shape[i] if i == self.tokens else 1) for i in range(x.dim() - 1))


# The operator has no layout argument: it infers the layout from the shapes.
_BNSD = _Layout("BNSD", 0, 1, 2, ((2,), (0, 2), (0, 1, 2)))
_BSND = _Layout("BSND", 0, 2, 1, ((1,), (0, 1), (0, 1, 2)))
_SBND = _Layout("SBND", 1, 2, 0, ((0,), (0, 1), (0, 1, 2)))
_LAYOUTS = (_BNSD, _BSND, _SBND)


def _check(call: Call, x: Tensor, r1: Tensor, r2: Tensor, mode: str) -> None:
    call.require(x.dtype in _FLOATS, "input", f"dtype {x.dtype} is not supported")
    call.require(mode in ("half", "interleave"), "rotary_mode", f"{mode!r} is not simulated")
    call.require(x.dim() in (3, 4), "input", f"must have 3 or 4 dimensions, has {x.dim()}")
    call.require(x.numel() > 0, "input", "empty tensors are not supported")
    head_dim = x.shape[-1]
    call.require(head_dim % 2 == 0, "input", f"the head size must be even, is {head_dim}")
    most = call.soc.rotary_head_dim
    call.require(head_dim <= most, "input", f"the head size must be at most {most}, is {head_dim}")
    call.require(r1.shape == r2.shape, "r2", f"shape {list(r2.shape)} differs from that of r1 {list(r1.shape)}")
    call.require(r1.dim() == x.dim(), "r1", f"must have {x.dim()} dimensions as the input, has {r1.dim()}")
    call.require(r1.shape[-1] == head_dim, "r1", f"must be as wide as the head size {head_dim}, is {r1.shape[-1]}")
    if call.soc.rotary_any_broadcast:
        fits = all(t in (1, n) for t, n in zip(r1.shape, x.shape, strict=True))
        call.require(fits, "r1", f"shape {list(r1.shape)} does not broadcast to {list(x.shape)}")
    elif x.dim() == 3:
        _check_tnd(call, x, r1, mode)
    else:
        _check_layouts(call, x, r1, mode)


def _check_tnd(call: Call, x: Tensor, r1: Tensor, mode: str) -> None:
    tokens, heads = x.shape[:2]
    allowed = [(tokens, 1)] if mode == "interleave" else [(tokens, 1), (tokens, heads)]
    call.require(tuple(r1.shape[:2]) in allowed, "r1", f"shape {list(r1.shape)} is not T1D or TND of {list(x.shape)}")
    call.require(heads <= limits.ROTARY_HEADS, "input", f"N must be below {limits.ROTARY_HEADS + 1}, is {heads}")


def _check_layouts(call: Call, x: Tensor, r1: Tensor, mode: str) -> None:
    """Some reading of the shapes must satisfy every limit; which one the device takes when several do is unknown."""
    reasons = []
    for layout in _LAYOUTS:
        matches = layout.interleave_matches if mode == "interleave" else layout.matches
        if matches(x, r1):
            reason = _layout_limit(call, layout, x, mode)
            if reason is None:
                return
            reasons.append(f"as {layout.name}, {reason}")
    if not reasons:
        kind = "11SD, 1S1D or S11D" if mode == "interleave" else "11SD, B1SD, 1S1D, BS1D, S11D, SB1D or full"
        call.refuse("r1", f"shape {list(r1.shape)} is not {kind} of {list(x.shape)}, which {mode} mode needs")
    call.refuse("input", "; ".join(reasons))


def _layout_limit(call: Call, layout: _Layout, x: Tensor, mode: str) -> str | None:
    batch, heads, tokens = x.shape[layout.batch], x.shape[layout.heads], x.shape[layout.tokens]
    if mode == "interleave":
        most = limits.ROTARY_INTERLEAVE_BATCH_HEADS
        return None if batch * heads <= most else f"B*N must be below {most + 1}, is {batch * heads}"
    if batch > limits.ROTARY_BATCH or heads > limits.ROTARY_HEADS:
        return f"B and N must be below {limits.ROTARY_BATCH + 1}, are {batch} and {heads}"
    if layout is not _BNSD:
        return None
    head_dim = x.shape[-1]
    if (head_dim // 2) % (32 // x.element_size()) == 0:
        return None if batch * heads <= 8 * tokens else f"B*N must be at most 8*S, is {batch * heads} for S={tokens}"
    if head_dim >= 80 or batch * heads * 2 <= math.ceil(tokens / call.soc.cores):
        return None
    return f"a head size of {head_dim} needs B*N*2 at most S/{call.soc.cores}, is {batch * heads * 2} for S={tokens}"


def _check_backward(call: Call, x: Tensor, r1: Tensor, table_gradient: bool) -> None:
    if call.soc.rotary_any_broadcast or x.dim() == 3:
        return
    per_sample = r1.shape[0] == x.shape[0] > 1 and sum(size > 1 for size in r1.shape[:3]) == 2
    readings = [layout for layout in (_BNSD, _BSND) if layout.matches(x, r1)]
    if per_sample and readings and not _SBND.matches(x, r1):
        fits = any(x.shape[0] < x.shape[layout.tokens] for layout in readings)
        call.require(fits, "input", f"backward with a table per sample needs B < S, shape is {list(x.shape)}")
    if table_gradient:
        products = [x.shape[layout.batch] * x.shape[layout.heads] for layout in _LAYOUTS if layout.matches(x, r1)]
        most = limits.ROTARY_TABLE_GRADIENT_BATCH_HEADS
        call.require(min(products) <= most, "r1", f"its gradient needs B*N at most {most}, is {min(products)}")


def _rotate(x: Tensor, mode: str) -> Tensor:
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _rotate_back(x: Tensor, mode: str) -> Tensor:
    """The transpose of ``_rotate``, which is also its inverse."""
    return -_rotate(x, mode)


@kernel("npu_rotary_mul", models=("input", "r1", "r2", "rotary_mode"))
def npu_rotary_mul(call: Call, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str) -> Tensor:
    """``input * r1 + rotate(input) * r2``. torch_npu casts r1 and r2 to the input's dtype, without a word."""
    _check(call, input, r1, r2, rotary_mode)
    x, cos, sin = input.float(), r1.to(input.dtype).float(), r2.to(input.dtype).float()
    return (x * cos + _rotate(x, rotary_mode) * sin).to(input.dtype)


@kernel("npu_rotary_mul_backward", models=("grad", "input", "r1", "r2", "rotary_mode"))
def npu_rotary_mul_backward(
    call: Call, grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str
) -> tuple[Tensor, object, object]:
    """All gradients in the input's dtype. Those of r1 and r2 are written only if one of them requires a gradient."""
    _check(call, input, r1, r2, rotary_mode)
    call.require(grad.shape == input.shape, "grad", f"shape {list(grad.shape)} is not that of the input")
    wanted = call.needs_grad("r1") or call.needs_grad("r2")
    _check_backward(call, input, r1, wanted)
    g, cos, sin = grad.float(), r1.to(input.dtype).float(), r2.to(input.dtype).float()
    dx = (g * cos + _rotate_back(g * sin, rotary_mode)).to(input.dtype)
    if not wanted:
        return dx, UNDEFINED, UNDEFINED
    x = input.float()
    tables = (g * x).sum_to_size(r1.shape), (g * _rotate(x, rotary_mode)).sum_to_size(r2.shape)
    return dx, tables[0].to(input.dtype), tables[1].to(input.dtype)
