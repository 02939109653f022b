"""Norm classes whose forward takes a gate: the norm is fused, the gate is computed as the original does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...discovery import NormMeaning
from ...discovery.norm_probes import GATED
from ...ops import rms_norm as op
from ...sites import Site
from .instances import holds, overridden

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def adapter(cls: type, meanings: tuple[NormMeaning, ...]) -> Callable[[Any, Site], Callable[..., Tensor]]:
    """A factory for the forward of one class."""
    cases = tuple(_Gated(meaning) for meaning in meanings)
    methods = tuple(dict.fromkeys(pair for m in meanings for pair in m.methods))

    def factory(original: Any, site: Site) -> Callable[..., Tensor]:
        def forward(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
            reason = overridden(self, methods) if type(self) is not cls else None
            if reason is None:
                reason = "its attributes are none of those that were recognised"
                for case in cases:
                    if holds(self, hidden_states, case.conditions, case.widths):
                        reason, y = case(self, hidden_states, gate, site)
                        if reason is None:
                            return y
                        break
            site.fallback(reason)
            return original(self, hidden_states, gate)

        return forward

    return factory


class _Gated:
    """One meaning, as the call."""

    def __init__(self, meaning: NormMeaning) -> None:
        assert meaning.weight is not None
        formula = GATED[meaning.formula]
        self.conditions, self.widths = meaning.conditions, meaning.widths
        self.weight, self.eps, self.results = meaning.weight, meaning.eps, meaning.results
        self.groups = meaning.groups[0] if meaning.groups else None
        self.gate_first = formula.first == "gate"
        self.rounded = formula.rounding == "llama"
        self.product_rounded = formula.rounding == "rounded"
        self.activate = _ACTIVATIONS[formula.activation]

    def __call__(self, module: Any, x: Tensor, gate: Tensor | None, site: Site) -> tuple[str | None, Any]:
        """(reason, None) or (None, the result)."""
        weight, eps = getattr(module, self.weight), getattr(module, self.eps)
        if not isinstance(gate, Tensor):
            return "no gate", None
        reason = self._unsupported(x, gate, weight, eps)
        if reason is not None:
            return reason, None
        groups, reason = self._groups(module, x)
        if reason is not None:
            return reason, None
        site.hit()
        result = self.results[x.dtype, weight.dtype]
        activated = self.activate(gate.float())
        if self.gate_first:
            return None, self._normed(x.float() * activated, weight, eps, groups, x.dtype).to(result)
        rounds_once = self.fits(x, weight) if self.product_rounded else self.rounded and x.dtype is weight.dtype
        if rounds_once and groups is None:
            y = op.rms_norm(x.contiguous(), weight, eps)  # rounds once, where the original may round twice
        else:
            y = self._normed(x.float(), weight, eps, groups, x.dtype)
            if self.product_rounded:
                y = y.to(x.dtype)
        return None, (y * activated).to(result)

    def _unsupported(self, x: Tensor, gate: Tensor, weight: Any, eps: Any) -> str | None:
        if not isinstance(eps, (float, int)):
            return "epsilon is not a number"
        if not isinstance(weight, Tensor):
            return "no weight"
        if gate.shape != x.shape:
            return "the gate's shape is not the input's"
        if (x.dtype, weight.dtype) not in self.results:
            return "a pair of dtypes that was not recognised"
        fits = self.fits(x, weight)
        reason = op.unsupported(x, weight if fits else None) or op.unsupported(gate, None)
        if reason is None and not fits and (weight.dim() != 1 or weight.shape[0] != x.shape[-1]):
            return "the weight's size is not the input's last size"
        return reason

    @staticmethod
    def fits(x: Tensor, weight: Tensor) -> bool:
        """Whether the operator takes the two dtypes together."""
        return weight.dtype is x.dtype or weight.dtype is torch.float32

    def _groups(self, module: Any, x: Tensor) -> tuple[int | None, str | None]:
        """(number of groups, None), where the class has groups, or (None, reason)."""
        if self.groups is None:
            return None, None
        name, kind = self.groups
        value, width = getattr(module, name), x.shape[-1]
        if type(value) is not int or value <= 0 or width % value:
            return None, "the width cannot be divided into its groups"
        return (value if kind == "groups" else width // value), None

    def _normed(self, wide: Tensor, weight: Tensor, eps: float, groups: int | None, rounded_to: torch.dtype) -> Tensor:
        """The norm of a float32 tensor, times the weight."""
        if groups is None and not self.rounded:
            return op.rms_norm(wide.contiguous(), weight.float(), eps)
        if groups is None:
            n = op.rms_norm(wide.contiguous(), None, eps)
        else:
            n = op.rms_norm(wide.contiguous().unflatten(-1, (groups, -1)), None, eps).flatten(-2)
        return weight * n.to(rounded_to) if self.rounded else weight.float() * n
