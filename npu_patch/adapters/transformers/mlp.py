"""Gated MLPs of a modeling file, recognised by what their forward computes.

Sub-modules are called as the original calls them, through `__call__`: adapters, hooks and quantised layers stay in
place.  Only the activation and the product are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...discovery import NotRecognised, foreign_code, is_norm_class
from ...discovery.mlp import GatedMeaning, NotGated, recognise_gated_mlp
from ...ops import swiglu as op
from ...registry import Target, Unrecognised
from ...sites import Site
from . import LIBRARY, experts_gate
from .activations import activation, learn

_OP = "swiglu"
_SEPARATE = "separate"


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The gated MLP classes that a module defines."""
    learn()
    yield from experts_gate.find(module)
    for name, cls in list(vars(module).items()):
        try:
            with foreign_code():
                found = _look(module.__name__, cls, f"{name}.forward")
        except NotRecognised:  # a class that cannot even be looked at
            continue
        if found is not None:
            yield found


def _look(module: str, cls: Any, path: str) -> Target | Unrecognised | None:
    """What a class of a module is; None if it does not look like a gated MLP."""
    if not isinstance(cls, type) or not issubclass(cls, nn.Module) or cls.__module__ != module:
        return None
    if "forward" not in vars(cls) or is_norm_class(cls, module):
        return None
    try:
        meaning = recognise_gated_mlp(cls)
    except NotRecognised as error:
        says = _says_gated(cls, not isinstance(error, NotGated))
        return Unrecognised(_OP, LIBRARY, module, path, str(error)) if says else None
    only_if = "" if meaning.packed else _SEPARATE
    return Target(_OP, LIBRARY, module, path, adapter(meaning), str(meaning), only_if=only_if, parts=meaning.parts)


def _says_gated(cls: type, looks_gated: bool) -> bool:
    """Whether names promise a gated MLP, so that not recognising it is worth saying."""
    if not any(part in cls.__name__.lower() for part in ("mlp", "glu", "gated")):
        return False
    code = getattr(vars(cls)["forward"], "__code__", None)
    return looks_gated or (code is not None and any("gate" in used for used in code.co_names))


def adapter(meaning: GatedMeaning) -> Callable[[Any, Site], Callable[..., Tensor]]:
    """A factory for the forward of one class."""
    return _packed(meaning) if meaning.packed else _separate(meaning)


def _kind(self: Any, meaning: GatedMeaning, x: Tensor) -> tuple[str | None, str]:
    """(reason, "") or (None, activation), as far as it can be told before anything is projected."""
    reason = op.unavailable(x)
    if reason is not None:
        return reason, ""
    if meaning.activation is None:
        assert meaning.function is not None
        return None, meaning.function
    return activation(getattr(self, meaning.activation))


def _activate(self: Any, meaning: GatedMeaning, gate: Tensor) -> Tensor:
    if meaning.activation is not None:
        return getattr(self, meaning.activation)(gate)
    if meaning.function == "silu":
        return nn.functional.silu(gate)
    return nn.functional.gelu(gate, approximate="tanh" if meaning.function == "gelu_tanh" else "none")


def _finish(self: Any, meaning: GatedMeaning, product: Tensor) -> Tensor:
    for name in meaning.between:
        product = getattr(self, name)(product)
    return getattr(self, meaning.down)(product)


def _packed(meaning: GatedMeaning) -> Callable[[Any, Site], Callable[..., Tensor]]:
    """One projection, whose result holds gate and up."""
    projection, gate = meaning.projections[0], meaning.gate

    def factory(original: Any, site: Site) -> Callable[..., Tensor]:
        def forward(self: Any, x: Tensor) -> Tensor:
            reason, kind = _kind(self, meaning, x)
            if reason is not None:
                site.fallback(reason)
                return original(self, x)
            projected = getattr(self, projection)(x)
            reason = op.unsupported(projected, kind, gate)
            if reason is None:
                site.hit()
                return _finish(self, meaning, op.gated(projected, kind, gate))
            site.fallback(reason)  # the original would project a second time
            sides = projected.chunk(2, -1)
            return _finish(self, meaning, _activate(self, meaning, sides[gate]) * sides[1 - gate])

        return forward

    return factory


def _separate(meaning: GatedMeaning) -> Callable[[Any, Site], Callable[..., Tensor]]:
    """Two projections, whose results are joined, if the user asks for it and there will be a backward pass.

    Counted in sizes of one projection, the original moves 5 forward and 9 backward; joined, npu_swiglu moves 7 and 5,
    npu_geglu 8 and 6: fewer with a backward pass, or as many in fewer launches, and more without.
    """
    first, second = meaning.projections

    def factory(original: Any, site: Site) -> Callable[..., Tensor]:
        def forward(self: Any, x: Tensor) -> Tensor:
            reason, kind = _kind(self, meaning, x)
            if reason is None and not torch.is_grad_enabled():
                reason = "joining gate and up moves more bytes without a gradient"
            if reason is not None:
                site.fallback(reason)
                return original(self, x)
            sides = (getattr(self, first)(x), getattr(self, second)(x))
            gate, up = sides[meaning.gate], sides[1 - meaning.gate]
            reason, joined = _join(gate, up, kind)
            if reason is None:
                site.hit()
                return _finish(self, meaning, op.gated(joined, kind))
            site.fallback(reason)
            return _finish(self, meaning, _activate(self, meaning, gate) * up)

        return forward

    return factory


def _join(gate: Tensor, up: Tensor, kind: str) -> tuple[str | None, Any]:
    """(reason, None) or (None, gate and up beside each other)."""
    if gate.dtype != up.dtype or gate.shape != up.shape or gate.device != up.device:
        return "gate and up differ in type, shape or device", None
    for side in (gate, up):
        if (reason := op.unavailable(side)) is not None:
            return reason, None
    joined = torch.cat((gate, up), -1)
    return op.unsupported(joined, kind), joined
