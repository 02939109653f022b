"""Gated activations."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Call, kernel

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _check(call: Call, input: Tensor, dim: int) -> None:
    call.require(input.dtype in _FLOATS, "input", f"dtype {input.dtype} is not supported")
    call.require(input.numel() > 0, "input", "empty tensors are not supported")
    call.require(-input.dim() <= dim < input.dim(), "dim", f"{dim} for an input of {input.dim()} dimensions")
    call.require(input.shape[dim] % 2 == 0, "input", f"the size of dim {dim} must be even, is {input.shape[dim]}")
    call.require(input.is_contiguous(), "input", "must be contiguous")


@kernel("npu_swiglu", models=("input", "dim"))
def npu_swiglu(call: Call, input: Tensor, dim: int) -> Tensor:
    """``silu(first half) * second half`` along ``dim``, in float32 and rounded once."""
    _check(call, input, dim)
    gate, up = input.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


@kernel("npu_swiglu_backward", models=("grad_output", "input", "dim"))
def npu_swiglu_backward(call: Call, grad_output: Tensor, input: Tensor, dim: int) -> Tensor:
    _check(call, input, dim)
    call.require(grad_output.dtype == input.dtype, "grad_output", f"dtype {grad_output.dtype} is not {input.dtype}")
    gate, up = input.float().chunk(2, dim)
    grad = grad_output.float()
    sigmoid = torch.sigmoid(gate)
    dgate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((dgate, grad * gate * sigmoid), dim).to(input.dtype)
