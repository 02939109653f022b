"""Root mean square norms."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Call, kernel

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _normed_dims(x: Tensor, gamma: Tensor) -> tuple[int, ...]:
    return tuple(range(x.dim() - gamma.dim(), x.dim()))


def _check(call: Call, x: Tensor, gamma: Tensor) -> None:
    call.require(x.dtype in _FLOATS, "input", f"dtype {x.dtype} is not supported")
    call.require(
        gamma.dtype in (x.dtype, torch.float32),
        "gamma",
        f"dtype {gamma.dtype} with input dtype {x.dtype} is not supported: gamma must be {x.dtype} or float32",
    )
    call.require(1 <= gamma.dim() <= x.dim() <= 8, "gamma", f"{gamma.dim()} dimensions for an input of {x.dim()}")
    call.require(
        gamma.shape == x.shape[x.dim() - gamma.dim() :],
        "gamma",
        f"shape {list(gamma.shape)} is not that of the last dimensions of the input {list(x.shape)}",
    )


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """float32 throughout, rounded once. ``rstd`` keeps the normed dimensions as ones."""
    wide = x.float()
    rstd = torch.rsqrt(wide.pow(2).mean(_normed_dims(x, gamma), keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(x.dtype), rstd


@kernel("npu_rms_norm", models=("input", "gamma", "epsilon"))
def npu_rms_norm(call: Call, input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """``input [..., *gamma.shape]`` → y of the input's dtype, rstd float32."""
    _check(call, input, gamma)
    return _rms_norm(input, gamma, epsilon)


@kernel("npu_rms_norm_backward", models=("dy", "input", "gamma", "rstd"))
def npu_rms_norm_backward(call: Call, dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """From the saved rstd. The gradient of gamma is float32 always; autograd casts it."""
    _check(call, input, gamma)
    call.require(dy.dtype == input.dtype, "dy", f"dtype {dy.dtype} differs from the input's {input.dtype}")
    dims = _normed_dims(input, gamma)
    normed = input.float() * rstd
    scaled = dy.float() * gamma.float()
    dx = (scaled - normed * (scaled * normed).mean(dims, keepdim=True)) * rstd
    leading = tuple(range(input.dim() - gamma.dim()))
    dgamma = dy.float() * normed
    return dx.to(input.dtype), dgamma.sum(leading) if leading else dgamma


@kernel("npu_add_rms_norm", models=("x1", "x2", "gamma", "epsilon"))
def npu_add_rms_norm(
    call: Call, x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``(y, rstd, x)`` with ``x = x1 + x2`` rounded to the input's dtype before the norm."""
    call.require(x1.shape == x2.shape, "x2", f"shape {list(x2.shape)} differs from that of x1 {list(x1.shape)}")
    for name, other in (("x2", x2), ("gamma", gamma)):
        call.require(other.dtype == x1.dtype, name, f"dtype {other.dtype} differs from that of x1 {x1.dtype}")
    call.require(x1.numel() > 0, "x1", "empty tensors are not supported")
    _check(call, x1, gamma)
    x = x1 + x2
    y, rstd = _rms_norm(x, gamma, epsilon)
    return y, rstd, x
