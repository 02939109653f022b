"""torchtitan's norm classes, recognised by what their forward computes.

The write goes to the class that torchtitan's models name.  In 0.3.0 `RMSNorm` inherits its forward from
torch.nn.RMSNorm, which other libraries use too and which stays untouched.  The models of 0.2.2 name torch.nn.RMSNorm
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...discovery import (
    NormMeaning,
    NotRecognised,
    is_norm_class,
    reason_of,
    recognise_gated_norm,
    recognise_norm,
    says_rms,
)
from ...discovery.outside import joined
from ...ops import rms_norm as op
from ...registry import Target, Unrecognised
from ...sites import Site
from ..transformers import gated_norms
from . import LIBRARY, dtensors
from .typecheck import TYPE_CHECKING_REASON, type_checking

_OP = "rms_norm"
_SHARED = f"{LIBRARY}.models.attention"
"""The module that every model of 0.2.2 imports, and that later generations do not have."""

Factory = Callable[[Any, Site], Callable[..., Tensor]]


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The root-mean-square norm classes of a module, by what their forward computes."""
    for name, cls in list(vars(module).items()):
        if is_norm_class(cls, module.__name__) and not _inherits(cls):
            yield from _found(cls, module.__name__, f"{name}.forward")
    if module.__name__ == _SHARED and getattr(module, "torch", None) is torch:
        # For the whole process, while a model of 0.2.2 is loaded: whoever else uses the class gets the same results,
        # since it was recognised, and its own object back when the op is switched off.
        yield from _found(nn.RMSNorm, module.__name__, "torch.nn.RMSNorm.forward")


def _inherits(cls: type) -> bool:
    """Whether the forward is reached through another norm class of torchtitan, which is a target itself."""
    if "forward" in vars(cls):
        return False
    return any(
        base.__module__.partition(".")[0] == LIBRARY and is_norm_class(base, base.__module__)
        for base in cls.__mro__[1:]
    )


def _found(cls: type, module: str, path: str) -> Iterator[Target | Unrecognised]:
    try:
        meanings, factory = _recognise(cls)
    except Exception as error:  # foreign code was run
        if says_rms(cls):
            reason = reason_of(error)
            yield Unrecognised(_OP, LIBRARY, module, path, reason)
        return
    text = " | ".join(dict.fromkeys(map(str, meanings)))
    parts = joined(part for meaning in meanings for part in meaning.parts)
    yield Target(_OP, LIBRARY, module, path, factory, text, parts=parts)


def _recognise(cls: type) -> tuple[tuple[NormMeaning, ...], Factory]:
    code = getattr(getattr(cls, "forward", None), "__code__", None)
    if code is not None and code.co_argcount == 3:
        gated = recognise_gated_norm(cls)
        return gated, _unless_type_checking(gated_norms.adapter(cls, gated))
    weighted, bare = _meanings(cls)
    return (weighted,) if bare is None else (weighted, bare), _adapter(weighted, bare)


def _meanings(cls: type) -> tuple[NormMeaning, NormMeaning | None]:
    """What the class computes with a weight, and without one if it can be without.

    Raises:
        NotRecognised: it computes something else, or needs conditions that the adapter below does not check.
    """
    weighted: NormMeaning | None = None
    bare: NormMeaning | None = None
    for meaning in recognise_norm(cls, gains=True):
        if meaning.methods or any(value is not None for _, value in meaning.conditions):
            raise NotRecognised(f"depends on more than weight and epsilon: {meaning}")
        if meaning.formula in _GAMMAS and not meaning.conditions:
            weighted = meaning
        elif meaning.formula == "none":
            bare = meaning
        else:
            raise NotRecognised(f"computes {meaning}, which is not rounded as the operator rounds")
    if weighted is None:
        raise NotRecognised("computes a norm without a weight only")
    if bare is not None and (bare.eps, bare.widths) != (weighted.eps, weighted.widths):
        raise NotRecognised("reads other attributes without a weight than with one")
    if bare is not None and [name for name, _ in bare.conditions] != [weighted.weight]:
        raise NotRecognised(f"depends on more than weight and epsilon: {bare}")
    if [kind for _, kind in weighted.widths] not in ([], [tuple]):
        raise NotRecognised("reads its width in more than one place")
    return weighted, bare


def _default_eps(name: str | None, dtype: torch.dtype) -> float:
    return torch.finfo(torch.float32 if name == "float32" else dtype).eps


def _own_weight(self: Any, weight: Tensor, gain: str) -> Tensor:
    return weight


def _offset_by_one(self: Any, weight: Tensor, gain: str) -> Tensor:
    return 1.0 + weight.float()  # added in float32, where small weights survive


def _gained(self: Any, weight: Tensor, gain: str) -> Tensor:
    return weight + getattr(self, gain)  # rounded where the original rounds


_GAMMAS: dict[str, Callable[[Any, Tensor, str], Tensor]] = {
    "fp32": _own_weight,
    "gemma": _offset_by_one,
    "gain": _gained,
}


def _adapter(weighted: NormMeaning, bare: NormMeaning | None) -> Factory:
    """A factory for forwards of one class; attribute names and dtype pairs are those that the probe saw."""
    weight_name, eps_name, gain_name = weighted.weight or "weight", weighted.eps, weighted.gain or ""
    width_name = weighted.widths[0][0] if weighted.widths else None
    # The fused operator rounds to the dtype of x; pairs for which the original does not, stay the original's.
    pairs = frozenset(pair for pair, result in weighted.results.items() if result == pair[0])
    default_eps = weighted.default_eps
    bare_allowed = bare is not None
    gamma_of = _GAMMAS[weighted.formula]
    gamma_dtype = torch.float32 if weighted.formula == "gemma" else None
    plain_gamma = weighted.formula == "fp32"

    def adapter(original: Any, site: Site) -> Callable[..., Tensor]:
        def forward(self: Any, x: Tensor) -> Tensor:
            weight, eps = getattr(self, weight_name), getattr(self, eps_name)
            rows, place = x, None
            if type(x) is not Tensor and dtensors.is_distributed(x):
                found = dtensors.spread(x, whole=(-1,), beside=() if weight is None else (weight,))
                if isinstance(found, str):
                    site.fallback(found)
                    return original(self, x)
                place, rows = found, dtensors.local(x)
                weight = None if weight is None else dtensors.local(weight, summed=place.placements)
            reason = op.unsupported(rows, weight, gamma_dtype)
            if reason is None:
                if weight is not None and (rows.dtype, weight.dtype) not in pairs:
                    reason = "the original gives another result type"
                elif weight is None and not bare_allowed:
                    reason = "no weight"
                elif width_name is not None and tuple(getattr(self, width_name)) != rows.shape[-1:]:
                    reason = "the norm is not over the last dimension alone"
                elif eps is None and default_eps is None:
                    reason = "no epsilon"
                elif type_checking():
                    reason = TYPE_CHECKING_REASON
            if reason is not None:
                site.fallback(reason)
                return original(self, x)
            site.hit()
            if eps is None:
                eps = _default_eps(default_eps, rows.dtype)
            gamma = weight if plain_gamma or weight is None else gamma_of(self, weight, gain_name)
            y = op.rms_norm(rows, gamma, eps)
            return y if place is None else place.wrap(y)

        return forward

    return adapter


def _unless_type_checking(factory: Factory) -> Factory:
    """The same, but for calls under the SPMD type checker."""

    def adapter(original: Any, site: Site) -> Callable[..., Tensor]:
        fused = factory(original, site)

        def forward(self: Any, x: Tensor, gate: Tensor) -> Tensor:
            if type_checking():
                site.fallback(TYPE_CHECKING_REASON)
                return original(self, x, gate)
            return fused(self, x, gate)

        return forward

    return adapter
