"""The norms that are known, and the inputs that tell them apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


FORMULAS: Mapping[str, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    "llama": lambda x, w, eps: w * _normalised(x, eps).to(x.dtype),
    "fp32": lambda x, w, eps: (_normalised(x, eps) * w.float()).to(x.dtype),
    "gemma": lambda x, w, eps: (_normalised(x, eps) * (1.0 + w.float())).to(x.dtype),
    "none": lambda x, w, eps: _normalised(x, eps).to(x.dtype),
}


@dataclass(frozen=True)
class Expected:
    y: torch.Tensor
    dx: torch.Tensor | None
    dw: torch.Tensor | None


class Probe:
    """One input with its own epsilon, and what each formula makes of it."""

    def __init__(
        self, seed: int, shape: tuple[int, ...], eps: float, x_dtype: torch.dtype, w_dtype: torch.dtype, backward: bool
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(shape, generator=generator) * 2
        rows = x.view(-1, shape[-1])
        for row, scale in enumerate((0.0, 1e-4, 1e4)):
            rows[row] *= scale
        weight = torch.randn(shape[-1], generator=generator) * 0.5 + 0.3
        self.x = x.to(x_dtype).requires_grad_(backward)
        self.weight = weight.to(w_dtype).requires_grad_(backward)
        self.gradient = torch.randn(shape, generator=generator)
        self.eps = eps
        self.width = shape[-1]
        self.backward = backward
        self.mixed = x_dtype is not w_dtype
        self.expected: dict[tuple[str, float], Expected] = {}

    def expect(self, formula: str, eps: float) -> Expected:
        if (formula, eps) not in self.expected:
            y = FORMULAS[formula](self.x, self.weight, eps)
            self.expected[formula, eps] = Expected(y.detach(), *self.gradients(y))
        return self.expected[formula, eps]

    def gradients(self, y: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not self.backward or not y.requires_grad:
            return None, None
        dx, dw = torch.autograd.grad(y, (self.x, self.weight), self.gradient.to(y.dtype), allow_unused=True)
        return dx, dw


@functools.cache
def probes() -> tuple[Probe, ...]:
    full, brain, half = torch.float32, torch.bfloat16, torch.float16
    return (
        Probe(1, (2, 3, 16), 1.7e-3, full, full, True),
        Probe(2, (2, 3, 4, 24), 3.1e-2, brain, brain, True),
        Probe(3, (5, 640), 2.3e-5, full, full, False),
        Probe(4, (4, 384), 6.1e-6, brain, brain, False),
        Probe(5, (2, 3, 40), 1.3e-3, half, half, False),
        Probe(6, (2, 2, 8), 4.7e-3, brain, full, False),
        Probe(7, (2, 2, 8), 5.3e-3, full, brain, False),
        Probe(8, (2, 2, 8), 4.1e-3, half, full, False),
        Probe(9, (2, 2, 8), 5.9e-3, full, half, False),
    )
