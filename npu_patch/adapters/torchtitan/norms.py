"""torchtitan's norm classes; `RMSNorm` inherits its forward from torch.nn.RMSNorm.

The write goes to the class that torchtitan's models name, never to torch.nn.RMSNorm, which other libraries use too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...discovery import NormMeaning, NotRecognised, is_norm_class, recognise_norm
from ...discovery.norms import says_rms
from ...ops import rms_norm as op
from ...registry import Target, Unrecognised
from ...sites import Site
from .typecheck import TYPE_CHECKING_REASON, type_checking

_OP, _LIBRARY = "rms_norm", "torchtitan"


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The root-mean-square norm classes of a module, by what their forward computes."""
    for name, cls in list(vars(module).items()):
        if not is_norm_class(cls, module.__name__) or not says_rms(cls):
            continue
        path = f"{name}.forward"
        try:
            weighted, bare = _meanings(cls)
        except NotRecognised as error:
            yield Unrecognised(_OP, _LIBRARY, module.__name__, path, str(error))
            continue
        meaning = " | ".join(str(one) for one in (weighted, bare) if one is not None)
        yield Target(_OP, _LIBRARY, module.__name__, path, _adapter(weighted, bare), meaning)


def _meanings(cls: type) -> tuple[NormMeaning, NormMeaning | None]:
    """What the class computes with a weight, and without one if it can be without.

    Raises:
        NotRecognised: it computes something else, or needs conditions that the adapter below does not check.
    """
    weighted: NormMeaning | None = None
    bare: NormMeaning | None = None
    for meaning in recognise_norm(cls):
        if meaning.methods or any(value is not None for _, value in meaning.conditions):
            raise NotRecognised(f"depends on more than weight and epsilon: {meaning}")
        if meaning.formula == "fp32" and not meaning.conditions:
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


def _adapter(weighted: NormMeaning, bare: NormMeaning | None) -> Callable[[Any, Site], Callable[..., Tensor]]:
    """A factory for forwards of one class; attribute names and dtype pairs are those that the probe saw."""
    weight_name, eps_name = weighted.weight or "weight", weighted.eps
    width_name = weighted.widths[0][0] if weighted.widths else None
    # The fused operator rounds to the dtype of x; pairs for which the original does not, stay the original's.
    pairs = frozenset(pair for pair, result in weighted.results.items() if result == pair[0])
    default_eps = weighted.default_eps
    bare_allowed = bare is not None

    def adapter(original: Any, site: Site) -> Callable[..., Tensor]:
        def forward(self: Any, x: Tensor) -> Tensor:
            weight, eps = getattr(self, weight_name), getattr(self, eps_name)
            reason = op.unsupported(x, weight)
            if reason is None:
                if weight is not None and (x.dtype, weight.dtype) not in pairs:
                    reason = "the original gives another result type"
                elif weight is None and not bare_allowed:
                    reason = "no weight"
                elif width_name is not None and tuple(getattr(self, width_name)) != x.shape[-1:]:
                    reason = "the norm is not over the last dimension alone"
                elif eps is None and default_eps is None:
                    reason = "no epsilon"
                elif type_checking():
                    reason = TYPE_CHECKING_REASON
            if reason is not None:
                site.fallback(reason)
                return original(self, x)
            site.hit()
            return op.rms_norm(x, weight, eps if eps is not None else _default_eps(default_eps, x.dtype))

        return forward

    return adapter
