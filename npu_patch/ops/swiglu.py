"""Gated activations of the two halves of one tensor: `npu_swiglu` and `npu_geglu`.

Both compute in float32; the originals round the activated half before they multiply. Neither keeps more for the
backward pass than the originals: swiglu its input, geglu its input and the activated half.

Source: operator documents torch_npu.npu_swiglu and torch_npu.npu_geglu (op-plugin).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .availability import is_ascend950
from .guards import FLOATS, FUNCTORCH, NOT_ON_NPU, dtype_name, subclass_reason, transforming
from .second_order import with_gradients
from .verdicts import Verdicts

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
"""silu(x); gelu(x) with the error function; gelu(x) with tanh."""


def unavailable(x: Tensor) -> str | None:
    """Why no operator can be used where x is about to be projected, or None."""
    if x.get_device() < 0:  # -1 is the host; beside it a process with an NPU has no other kind of device
        return NOT_ON_NPU
    if transforming():
        return FUNCTORCH
    return None if type(x) is Tensor else subclass_reason(x)


def unsupported(x: Tensor, activation: str, gate: int = 0) -> str | None:
    """Why the fused operator cannot take this call, or None.

    Args:
        x: (..., 2 * size), gate and up beside each other.
        activation: one of `ACTIVATIONS`.
        gate: the half that is activated: 0 or 1.
    """
    if transforming():
        return FUNCTORCH
    plain = type(x) is Tensor
    if not plain and (reason := subclass_reason(x)):
        return reason
    if is_compiling():
        # The shape function of npu_geglu_grad takes no defaults and promises two results for one.
        late = None if activation == "silu" else "npu_geglu cannot be differentiated under torch.compile"
        return _judge(x.shape, x.dtype, x.get_device(), x.is_contiguous(), activation, gate) or late
    facts = (x.shape, x.dtype, x.get_device(), x.is_contiguous(), activation, gate)
    return _verdicts[facts] if plain else _judge(*facts)


def _judge(
    shape: Sequence[int], dtype: torch.dtype, index: int, contiguous: bool, activation: str, gate: int
) -> str | None:
    if index < 0:
        return NOT_ON_NPU
    if dtype not in FLOATS:
        return f"projections of type {dtype_name(dtype)}"
    if not 1 <= len(shape) <= 8:
        return "the projections have no dimension or more than 8"
    if 0 in shape:
        return "the projections are empty"
    if shape[-1] % 2:
        return "the projections have no two halves"
    if not contiguous:  # a copy would cost more than the operator saves
        return "the projections are not contiguous"
    if activation == "silu":
        return None if gate == 0 else "npu_swiglu activates the first half"
    return "npu_geglu is not documented for Ascend950" if is_ascend950() else None


_verdicts = Verdicts(_judge)


def gated(x: Tensor, activation: str, gate: int = 0) -> Tensor:
    """`activation(gate) * up` of the two halves of the last dimension.

    Args:
        x: (..., 2 * size), float16, bfloat16 or float32, contiguous.
        activation: one of `ACTIVATIONS`.
        gate: the half that is activated: 0 or 1.

    Returns:
        (..., size), in the dtype of x.

    Raises:
        RuntimeError: the operator refuses the arguments; ask `unsupported` first.
    """
    if activation == "silu":
        return _twice_swiglu(torch.ops.npu.npu_swiglu.default(x, -1))
    return _twice_geglu(torch.ops.npu.npu_geglu.default(x, -1, int(activation == "gelu_tanh"), gate == 0)[0])


def _swiglu_gradients(node: Any, grad: Tensor) -> tuple[Tensor]:
    gate, up = node._saved_self.float().chunk(2, -1)
    grad, sigmoid = grad.float(), gate.sigmoid()
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return (torch.cat((grad * up * slope, grad * gate * sigmoid), -1),)


def _geglu_gradients(node: Any, grad: Tensor) -> tuple[Tensor]:
    gate, up = node._saved_self.float().chunk(2, -1)
    if not node._saved_activate_left:
        gate, up = up, gate
    grad = grad.float()
    if node._saved_approximate:
        factor, cubic = math.sqrt(2.0 / math.pi), 0.044715
        tanh = (factor * (gate + cubic * gate * gate * gate)).tanh()
        share = 0.5 * (1.0 + tanh)
        slope = share + 0.5 * gate * (1.0 - tanh * tanh) * factor * (1.0 + 3.0 * cubic * gate * gate)
    else:
        share = 0.5 * (1.0 + (gate * math.sqrt(0.5)).erf())
        slope = share + gate * (-0.5 * gate * gate).exp() / math.sqrt(2.0 * math.pi)
    parts = (grad * up * slope, grad * gate * share)
    return (torch.cat(parts if node._saved_activate_left else parts[::-1], -1),)


_twice_swiglu = with_gradients("swiglu", _swiglu_gradients)
_twice_geglu = with_gradients("swiglu", _geglu_gradients)
