"""torchtitan's feed-forwards, recognised by what their forward computes.

Sub-modules are called as the original calls them, through `__call__`.  Their weights stay two: packing them would copy
them each step or change the model's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...discovery import reason_of
from ...discovery.mlp import GatedMeaning, NotGated, recognise_gated_mlp
from ...ops import swiglu as op
from ...registry import Target, Unrecognised
from ...sites import Site
from ..transformers import mlp as gated
from . import LIBRARY, dtensors, experts_gate
from .typecheck import TYPE_CHECKING_REASON, type_checking

_OP = "swiglu"
_SEPARATE = "separate"
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}

Factory = Callable[[Any, Site], Callable[..., Tensor]]


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The gated feed-forward classes that a module defines, and gated experts."""
    yield from experts_gate.find(module)
    for name, cls in list(vars(module).items()):
        if not isinstance(cls, type) or not issubclass(cls, nn.Module) or cls.__module__ != module.__name__:
            continue
        code = getattr(vars(cls).get("forward"), "__code__", None)
        if code is None or "__class__" in code.co_freevars:  # what it calls of its parent is a target itself
            continue
        path = f"{name}.forward"
        try:
            meaning = recognise_gated_mlp(cls)
        except NotGated:
            continue
        except Exception as error:  # foreign code was run
            if "feedforward" in name.lower() or "mlp" in name.lower():
                reason = reason_of(error)
                yield Unrecognised(_OP, LIBRARY, module.__name__, path, reason)
            continue
        only_if = "" if meaning.packed else _SEPARATE
        text = str(meaning)
        yield Target(_OP, LIBRARY, module.__name__, path, adapter(meaning), text, only_if=only_if, parts=meaning.parts)


def adapter(meaning: GatedMeaning) -> Factory:
    """A factory for the forward of one class."""
    if meaning.packed or meaning.function is None:
        return gated.adapter(meaning)
    return _separate(meaning, meaning.function)


def _separate(meaning: GatedMeaning, kind: str) -> Factory:
    """Two projections, whose results are joined where there will be a backward pass.

    Counted in sizes of one projection, the original moves 5 forward and 9 backward, joined it is 7 and 5: fewer with a
    backward pass, more without.
    """
    first, second = meaning.projections
    activate = _ACTIVATIONS[kind]

    def factory(original: Any, site: Site) -> Callable[..., Tensor]:
        def forward(self: Any, x: Tensor) -> Tensor:
            reason = _unavailable(x)
            if reason is not None:
                site.fallback(reason)
                return original(self, x)
            sides = (getattr(self, first)(x), getattr(self, second)(x))
            gate, up = sides[meaning.gate], sides[1 - meaning.gate]
            joined = _joined(gate, up, kind)
            if isinstance(joined, str):
                site.fallback(joined)  # the original would project a second time
                product = activate(gate) * up
            else:
                site.hit()
                halves, place = joined
                product = op.gated(halves, kind)
                product = product if place is None else place.wrap(product)
            for name in meaning.between:
                product = getattr(self, name)(product)
            return getattr(self, meaning.down)(product)

        return forward

    return factory


def _unavailable(x: Any) -> str | None:
    """Why nothing can be joined, as far as it can be told before anything is projected."""
    if not torch.is_grad_enabled():
        return "joining gate and up moves more bytes without a gradient"
    if type_checking():
        return TYPE_CHECKING_REASON
    return None if dtensors.is_distributed(x) else op.unavailable(x)


def _joined(gate: Any, up: Any, kind: str) -> str | tuple[Tensor, dtensors.Spread | None]:
    """The reason, or gate and up beside each other and how the product is spread."""
    place = None
    if dtensors.is_distributed(gate):
        # Element by element: any part of both will do, as long as it is the same.
        found = dtensors.spread(gate, whole=())
        if isinstance(found, str):
            return found
        if not dtensors.is_distributed(up) or up.placements != gate.placements or up.device_mesh != gate.device_mesh:
            return "gate and up are not spread in the same way"
        place, gate, up = found, dtensors.local(gate), dtensors.local(up)
    if gate.dtype != up.dtype or gate.shape != up.shape or gate.device != up.device:
        return "gate and up differ in type, shape or device"
    for side in (gate, up):
        if (reason := op.unavailable(side)) is not None:
            return reason
    halves = torch.cat((gate, up), -1)
    return op.unsupported(halves, kind) or (halves, place)
