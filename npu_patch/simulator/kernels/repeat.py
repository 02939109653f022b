"""The backward passes of ``repeat_interleave``, which torch_npu has as operators of its own."""

from __future__ import annotations

from torch import Tensor

from ..autograd import gradients
from .base import Call, kernel


def _backward(grad: Tensor, input: Tensor, repeats: int | Tensor, dim: int | None) -> Tensor:
    (gradient,) = gradients(lambda x: x.repeat_interleave(repeats, dim), (input,), grad)
    assert gradient is not None
    return gradient


@kernel("repeat_interleave_backward_int", models=("grad", "input", "repeats", "dim"))
def repeat_interleave_backward_int(call: Call, grad: Tensor, input: Tensor, repeats: int, dim: int | None) -> Tensor:
    return _backward(grad, input, repeats, dim)


@kernel("repeat_interleave_backward_tensor", models=("grad", "input", "repeats", "dim"))
def repeat_interleave_backward_tensor(
    call: Call, grad: Tensor, input: Tensor, repeats: Tensor, dim: int | None
) -> Tensor:
    return _backward(grad, input, repeats, dim)
