"""The gate of transformers' experts: `act_fn(gate) * up` of the two halves of one product, a method of each class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch import Tensor

from ...discovery import reason_of
from ...discovery.experts import recognise_gate
from ...ops import swiglu as op
from ...registry import Target, Unrecognised
from ...sites import Site
from . import LIBRARY
from .activations import activation
from .classes import defined
from .experts_registry import GATE

_OP = "swiglu"


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The classes of experts that a module defines."""
    for name, cls in defined(module):
        if GATE not in vars(cls):
            continue
        path = f"{name}.{GATE}"
        try:
            recognise_gate(vars(cls)[GATE])
        except Exception as error:  # foreign code was run
            reason = reason_of(error)
            yield Unrecognised(_OP, LIBRARY, module.__name__, path, reason)
            continue
        yield Target(_OP, LIBRARY, module.__name__, path, _adapter, "act_fn(gate) * up of all experts")


def _adapter(original: Any, site: Site) -> Callable[..., Tensor]:
    def apply_gate(self: Any, gate_up: Tensor) -> Tensor:
        reason = op.unavailable(gate_up)
        if reason is None:
            reason, kind = activation(self.act_fn)
            if reason is None and (reason := op.unsupported(gate_up, kind)) is None:
                site.hit()
                return op.gated(gate_up, kind)
        site.fallback(reason)
        result: Tensor = original(self, gate_up)
        return result

    return apply_gate
