"""Root mean square normalisation over the last dimension: `npu_rms_norm`.

Source: operator documents torch_npu.npu_rms_norm (op-plugin) and aclnnRmsNorm (ops-nn/norm/rms_norm).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .guards import FUNCTORCH, NOT_ON_NPU, PLAIN_TYPES, dtype_name, keep, subclass_reason, transforming
from .second_order import with_gradients
from .verdicts import Verdicts

# (input, gamma) pairs of the operator document, the same for A2, A3 and 950.
_DTYPES = frozenset(
    (
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
    )
)
_X_DTYPES = frozenset(x for x, _ in _DTYPES)
_WEIGHTS = PLAIN_TYPES | {type(None)}

_ones: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}


def unsupported(x: Tensor, weight: Tensor | None, weight_dtype: torch.dtype | None = None) -> str | None:
    """Why the fused operator cannot take this call, or None.

    The documents name no bound for the last dimension, so there is none here.

    Args:
        x: (..., size).
        weight: (size,), or None.
        weight_dtype: the dtype that the weight will have, if not its own.
    """
    plain = type(x) is Tensor and type(weight) in _WEIGHTS
    if not plain and (reason := subclass_reason(x) or (None if weight is None else subclass_reason(weight))):
        return reason
    if transforming():
        return FUNCTORCH
    device = x.device
    facts: tuple[Any, ...]
    if weight is None:
        facts = (x.shape, x.dtype, device, None, None)
    elif weight.device != device:
        return "the weight is on another device"
    else:
        facts = (x.shape, x.dtype, device, weight.shape, weight_dtype or weight.dtype)
    return _verdicts[facts] if plain and not is_compiling() else _judge(*facts)


def _judge(
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    weight_shape: torch.Size | None,
    weight_dtype: torch.dtype | None,
) -> str | None:
    if device.type != "npu":
        return NOT_ON_NPU
    if weight_shape is None or weight_dtype is None:
        if dtype not in _X_DTYPES:
            return f"input of type {dtype_name(dtype)}"
    else:
        if (dtype, weight_dtype) not in _DTYPES:
            return f"input of type {dtype_name(dtype)} with a weight of type {dtype_name(weight_dtype)}"
        if len(weight_shape) != 1:
            return "the weight is not one-dimensional"
        size = weight_shape[0]
        if size == 0:  # ZeRO-3 leaves an empty shell of a partitioned parameter
            return "the weight is empty"
        if not shape or size != shape[-1]:
            return "the weight's size is not the input's last size"
    if not 1 <= len(shape) <= 8:
        return "the input has no dimension or more than 8"
    if 0 in shape:  # taken by the forward operator, not mentioned for the backward one
        return "the input is empty"
    return None


_verdicts = Verdicts(_judge)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`x / sqrt(mean(x**2, -1) + eps) * weight`, computed in float32 and rounded once to the dtype of x.

    Args:
        x: (..., size), float16, bfloat16 or float32.
        weight: (size,), in the dtype of x or float32; None means ones.
        eps: added to the mean square.

    Returns:
        (..., size), in the dtype of x.  The gradient of the weight is summed in float32.

    Raises:
        RuntimeError: the operator refuses the arguments; ask `unsupported` first.
    """
    if weight is None:
        weight = _unit_weight(x)
    if is_compiling():  # the operator's shape function promises the strides of x, its result is contiguous
        x = x.contiguous()
    return _twice_differentiable(torch.ops.npu.npu_rms_norm.default(x, weight, eps)[0])


def _gradients(node: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Of the input and the weight."""
    x, weight = node._saved_self.float(), node._saved_gamma.float()
    grad, mean_square = grad.float(), x.square().mean(-1, keepdim=True)
    # The node keeps 1 / sqrt(mean square + eps), and not eps.
    eps = node._saved_result1.reshape_as(mean_square).detach().pow(-2) - mean_square.detach()
    scale = (mean_square + eps).rsqrt()
    normed, scaled = x * scale, grad * weight
    grad_x = scale * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return grad_x, (grad * normed).reshape(-1, x.shape[-1]).sum(0)


_twice_differentiable = with_gradients("rms_norm", _gradients)


def _unit_weight(x: Tensor) -> Tensor:
    size = x.shape[-1]
    if is_compiling():  # part of the graph: a cache must not be filled while tracing
        return torch.ones(size, device=x.device, dtype=x.dtype)
    key = (size, x.device, x.dtype)
    ones = _ones.get(key)
    if ones is None:
        with torch.inference_mode(False):  # an inference tensor could not be saved for a later backward
            ones = torch.ones(size, device=x.device, dtype=x.dtype)
        if keep(ones):
            _ones[key] = ones
    return ones
