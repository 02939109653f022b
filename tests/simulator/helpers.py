"""Comparing an operator on the NPU with a plain formula in float64, forward and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

#: Allowed error relative to the largest value: a few roundings of the dtype.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values on the CPU, rounded to ``dtype``."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    actual = actual.detach().cpu().double()
    assert actual.shape == expected.shape
    error = (actual - expected.detach()).abs().max() if actual.numel() else torch.zeros(())
    scale = expected.detach().abs().max().clamp_min(1e-30) if actual.numel() else torch.ones(())
    assert error <= tolerance * scale, f"error {error:.3g} of {scale:.3g}, tolerance {tolerance:.3g}"


def assert_same_function(
    on_npu: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    tolerance: float | None = None,
) -> None:
    """``on_npu`` of NPU copies and ``formula`` of float64 copies agree, with their gradients for every input."""
    tolerance = tolerance if tolerance is not None else TOLERANCE[inputs[0].dtype]
    ours = [x.npu().requires_grad_() for x in inputs]
    theirs = [x.double().requires_grad_() for x in inputs]
    out, expected = on_npu(*ours), formula(*theirs)
    assert_near(out, expected, tolerance)
    incoming = values(*expected.shape, seed=99, dtype=out.dtype)
    out.backward(incoming.npu())
    expected.backward(incoming.double())
    for x, y in zip(ours, theirs, strict=True):
        assert x.grad is not None
        assert x.grad.dtype == x.dtype
        assert_near(x.grad, y.grad, 2 * tolerance)
