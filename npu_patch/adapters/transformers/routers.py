"""Routers of mixtures of experts, recognised by what their forward computes.

Logits are computed as the original computes them: a gate that is a module is called, so that adapters and hooks stay
in place.  All results are those of the original, logits included, which auxiliary losses need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from ...discovery import NotRecognised, foreign_code
from ...discovery.routers import RouterMeaning, recognise_router
from ...discovery.routers_reading import FLOAT32, MODULE, OWN, WEIGHT
from ...ops import router as op
from ...ops.guards import dtype_name
from ...ops.per_tensor import Derived
from ...registry import Target, Unrecognised
from ...sites import Site
from . import LIBRARY
from .classes import defined
from .instances import overridden

Factory = Callable[[Any, Site], Callable[..., Any]]

_OP = "router"


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The router classes that a module defines."""
    yield from routers(module, LIBRARY, adapter)


def routers(
    module: ModuleType, library: str, adapter: Callable[[RouterMeaning], Factory]
) -> Iterator[Target | Unrecognised]:
    """The router classes that a module of a library defines, and what takes their place."""
    for name, cls in defined(module):
        if not _chooses(cls):
            continue
        path = f"{name}.forward"
        try:
            with foreign_code():
                meaning = recognise_router(cls)
        except NotRecognised as error:
            if any(word in name.lower() for word in ("router", "gate", "gating")):
                yield Unrecognised(_OP, library, module.__name__, path, str(error))
            continue
        yield Target(_OP, library, module.__name__, path, adapter(meaning), str(meaning), parts=meaning.parts)


def _chooses(cls: type) -> bool:
    """Whether the forward of a class speaks of the best few."""
    code = getattr(vars(cls).get("forward"), "__code__", None)
    return code is not None and any("topk" in name or "top_k" in name for name in code.co_names)


Otherwise = Callable[["Call", Any, Any, Any, Site], Any]


def adapter(meaning: RouterMeaning, otherwise: Otherwise | None = None) -> Factory:
    """A factory for the forward of one class.

    Args:
        otherwise: asked first; gives results or a reason for calls that a library has beside plain ones, else None.
    """
    call = Call(meaning)

    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def compute(self: Any, x: Tensor, bias: Tensor | None) -> Any:
            """The results, or the reason why there are none."""
            if otherwise is not None and (results := otherwise(call, self, x, bias, site)) is not None:
                return results
            found = call.prepare(self, x, bias)
            if isinstance(found, str):
                return found
            routing, bias = found
            logits = call.logits(self, x)
            if (reason := call.refused(logits, x, routing, bias)) is not None:
                return reason
            site.hit()
            return call.results(logits, x, routing, bias)

        def forward(self: Any, x: Tensor) -> Any:
            results = compute(self, x, None)
            if not isinstance(results, str):
                return results
            site.fallback(results)
            return original(self, x)

        def forward_with_bias(self: Any, x: Tensor, bias: Tensor | None) -> Any:
            results = compute(self, x, bias)
            if not isinstance(results, str):
                return results
            site.fallback(results)
            return original(self, x, bias)

        return forward_with_bias if call.takes_bias else forward

    return factory


_not_negative = Derived(lambda bias: (bias.detach().amin() >= 0).cpu())
"""Whether no element is negative; the device is waited for once per tensor."""


def _reader(name: str) -> Callable[[Any], Any]:
    """What gives an attribute, or the attribute of one; torch.compile does not know operator.attrgetter."""
    holder, _, last = name.rpartition(".")
    if holder:
        return lambda router: getattr(getattr(router, holder), last)
    return lambda router: getattr(router, last)


class Call:
    """A router as its meaning says, step by step."""

    def __init__(self, meaning: RouterMeaning) -> None:
        self.meaning = meaning
        self.takes_bias = meaning.correction == "argument"
        self._weight = _reader(meaning.weight)
        self._read = {role: _reader(name) for role, name in meaning.roles.items()}
        self._correction = None if meaning.correction in (None, "argument") else _reader(str(meaning.correction))

    def _value(self, router: Any, role: str, default: Any) -> Any:
        read = self._read.get(role)
        return default if read is None else read(router)

    # ---- before anything is computed ---------------------------------------------------------------------------------

    def prepare(self, router: Any, x: Tensor, bias: Tensor | None) -> str | tuple[op.Routing, Tensor | None]:
        """How to route and the bias of the choice, or the reason why not, as far as it can be told without logits."""
        if (reason := op.unavailable(x) or self.differs(router, x)) is not None:
            return reason
        if not self.takes_bias:
            bias = None if self._correction is None else self._correction(router)
        return self.routing(router, x, bias, x.numel() // x.shape[-1])

    def differs(self, router: Any, x: Tensor) -> str | None:
        """What is not as it was when the class was recognised."""
        meaning = self.meaning
        if meaning.methods and (reason := overridden(router, meaning.methods)) is not None:
            return reason
        for name, value in meaning.conditions:
            if getattr(router, name) is not value:
                return f"{name} is {getattr(router, name)!r}"
        if x.dim() not in meaning.dims:
            return f"tokens of {x.dim()} dimensions"
        if x.shape[-1] != self._value(router, "width", x.shape[-1]):
            return "tokens of another width"
        if not meaning.half and not meaning.autocast and x.dtype is not torch.float32:
            return f"scores of type {dtype_name(x.dtype)}"
        if meaning.projection == MODULE:
            ambient = torch.is_autocast_enabled(x.device.type) and not meaning.autocast
            return "autocast" if ambient else None
        weight = self._weight(router)
        if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
            return "the weight is not (experts, width)"
        return None

    def routing(
        self, router: Any, x: Tensor, bias: Tensor | None, tokens: int
    ) -> str | tuple[op.Routing, Tensor | None]:
        meaning, choice = self.meaning, self.meaning.choice
        if bias is None and meaning.correction is not None and not meaning.optional:
            return "no bias"
        score = choice.score or self._value(router, "score", None)
        if score not in ("softmax", "sigmoid"):
            return f"scores by {score!r}"
        groups, kept = self._value(router, "groups", 1), self._value(router, "kept", 1)
        if groups is None and meaning.ungrouped:
            groups = kept = 1
        if "limited" in self._read:
            method = self._value(router, "limited", None)
            if method == "greedy":
                groups = kept = 1
            elif method != "group_limited_greedy":
                return f"experts chosen by {method!r}"
        divides = choice.divides if choice.divides is not None else self._value(router, "divides", None)
        numbers = (self._value(router, "top_k", None), groups, kept)
        scale = self._value(router, "scale", 1.0)
        if any(type(one) is not int for one in numbers) or type(scale) not in (int, float) or type(divides) is not bool:
            return "an attribute is of another type"
        routing = op.Routing(
            score, numbers[0], choice.eps if divides else None, float(scale), groups, kept, choice.of_group
        )
        if choice.hidden == 0.0 and groups > 1 and bias is not None and (reason := _may_hide(bias)) is not None:
            return reason
        experts = self._value(router, "experts", None)
        if experts is None and meaning.projection != MODULE:
            experts = self._weight(router).shape[0]
        reason = None if experts is None else op.unfit(tokens, experts, routing, bias, x.device)
        return (routing, bias) if reason is None else reason

    # ---- logits ------------------------------------------------------------------------------------------------------

    def logits(self, router: Any, x: Tensor) -> Tensor:
        """As the original computes them, (..., experts)."""
        meaning = self.meaning
        rows = x.reshape(-1, x.shape[-1]) if meaning.flat else x
        weight = self._weight(router)
        if meaning.projection == MODULE:
            if not meaning.autocast:
                return weight(rows)
            with torch.autocast(device_type=x.device.type, dtype=torch.float32):
                return weight(rows)
        bias = self._value(router, "bias", None)
        if meaning.projection == FLOAT32:
            return F.linear(rows.float(), weight.float(), None if bias is None else bias.float())
        return F.linear(rows.to(weight.dtype) if meaning.projection == WEIGHT else rows, weight, bias)

    def refused(self, logits: Tensor, x: Tensor, routing: op.Routing, bias: Tensor | None) -> str | None:
        """Why these logits cannot be used."""
        projection = self.meaning.projection
        if projection == FLOAT32 or not self.meaning.half:
            if logits.dtype is not torch.float32:
                return f"logits of type {dtype_name(logits.dtype)}"
        elif projection == OWN and logits.dtype is not x.dtype:
            return "autocast"
        return op.unsupported(logits.reshape(-1, logits.shape[-1]), routing, bias)

    # ---- results -----------------------------------------------------------------------------------------------------

    def results(self, logits: Tensor, x: Tensor, routing: op.Routing, bias: Tensor | None) -> tuple[Tensor, ...]:
        """What the original returns."""
        meaning = self.meaning
        dtype = {"float32": torch.float32, "logits": logits.dtype, "hidden": x.dtype}[meaning.weights]
        found = {"logits": logits}
        if "logits in float32" in meaning.outputs:
            logits = found["logits in float32"] = logits.float()
        rows = logits.reshape(-1, logits.shape[-1])
        weights, experts, scores = op.route(rows, routing, bias, dtype=dtype, scores="scores" in meaning.outputs)
        if "counts" in meaning.outputs:
            found["counts"] = torch.histc(experts.view(-1), bins=rows.shape[-1], min=0, max=rows.shape[-1])
        if scores is not None:
            found["scores"] = scores.view(logits.shape)
        found["weights"] = weights.view(*logits.shape[:-1], routing.top_k)
        found["experts"] = experts.view(*logits.shape[:-1], routing.top_k)
        return tuple(found[kind] for kind in meaning.outputs)


def _may_hide(bias: Tensor) -> str | None:
    """Where the original gives the experts of other groups the score 0, it prefers them to those of a negative one."""
    if is_compiling() or bias.is_inference() or type(bias) is not Tensor:
        return "the bias cannot be looked at"
    return None if bool(_not_negative(bias)) else "a negative bias"
