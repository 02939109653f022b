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
GAIN = "gain"


Gradients = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class Expected:
    """A result, and the gradients of what it was made of."""

    y: torch.Tensor
    gradients: Gradients


_SCALES = (0.0, 1e-4, 1e4)
_FURTHER = (*_SCALES, 1e-6, 1e12)


class Probe:
    """One input with its own epsilon, and what each formula makes of it.

    Args:
        seed: of the numbers.
        shape: of the input; its first rows are multiplied by 0, 1e-4 and 1e4.
        eps: epsilon.
        x_dtype: of the input.
        w_dtype: of the weight.
        backward: it gets a gradient.
        extreme: further rows of 1e-6, 1e12, infinity and NaN.
        strided: the input is a view of which the second and third dimension were exchanged.
        records: autograd is on.
    """

    def __init__(
        self,
        seed: int,
        shape: tuple[int, ...],
        eps: float,
        x_dtype: torch.dtype,
        w_dtype: torch.dtype,
        backward: bool,
        extreme: bool = False,
        strided: bool = False,
        records: bool = True,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(shape, generator=generator) * 2
        rows = x.view(-1, shape[-1])
        for row, scale in zip(rows, _FURTHER if extreme else _SCALES, strict=False):
            row *= scale
        if extreme:
            rows[-1, 1], rows[-2, 2] = torch.nan, torch.inf
        if strided:
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        weight = torch.randn(shape[-1], generator=generator) * 0.5 + 0.3
        self.extreme, self.records = extreme, records
        self.x = x.to(x_dtype).requires_grad_(backward)
        self.weight = weight.to(w_dtype).requires_grad_(backward)
        self.gradient = torch.randn(shape, generator=generator)
        self.eps = eps
        self.width = shape[-1]
        self.groups = 1
        self.gain = 0.5 + seed / 8
        self.backward = backward
        self.mixed = x_dtype is not w_dtype
        self.expected: dict[tuple[str, float], Expected] = {}

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """What the forward is called with."""
        return (self.x,)

    def formula(self, name: str, eps: float) -> torch.Tensor:
        if name == GAIN:
            return FORMULAS["fp32"](self.x, self.weight + self.gain, eps)
        return FORMULAS[name](self.x, self.weight, eps)

    def expect(self, formula: str, eps: float) -> Expected:
        if (formula, eps) not in self.expected:
            y = self.formula(formula, eps)
            self.expected[formula, eps] = Expected(y.detach(), self.gradients(y))
        return self.expected[formula, eps]

    def gradients(self, y: torch.Tensor) -> Gradients:
        leaves = (*self.arguments, self.weight)
        if not self.backward or not y.requires_grad:
            return (None,) * len(leaves)
        return torch.autograd.grad(y, leaves, self.gradient.to(y.dtype), allow_unused=True)


@functools.cache
def probes() -> tuple[Probe, ...]:
    full, brain, half = torch.float32, torch.bfloat16, torch.float16
    return (
        Probe(1, (2, 3, 16), 1.7e-3, full, full, True),
        Probe(2, (2, 3, 4, 24), 3.1e-2, brain, brain, True),
        Probe(3, (8, 640), 1e-11, full, full, False, extreme=True),
        Probe(4, (2, 1, 2, 1, 384), 6.1e-6, brain, brain, False),
        Probe(5, (2, 3, 40), 1.3e-3, half, half, False),
        Probe(6, (2, 2, 8), 4.7e-3, brain, full, False),
        Probe(7, (2, 2, 8), 5.3e-3, full, brain, False),
        Probe(8, (2, 2, 8), 4.1e-3, half, full, False),
        Probe(9, (2, 2, 8), 5.9e-3, full, half, False),
        Probe(10, (24,), 2.3e-5, full, full, False, records=False),
        Probe(11, (2, 3, 2, 4112), 3.7e-4, full, full, False, strided=True),
    )


def forget() -> None:
    """Make all inputs anew: one of them was written to."""
    probes.cache_clear()
    gated_probes.cache_clear()


# ---- gated norms -----------------------------------------------------------------------------------------------------

_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True)
class GatedFormula:
    """A norm whose result, or whose input, is multiplied by an activated gate, in float32.

    Args:
        first: "norm": the result is multiplied; "gate": the input.
        rounding: "llama": n is rounded to the input's type before it is multiplied by the weight; "fp32": it is not;
            "rounded": it is not, and the product is rounded before it is multiplied by the gate.
        activation: "silu" or "sigmoid".
        grouped: each group of channels has its own mean square.
    """

    first: str
    rounding: str
    activation: str
    grouped: bool

    def __str__(self) -> str:
        norm = self.rounding + (" in groups" if self.grouped else "")
        gate = f"{self.activation} gate"
        return f"{norm}, {gate}" if self.first == "norm" else f"{gate}, {norm}"

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, gate: torch.Tensor, groups: int
    ) -> torch.Tensor:
        wide, gate = x.float(), _ACTIVATIONS[self.activation](gate.float())
        if self.first == "gate":
            wide = wide * gate
        n = _normalised(wide.unflatten(-1, (groups if self.grouped else 1, -1)), eps).flatten(-2)
        y = weight * n.to(x.dtype) if self.rounding == "llama" else weight.float() * n
        if self.rounding == "rounded":
            y = y.to(x.dtype)
        if self.first == "norm":
            return (y * gate).to(x.dtype)
        return y if self.rounding == "llama" else y.to(x.dtype)


GATED: Mapping[str, GatedFormula] = {
    str(formula): formula
    for grouped in (False, True)
    for activation in _ACTIVATIONS
    for rounding in ("llama", "fp32", "rounded")
    for first in (("norm",) if rounding == "rounded" else ("norm", "gate"))
    for formula in (GatedFormula(first, rounding, activation, grouped),)
}


class GatedProbe(Probe):
    """An input with a gate, for two groups of channels."""

    def __init__(
        self,
        seed: int,
        shape: tuple[int, ...],
        eps: float,
        x_dtype: torch.dtype,
        w_dtype: torch.dtype,
        backward: bool,
        **kinds: bool,
    ) -> None:
        super().__init__(seed, shape, eps, x_dtype, w_dtype, backward, **kinds)
        generator = torch.Generator().manual_seed(100 + seed)
        self.groups = 2
        self.gate = (torch.randn(shape, generator=generator) * 3).to(x_dtype).requires_grad_(backward)

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return (self.x, self.gate)

    def formula(self, name: str, eps: float) -> torch.Tensor:
        return GATED[name](self.x, self.weight, eps, self.gate, self.groups)


@functools.cache
def gated_probes() -> tuple[GatedProbe, ...]:
    full, brain, half = torch.float32, torch.bfloat16, torch.float16
    return (
        GatedProbe(1, (2, 3, 16), 1.7e-3, full, full, True),
        GatedProbe(2, (2, 5, 24), 3.1e-2, brain, brain, True),
        GatedProbe(3, (7, 384), 1e-11, full, full, False, records=False),
        GatedProbe(4, (4, 640), 6.1e-6, brain, brain, False),
        GatedProbe(5, (4, 1, 32), 6.1e-6, brain, brain, False),
        GatedProbe(6, (2, 3, 40), 1.3e-3, half, half, False),
        GatedProbe(7, (4, 8), 4.7e-3, brain, full, False),
        GatedProbe(8, (4, 8), 5.3e-3, full, brain, False),
        GatedProbe(9, (4, 8), 4.1e-3, half, full, False),
    )
