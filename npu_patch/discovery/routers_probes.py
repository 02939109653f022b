"""How experts can be chosen, and the inputs that tell the ways apart."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

FAR = 80.0
"""Logits of -80 have sigmoids of 1e-35: beside them a small number in a denominator shows."""


@dataclass(frozen=True)
class Probe:
    """One input, and the numbers that a router reads.

    Args:
        x: (..., width); in float32 the last row has logits around -80.
        weight: (experts, width).
        bias: (experts,), of the projection.
        correction: (experts,), float32, of both signs.
        groups, kept: see `Choice`; `groups` None where experts are not grouped.
        divides: whether weights are divided by their sum.
        score: "softmax" or "sigmoid".
        limited: whether groups count.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor
    correction: Tensor
    experts: int
    top_k: int
    groups: int | None
    kept: int
    scale: float
    divides: bool
    score: str
    limited: bool

    @property
    def rows(self) -> Tensor:
        return self.x.reshape(-1, self.x.shape[-1])


@dataclass(frozen=True)
class Choice:
    """What a router does with logits, where it is not left to an attribute (None).

    Args:
        score: "softmax" or "sigmoid"; None: as an attribute says.
        divides: weights are divided by their sum; None: as an attribute says.
        eps: and this.
        of_group: a group counts by its best two ("top2") or its best one ("max").
        hidden: what takes the place of the scores of other groups.
    """

    score: str | None
    divides: bool | None
    eps: float = 0.0
    of_group: str = "top2"
    hidden: float = -torch.inf

    def scores(self, logits: Tensor, probe: Probe) -> Tensor:
        score = self.score or probe.score
        return logits.float().sigmoid() if score == "sigmoid" else logits.float().softmax(-1)

    def chosen(self, scores: Tensor, probe: Probe, corrected: bool, grouped: bool) -> Tensor:
        """The experts of every row, in the order of falling scores."""
        choice = scores + probe.correction if corrected else scores
        if grouped and probe.groups is not None:
            parts = choice.unflatten(-1, (probe.groups, -1))
            best = parts.topk(2, -1).values.sum(-1) if self.of_group == "top2" else parts.amax(-1)
            other = torch.ones_like(best, dtype=torch.bool).scatter(-1, best.topk(probe.kept, -1).indices, False)
            choice = parts.masked_fill(other.unsqueeze(-1), self.hidden).flatten(-2)
        return choice.topk(probe.top_k, -1).indices

    def weights(self, scores: Tensor, experts: Tensor, probe: Probe, scaled: bool) -> Tensor:
        weights = scores.gather(-1, experts)
        if probe.divides if self.divides is None else self.divides:
            weights = weights / (weights.sum(-1, keepdim=True) + self.eps)
        return weights * probe.scale if scaled else weights


_F32, _BF16 = torch.float32, torch.bfloat16
_SPECS: tuple[tuple[int, int, int, int | None, int, float, bool, str, bool, torch.dtype, torch.dtype], ...] = (
    (12, 7, 3, 3, 2, 1.75, True, "sigmoid", True, _F32, _F32),
    (16, 6, 5, 4, 3, 0.5, False, "softmax", True, _F32, _F32),
    (15, 9, 4, 3, 2, 3.0, False, "sigmoid", False, _F32, _F32),
    (18, 5, 2, 3, 1, 0.75, True, "softmax", False, _F32, _F32),
    (12, 7, 3, 3, 2, 1.75, True, "softmax", True, _BF16, _BF16),
    (16, 6, 5, 4, 3, 0.5, False, "sigmoid", True, _BF16, _BF16),
    (12, 9, 4, 2, 1, 1.25, True, "sigmoid", True, _BF16, _F32),
)
_UNGROUPED = ((14, 7, 3, None, 2, 1.5, True, "sigmoid", True, _F32, _F32),)


@functools.cache
def probes(dims: int) -> tuple[Probe, ...]:
    """Inputs of so many dimensions."""
    return tuple(_probe(dims, *spec) for spec in _SPECS)


@functools.cache
def ungrouped(dims: int) -> Probe:
    """An input for a router that says by None that it has no groups."""
    return _probe(dims, *_UNGROUPED[0])


def _probe(
    dims: int,
    experts: int,
    width: int,
    top_k: int,
    groups: int | None,
    kept: int,
    scale: float,
    divides: bool,
    score: str,
    limited: bool,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
) -> Probe:
    for seed in range(1000):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn((2, 4, width)[3 - dims :], generator=generator)
        weight = torch.randn(experts, width, generator=generator)
        bias = torch.randn(experts, generator=generator)
        correction = torch.rand(experts, generator=generator) * 2.5 - 1.5
        weight[:, 0] = -1.0
        if x_dtype is _F32:
            x.view(-1, width)[-1, 0] = FAR
        probe = Probe(
            x.to(x_dtype).requires_grad_(),
            weight.to(w_dtype).requires_grad_(),
            bias.to(w_dtype).requires_grad_(),
            correction,
            *(experts, top_k, groups, kept, scale, divides, score, limited),
        )
        if _distinct(probe):
            return probe
    raise AssertionError("no probe without equal logits")


def _distinct(probe: Probe) -> bool:
    """Whether no two logits of a row are equal, however they are computed."""
    rows, weight = probe.rows.detach(), probe.weight.detach()
    kinds = [F.linear(rows.float(), weight.float()), F.linear(rows, weight.to(rows.dtype))]
    kinds += [logits + probe.bias.detach().to(logits.dtype) for logits in kinds]
    return all(bool((logits.float().sort(-1).values.diff(dim=-1) > 0).all()) for logits in kinds)
