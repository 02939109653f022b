"""The rotations that are known, and the inputs that tell them apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Dtypes = tuple[torch.dtype, torch.dtype]


def _halves(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _neighbours(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def deinterleaved(x: torch.Tensor) -> torch.Tensor:
    """Even channels first, then odd ones."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


TABLES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "given": lambda t: t,
    "first half twice": lambda t: torch.cat((t[..., : t.shape[-1] // 2],) * 2, -1),
    "first half repeated": lambda t: t[..., : t.shape[-1] // 2].repeat_interleave(2, -1),
    "twice": lambda t: torch.cat((t, t), -1),
    "repeated": lambda t: t.repeat_interleave(2, -1),
}
HALF_WIDTH = ("twice", "repeated")
MODES = ("half", "interleave", "deinterleave")


@dataclass(frozen=True)
class Formula:
    """One rotation.

    Args:
        mode: "half", "interleave" or "deinterleave".
        table: one of TABLES.
        negated: the sine's sign is the other one.
        trailing: tables narrower than the head belong to its last channels, not to its first.
    """

    mode: str
    table: str
    negated: bool
    trailing: bool = False

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        width = cos.shape[-1]
        split = (x.shape[-1] - width, width) if self.trailing else (width, x.shape[-1] - width)
        first, second = x.split(split, -1)
        turned, rest = (second, first) if self.trailing else (first, second)
        if self.mode == "deinterleave":
            turned = deinterleaved(turned)
        other = (_neighbours if self.mode == "interleave" else _halves)(turned)
        y = turned * cos + other * (-sin if self.negated else sin)
        if not rest.shape[-1]:
            return y
        parts = (rest.to(y.dtype), y) if self.trailing else (y, rest.to(y.dtype))
        return torch.cat(parts, -1)


def formulas(full_width: bool) -> list[Formula]:
    """Those whose tables are as wide as the heads, or half as wide."""
    tables = [name for name in TABLES if (name in HALF_WIDTH) != full_width]
    return [Formula(mode, table, negated) for negated in (False, True) for mode in MODES for table in tables]


HEAD = 12
WIDER = 12
_SCALES = (0.0, 1e-4, 1e4, 1e-6, 1e12)


class Probe:
    """Tensors of one layout: q with 3 heads, k with 2, and tables of one width.

    Args:
        dim: where a table gets a dimension; -2: tensors and tables have no batch.
        width: of the tables.
        dtypes: of tensors and tables.
        shared: all samples have the same table.
        unit: cos² + sin² is 1, as for the cosine and sine of an angle.
        wide: heads and tables are 12 times as wide, and some rows are multiplied by numbers from 0 to 1e12.
    """

    def __init__(self, dim: int, width: int, dtypes: Dtypes, shared: bool, unit: bool, wide: bool) -> None:
        generator = torch.Generator().manual_seed(100 * width + dim)
        head, width = (HEAD * WIDER, width * WIDER) if wide else (HEAD, width)
        shapes: dict[int, list[tuple[int, ...]]] = {
            1: [(2, n, 5, head) for n in (3, 2)],
            2: [(2, 5, n, head) for n in (3, 2)],
        }
        shapes[-2] = [(5, n, head) for n in (3, 2)]
        table = (5, width) if dim == -2 else (1 if shared else 2, 5, width)
        self.dim = dim
        self.wide = wide
        tensors = [torch.randn(s, generator=generator) for s in shapes[dim]]
        for t in tensors if wide else ():
            for row, scale in zip(t.view(-1, head), _SCALES, strict=False):
                row *= scale
        self.tensors = [t.to(dtypes[0]).requires_grad_() for t in tensors]
        cos, sin = ((torch.rand(table, generator=generator) * 2.4 - 1.2) for _ in range(2))
        if unit:
            angles = torch.atan2(sin, cos)
            cos, sin = angles.cos(), angles.sin()
        self.cos, self.sin = cos.to(dtypes[1]), sin.to(dtypes[1])
        self.gradients = [torch.randn(s, generator=generator) for s in shapes[dim]]
        self._expected: dict[tuple[Formula, bool], list[torch.Tensor]] = {}

    def expected(self, formula: Formula, wide: bool) -> list[torch.Tensor]:
        """The rotation of each tensor; `wide`: computed in float32."""
        if (formula, wide) not in self._expected:
            cos, sin = (TABLES[formula.table](t).unsqueeze(self.dim) for t in (self.cos, self.sin))
            if wide:
                cos, sin = cos.float(), sin.float()
            tensors = [x.detach().float() if wide else x for x in self.tensors]
            self._expected[formula, wide] = [formula(x, cos, sin) for x in tensors]
        return self._expected[formula, wide]


@functools.cache
def probe(dim: int, width: int, dtypes: Dtypes, shared: bool = False, unit: bool = False, wide: bool = False) -> Probe:
    return Probe(dim, width, dtypes, shared, unit, wide)
