"""torchtitan's routers, recognised by what their forward computes, and what activation checkpointing keeps of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from ...discovery.routers import RouterMeaning
from ...ops import router as op
from ...registry import Target, Unrecognised
from ...sites import Site
from ..transformers.routers import Call, Factory, routers
from ..transformers.routers import adapter as plain_adapter
from . import LIBRARY, dtensors
from .typecheck import TYPE_CHECKING_REASON, type_checking

_OP = "router"


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """Router classes of a module, and functions that say what activation checkpointing keeps."""
    yield from routers(module, LIBRARY, adapter)
    yield from _find_saved(module)


def adapter(meaning: RouterMeaning) -> Factory:
    """A factory for the forward of one class, which takes tokens and a bias of the choice."""
    return plain_adapter(meaning, _otherwise)


def _otherwise(call: Call, router: Any, x: Any, bias: Any, site: Site) -> Any:
    """What plain tensors outside of type checking do not ask for."""
    if type_checking():
        return TYPE_CHECKING_REASON
    return _spread(call, router, x, bias, site) if dtensors.is_distributed(x) else None


def _spread(call: Call, router: Any, x: Any, bias: Any, site: Site) -> Any:
    """The same for tokens of which every rank has its own: each token is routed by itself."""
    place = dtensors.spread(x, whole=(-1,), beside=() if bias is None else (bias,))
    if isinstance(place, str):
        return place
    if call.meaning.flat or "counts" in call.meaning.outputs or (bias is None and call.meaning.correction is None):
        return "a DTensor"
    tokens = x.to_local()
    if (reason := op.unavailable(dtensors.waited(tokens)) or call.differs(router, x)) is not None:
        return reason
    of_choice = None if bias is None else dtensors.local(bias.detach())
    found = call.routing(router, x, of_choice, tokens.numel() // x.shape[-1])
    if isinstance(found, str):
        return found
    routing, _ = found
    logits = call.logits(router, x)
    place = dtensors.spread(logits, whole=(-1,)) if dtensors.is_distributed(logits) else "the gate takes DTensors apart"
    if isinstance(place, str):
        return place
    rows = dtensors.local(logits)
    if (reason := call.refused(rows, tokens, routing, of_choice)) is not None:
        return reason
    site.hit()
    results = call.results(rows, tokens, routing, of_choice)
    return tuple(place.wrap(one, x.shape[:-1] + one.shape[-1:]) for one in results)


# ---- activation checkpointing ----------------------------------------------------------------------------------------
# torchtitan keeps the choice of torch.topk, which need not be the same when the forward runs again.


def _find_saved(module: ModuleType) -> Iterator[Target]:
    """A method that gives torchtitan's list of operators to keep, or an inner function that is given it."""
    for path, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        target: tuple[str, Factory]
        if isinstance(value, type) and isinstance(vars(value).get("get_save_ops"), FunctionType):
            target = (f"{path}.get_save_ops", _save_ops_adapter)
        elif isinstance(value, FunctionType) and path.startswith("_") and _may_take(value, "op_sac_save_list"):
            target = (path, _given_save_ops_adapter)
        else:
            continue
        meaning = "operators whose results are kept"
        yield Target(_OP, LIBRARY, module.__name__, *target, meaning, supporting=True)


def _may_take(function: FunctionType, keyword: str) -> bool:
    parameter = inspect.signature(function).parameters.get(keyword)
    return parameter is not None and parameter.kind is parameter.KEYWORD_ONLY and parameter.default is None


def _save_ops_adapter(original: Any, site: Site) -> Callable[..., set[Any]]:
    def save_ops(self: Any) -> set[Any]:
        return set(original(self)) | set(op.SAVE_OPS())

    return save_ops


def _given_save_ops_adapter(original: Any, site: Site) -> Callable[..., Any]:
    def apply(*args: Any, **kwargs: Any) -> Any:
        kwargs["op_sac_save_list"] = set(kwargs.get("op_sac_save_list") or ()) | set(op.SAVE_OPS())
        return original(*args, **kwargs)

    return apply
