"""Norm classes of a modeling file, recognised by what their forward computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ...discovery import (
    NormMeaning,
    NotRecognised,
    foreign_code,
    is_norm_class,
    joined,
    recognise_gated_norm,
    recognise_norm,
    says_rms,
)
from ...ops import rms_norm as op
from ...registry import Target, Unrecognised
from ...sites import Site
from . import LIBRARY, REMOTE, foreign, gated_norms
from .instances import holds, overridden

Factory = Callable[[Any, Site], Callable[..., Tensor]]

_OP = "rms_norm"


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The root-mean-square norm classes that a module defines."""
    for name, cls in list(vars(module).items()):
        path = f"{name}.forward"
        try:
            with foreign_code():
                target = _look(module.__name__, name, cls, path)
        except NotRecognised as error:
            if says_rms(name):
                yield Unrecognised(_OP, LIBRARY, module.__name__, path, str(error))
            continue
        if target is not None:
            yield target


def _look(module: str, name: str, cls: Any, path: str) -> Target | None:
    """The target that something in a module is; None if it is no norm of that module.

    Raises:
        NotRecognised: it computes something else.
    """
    if isinstance(cls, type) and issubclass(cls, nn.Module) and foreign(cls) and "rmsnorm" in name.lower():
        raise NotRecognised(f"{cls.__module__}.{cls.__qualname__} is in its place")
    if not is_norm_class(cls, module) or _inherits(cls):
        return None
    meanings, factory = _recognise(cls)
    text = " | ".join(dict.fromkeys(map(str, meanings)))
    parts = joined(part for meaning in meanings for part in meaning.parts)
    return Target(_OP, LIBRARY, module, path, factory, text, parts=parts)


def _recognise(cls: type) -> tuple[tuple[NormMeaning, ...], Factory]:
    code = getattr(getattr(cls, "forward", None), "__code__", None)
    if code is not None and code.co_argcount == 3:
        meanings = recognise_gated_norm(cls)
        return meanings, gated_norms.adapter(cls, meanings)
    meanings = recognise_norm(cls)
    return meanings, adapter(cls, meanings)


def _inherits(cls: type) -> bool:
    """Whether the forward is that of another class of the same library, which is a target itself."""
    owner = next((one for one in cls.__mro__ if "forward" in vars(one)), cls)
    return owner is not cls and owner.__module__.partition(".")[0] in (LIBRARY, REMOTE)


def adapter(cls: type, meanings: tuple[NormMeaning, ...]) -> Callable[[Any, Site], Callable[..., Tensor]]:
    """A factory for the forward of one class."""
    only = meanings[0]
    if len(meanings) > 1 or only.weight is None or only.conditions or only.widths or only.methods:
        return _conditional(cls, meanings)
    return _weighted(only)


def _weighted(meaning: NormMeaning) -> Callable[[Any, Site], Callable[..., Tensor]]:
    """One meaning, which depends on nothing but weight and epsilon."""
    assert meaning.weight is not None
    weight_name, eps_name, default_eps = meaning.weight, meaning.eps, meaning.default_eps
    compute = _with_offset if meaning.formula == "gemma" else _same_dtype
    results = meaning.results

    def factory(original: Any, site: Site) -> Callable[..., Tensor]:
        def forward(self: Any, x: Tensor) -> Tensor:
            weight, eps = getattr(self, weight_name), getattr(self, eps_name)
            reason, y = compute(x, weight, eps, results, default_eps, site)
            if reason is None:
                return y
            site.fallback(reason)
            return original(self, x)

        return forward

    return factory


def _conditional(cls: type, meanings: tuple[NormMeaning, ...]) -> Callable[[Any, Site], Callable[..., Tensor]]:
    """Several meanings, or one that depends on other attributes or on methods that a subclass may override."""
    cases = tuple(
        (
            m.conditions,
            m.widths,
            m.weight,
            m.eps,
            m.default_eps,
            m.results,
            _without_weight if m.weight is None else _with_offset if m.formula == "gemma" else _same_dtype,
        )
        for m in meanings
    )
    methods = tuple(dict.fromkeys(pair for m in meanings for pair in m.methods))

    def factory(original: Any, site: Site) -> Callable[..., Tensor]:
        def forward(self: Any, x: Tensor) -> Tensor:
            reason = overridden(self, methods) if type(self) is not cls else None
            if reason is None:
                for conditions, widths, weight_name, eps_name, default_eps, results, compute in cases:
                    if not holds(self, x, conditions, widths):
                        continue
                    weight = None if weight_name is None else getattr(self, weight_name)
                    if weight is None and weight_name is not None:
                        continue
                    reason, y = compute(x, weight, getattr(self, eps_name), results, default_eps, site)
                    if reason is None:
                        return y
                    break
            site.fallback(reason or "its attributes are none of those that were recognised")
            return original(self, x)

        return forward

    return factory


# ---- the formulas; each returns (reason, result), one of which is None -----------------------------------------------

Computed = tuple["str | None", Any]


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The operator on x in memory order, so that the result has the strides that elementwise operators would give it.

    The operator's own results are contiguous, while its shape function for torch.compile promises the strides of x.
    """
    if x.is_contiguous():
        return op.rms_norm(x, weight, eps)
    if x.dim() == 4 and (swapped := x.transpose(1, 2)).is_contiguous():  # heads before tokens, a view of tokens first
        return op.rms_norm(swapped, weight, eps).transpose(1, 2)
    return op.rms_norm(x.contiguous() if is_compiling() else x, weight, eps)


def _epsilon(eps: Any, default: str | None, dtype: torch.dtype) -> float | None:
    if eps is None and default is not None:
        return torch.finfo(torch.float32 if default == "float32" else dtype).eps
    return eps if isinstance(eps, (float, int)) else None


def _same_dtype(
    x: Tensor, weight: Tensor | None, eps: Any, results: Any, default_eps: str | None, site: Site
) -> Computed:
    """Llama, and multiplied in float32: in one dtype the operator rounds once, where Llama rounds twice."""
    if type(eps) is not float and (eps := _epsilon(eps, default_eps, x.dtype)) is None:
        return "epsilon is not a number", None
    if weight is None:
        return "no weight", None
    if x.dtype is not weight.dtype:
        return _two_dtypes(x, weight, eps, results, site)
    reason = op.unsupported(x, weight)
    if reason is not None:
        return reason, None
    site.hit()
    return None, _norm(x, weight, eps)


def _two_dtypes(x: Tensor, weight: Tensor, eps: float, results: Any, site: Site) -> Computed:
    result = results.get((x.dtype, weight.dtype))
    if result is None:
        return "a pair of dtypes that was not recognised", None
    reason = op.unsupported(x, None)
    if reason is not None:
        return reason, None
    if result != x.dtype or weight.dtype != torch.float32:  # the operator knows neither; in float32 both are exact
        x, weight = x.float(), weight.float()
    reason = op.unsupported(x, weight)
    if reason is not None:
        return reason, None
    site.hit()
    return None, _norm(x, weight, eps).to(result)


def _with_offset(
    x: Tensor, weight: Tensor | None, eps: Any, results: Any, default_eps: str | None, site: Site
) -> Computed:
    """Gemma: 1 + weight, added in float32, where small weights survive; the gradient flows through the addition."""
    if type(eps) is not float and (eps := _epsilon(eps, default_eps, x.dtype)) is None:
        return "epsilon is not a number", None
    if weight is None:
        return "no weight", None
    if x.dtype is not weight.dtype and results.get((x.dtype, weight.dtype)) != x.dtype:
        return "a pair of dtypes that was not recognised", None
    reason = op.unsupported(x, weight, torch.float32)
    if reason is not None:
        return reason, None
    site.hit()
    return None, _norm(x, 1.0 + weight.float(), eps)


def _without_weight(
    x: Tensor, weight: Tensor | None, eps: Any, results: Any, default_eps: str | None, site: Site
) -> Computed:
    if type(eps) is not float and (eps := _epsilon(eps, default_eps, x.dtype)) is None:
        return "epsilon is not a number", None
    reason = op.unsupported(x, None)
    if reason is not None:
        return reason, None
    site.hit()
    return None, _norm(x, None, eps)
