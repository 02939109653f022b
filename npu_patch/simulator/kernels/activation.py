"""Gated activations."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import limits
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


_APPROXIMATIONS = ("none", "tanh")


def _check_geglu(call: Call, input: Tensor, dim: int, approximate: int) -> None:
    call.require(call.soc.name not in limits.NOT_ON_950, "input", "the operator is not documented for this chip")
    _check(call, input, dim)
    call.require(approximate in (0, 1), "approximate", f"{approximate} is neither 0 (erf) nor 1 (tanh)")


@kernel("npu_geglu", models=("input", "dim", "approximate", "activate_left"))
def npu_geglu(call: Call, input: Tensor, dim: int, approximate: int, activate_left: bool) -> tuple[Tensor, Tensor]:
    """``(y, gelu)``: gelu of one half, the right one by default, rounded; times the other half, rounded again.

    The document says nothing of the rounding; op-plugin's own test rounds twice.
    """
    _check_geglu(call, input, dim, approximate)
    left, right = input.chunk(2, dim)
    gate, up = (left, right) if activate_left else (right, left)
    gelu = torch.nn.functional.gelu(gate.float(), approximate=_APPROXIMATIONS[approximate]).to(input.dtype)
    return (gelu.float() * up.float()).to(input.dtype), gelu


@kernel("npu_geglu_grad", models=("grad_output", "input", "gelu", "dim", "approximate", "activate_left"))
def npu_geglu_grad(
    call: Call, grad_output: Tensor, input: Tensor, gelu: Tensor, dim: int, approximate: int, activate_left: bool
) -> Tensor:
    """From the saved gelu, in float32 and rounded once."""
    _check_geglu(call, input, dim, approximate)
    for name, other in (("grad_output", grad_output), ("gelu", gelu)):
        call.require(other.dtype == input.dtype, name, f"dtype {other.dtype} is not {input.dtype}")
    left, right = input.float().chunk(2, dim)
    gate, up = (left, right) if activate_left else (right, left)
    grad = grad_output.float()
    dgate = torch.ops.aten.gelu_backward(grad * up, gate, approximate=_APPROXIMATIONS[approximate])
    dup = grad * gelu.float()
    return torch.cat((dgate, dup) if activate_left else (dup, dgate), dim).to(input.dtype)
