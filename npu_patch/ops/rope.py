"""Rotary position embedding: `npu_rotary_mul` with tables of full width.

    half:        y = x * cos + cat(-x2, x1) * sin            where x = cat(x1, x2)
    interleave:  the same on pairs of neighbours, (x0, x1) -> (-x1, x0)

Source: operator documents torch_npu.npu_rotary_mul (op-plugin) and aclnnRotaryPositionEmbedding (ops-transformer).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .availability import is_ascend950
from .guards import FLOATS, FUNCTORCH, NOT_ON_NPU, dtype_name, subclass_reason, transforming
from .per_tensor import Derived
from .verdicts import Verdicts

MODES = ("half", "interleave")


def unsupported(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> str | None:
    """Why the fused operator cannot take this call, or None.

    Args:
        x: (B, N, S, D), (B, S, N, D), (S, B, N, D) or (T, N, D).
        cos, sin: as many dimensions as x, each of its size or 1, the last one D; in the dtype of x.
        mode: "half" or "interleave".
    """
    plain = type(x) is type(cos) is type(sin) is Tensor
    if not plain and (reason := subclass_reason(x, cos, sin)):
        return reason
    if transforming():
        return FUNCTORCH
    dtype, device, table = x.dtype, x.device, cos.shape
    if cos.dtype is not dtype or sin.dtype is not dtype:
        return "the tables are not in the input's type"  # torch_npu would round them silently
    if cos.device != device or sin.device != device:
        return "the tables are on another device"
    if sin.shape != table:
        return "cos and sin differ in shape"
    learned = (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled()
    if is_compiling():
        return judge(x.shape, table, dtype, device, mode, learned)
    facts = (x.shape, table, dtype, device, mode, learned)
    return _verdicts[facts] if plain else judge(*facts)


def judge(
    shape: Sequence[int], table: Sequence[int], dtype: torch.dtype, device: torch.device, mode: str, learned: bool
) -> str | None:
    """`unsupported` for an input and tables of these shapes, of one dtype and on one device.

    Args:
        learned: the tables get a gradient.
    """
    if device.type != "npu":
        return NOT_ON_NPU
    if dtype not in FLOATS:
        return f"input of type {dtype_name(dtype)}"
    if mode not in MODES:
        return f"rotary mode {mode}"
    if len(shape) not in (3, 4) or len(table) != len(shape):
        return "the input and the tables are not both 3-D or both 4-D"
    size = shape[-1]
    if table[-1] != size:
        return "the tables' last size is not the input's"
    if size % 2:
        return "odd head size"
    if 0 in shape:
        return "the input is empty"
    if learned and is_compiling():
        return "gradient to the tables under torch.compile"  # traced, torch_npu leaves it uninitialised
    if is_ascend950():
        return _limits_950(shape, table)
    return _limits(shape, table, mode, learned)


_verdicts = Verdicts(judge)


def _limits_950(shape: Sequence[int], table: Sequence[int]) -> str | None:
    if shape[-1] > 1024:
        return "head size above 1024"
    for size, own in zip(shape, table, strict=True):
        if own != size and own != 1:
            return "the tables do not broadcast to the input"
    return None


def _limits(shape: Sequence[int], table: Sequence[int], mode: str, learned: bool) -> str | None:
    """Limits of A2 and A3.  `rotate` presents (B, N, S, D) as (B, S, N, D), so only the limits of the latter count."""
    if shape[-1] >= 896:
        return "head size of 896 or above"
    if len(shape) == 3:  # TND
        tokens, heads = shape[0], shape[1]
        if table[0] != tokens or table[1] not in (1, heads):
            return "table layout is not T1D or TND"
        if mode == "interleave" and table[1] != 1:
            return "interleave needs tables shared by the heads"
        return "1000 heads or more" if heads >= 1000 else None
    a, b, c = shape[:3]
    p, q, r = table[:3]
    if p not in (1, a) or q not in (1, b) or r not in (1, c):
        return "the tables do not broadcast to the input"
    if is_bnsd(shape, table):
        b, c, q, r = c, b, r, q
    # From here the input is (B, S, N, D) or (S, B, N, D); a size of 1 counts as shared and as its own.
    if q == b and r == 1 and p in (1, a):  # 1S1D, BS1D
        batch, sequence, heads, shared = a, b, c, p == 1
    elif q == 1 and r == 1 and p == a:  # S11D
        batch, sequence, heads, shared = b, a, c, True
    elif p == a and q == b and r == c:
        batch, sequence, heads, shared = a, b, c, False
    else:
        return "table layout is not 1S1D, BS1D, S11D or of the input's shape"
    if mode == "interleave":
        if not shared and batch != 1:
            return "interleave needs tables shared by the batch and the heads"
        if r != 1 and heads != 1:
            return "interleave needs tables shared by the batch and the heads"
        if batch * heads >= 1000:
            return "batch times heads of 1000 or above"
    elif batch >= 1000 or heads >= 1000:
        return "batch or heads of 1000 or above"
    if learned:  # the operator's own backward has limits too
        if batch * heads > 1024:
            return "gradient to the tables with batch times heads above 1024"
        if not shared and r == 1 and batch >= sequence:
            return "gradient to the tables with a batch not below the sequence length"
    return None


def is_bnsd(shape: Sequence[int], table: Sequence[int]) -> bool:
    """True for (B, N, S, D) with a table shared by the heads."""
    return len(shape) == 4 and table[1] == 1 and table[2] == shape[2] and (shape[1] != 1 or shape[2] != 1)


def needs_adjoint(x: Tensor, y: Tensor | None = None) -> bool:
    """True when `rotate` of x or y will record a backward, which needs `adjoint_sine`."""
    return torch.is_grad_enabled() and (x.requires_grad or (y is not None and y.requires_grad))


def _exchanged(sin: Tensor, mode: str) -> Tensor:
    """-swap(sin): the halves exchanged, or neighbours exchanged, and the sign."""
    if mode == "half":
        return sin.roll(sin.shape[-1] // 2, -1).neg()
    return sin.unflatten(-1, (-1, 2)).flip(-1).flatten(-2).neg()


ADJOINTS = {mode: Derived(partial(_exchanged, mode=mode)) for mode in MODES}
"""Mode → `adjoint_sine` of that mode."""


def adjoint_sine(sin: Tensor, mode: str) -> Tensor:
    """The table b = -swap(sin): the exact backward of a rotation is grad * cos + R(grad) * b, whatever the tables hold.

    It is built once per table tensor object and content, so ask with the tensor that the caller keeps, before taking
    views of it; the result goes through the same views.  While compiling it is part of the graph.

    Args:
        sin: (..., D).
        mode: "half" or "interleave".
    """
    return ADJOINTS[mode](sin)


def _rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, mode: str, swap: bool) -> Tensor:
    """The operator, with (B, N, S, D) presented as (B, S, N, D).

    As (B, N, S, D) the half mode is refused for B * N > 8 * S (every decoding step) and for some D; and a BNSD tensor
    is most often a transposed view of a contiguous BSND one, which needs no copy this way.
    """
    if swap:
        x, cos, sin = x.transpose(1, 2), cos.transpose(1, 2), sin.transpose(1, 2)
        return torch.ops.npu.npu_rotary_mul.default(x, cos, sin, mode).transpose(1, 2)
    return torch.ops.npu.npu_rotary_mul.default(x, cos, sin, mode)


class Rotate(torch.autograd.Function):
    """`rotate_by_constants` with a backward.

    It saves two tables and no activation; torch_npu's own node keeps the input as well.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, mode: str, adjoint: Tensor, swap: bool) -> Tensor:
        ctx.save_for_backward(cos, adjoint)
        ctx.mode, ctx.swap = mode, swap
        return _rotary_mul(x, cos, sin, mode, swap)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:  # type: ignore[override]
        cos, adjoint = ctx.saved_tensors
        # grad.requires_grad only under create_graph: the backward is a rotation itself and records one in its turn.
        return rotate(grad, cos, adjoint, ctx.mode, swap=ctx.swap), None, None, None, None, None


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, mode: str, adjoint: Tensor | None = None, swap: bool | None = None
) -> Tensor:
    """x rotated by the tables, in the dtype and shape of x.

    Args:
        x: (B, N, S, D), (B, S, N, D), (S, B, N, D) or (T, N, D); float16, bfloat16 or float32.
        cos, sin: full-width tables that broadcast to x, in its dtype.
        mode: "half" or "interleave".
        adjoint: `adjoint_sine` of the table that `sin` is a view of, under the same view; None builds it from `sin`.
        swap: `is_bnsd` of the shapes of x and the tables, where the caller remembers it.

    Raises:
        RuntimeError: the operator refuses the arguments; ask `unsupported` first.
    """
    if swap is None:
        swap = is_bnsd(x.shape, cos.shape)
    if torch.is_grad_enabled():
        if cos.requires_grad or sin.requires_grad:
            return _rotary_mul(x, cos, sin, mode, swap)  # torch_npu's own node differentiates the tables too
        if x.requires_grad:
            if adjoint is None:
                adjoint = adjoint_sine(sin, mode)
            return Rotate.apply(x, cos, sin, mode, adjoint, swap)
    return _rotary_mul(x, cos, sin, mode, swap)


def rotate_by_constants(x: Tensor, cos: Tensor, sin: Tensor, mode: str, adjoint: Tensor | None, swap: bool) -> Tensor:
    """`rotate` by tables that need no gradient; with adjoint None nothing needs one (`needs_adjoint`)."""
    if adjoint is not None:
        return Rotate.apply(x, cos, sin, mode, adjoint, swap)
    if swap:  # `_rotary_mul`, without its frame
        x, cos, sin = x.transpose(1, 2), cos.transpose(1, 2), sin.transpose(1, 2)
        return torch.ops.npu.npu_rotary_mul.default(x, cos, sin, mode).transpose(1, 2)
    return torch.ops.npu.npu_rotary_mul.default(x, cos, sin, mode)
