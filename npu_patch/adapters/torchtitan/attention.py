"""torchtitan's inner attentions: which classes of a module are some, and in which layout."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from ...discovery.bracket import NotRecognised
from ...ops import attention as op
from ...registry import Target, Unrecognised
from ...sites import Site
from . import batches, document_ends, flex, flex_meaning, layouts, masks, plain, varlen

_OP, _LIBRARY = "attention", "torchtitan"
_Adapter = Callable[[Any, Site], Callable[..., Any]]


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """Attention classes, mask builders, data loaders, what activation checkpointing keeps: what the module has."""
    name = module.__name__
    for cls in list(vars(module).values()):
        if not (isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == name):
            continue
        forward = vars(cls).get("forward")
        if not isinstance(forward, FunctionType):
            continue
        path = f"{cls.__name__}.forward"
        try:
            found = _recognise(forward)
        except NotRecognised as error:
            yield Unrecognised(_OP, _LIBRARY, name, path, str(error))
            continue
        if found is not None:
            meaning, adapter = found
            yield Target(_OP, _LIBRARY, name, path, adapter, meaning)
    yield from masks.find(module)
    yield from document_ends.find(module)
    yield from batches.find(module)
    yield from _find_saved(module)


def _recognise(forward: FunctionType) -> tuple[str, _Adapter] | None:
    """Meaning and adapter of an attention's forward; None for a forward of another kind.

    Raises:
        NotRecognised: its parameters are an attention's, what it does is not known.
    """
    positional, keywords = _parameters(forward)
    if len(positional) == 6 and positional[4:] == ["attention_masks", "scale"] and not keywords:
        meaning = varlen.recognise(forward)
        return varlen.MEANING, partial(varlen.wrapper_adapter, meaning)
    if len(positional) != 4:
        return None
    layout = layouts.named(positional[1:])
    if keywords == flex_meaning.KEYWORDS and layout is not None:
        return flex_meaning.MEANING, partial(flex.adapter, layout)
    if keywords == flex_meaning.WRAPPER_KEYWORDS:
        return flex_meaning.MEANING, partial(flex.wrapper_adapter, flex_meaning.recognise_wrapper(forward))
    if keywords == plain.KEYWORDS | {"attention_masks"}:
        return plain.MEANING, partial(plain.adapter, plain.recognise(forward))
    if keywords == plain.KEYWORDS:
        return plain.MEANING, partial(plain.wrapper_adapter, plain.recognise(forward))
    if keywords == varlen.KEYWORDS:
        return varlen.MEANING, partial(varlen.adapter, varlen.recognise(forward, transforms=True))
    return None


def _parameters(function: FunctionType) -> tuple[list[str], set[str]]:
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return positional, {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


# ---- activation checkpointing ----------------------------------------------------------------------------------------
# Recomputing attention in the backward costs as much as computing it; torchtitan keeps its own for that reason.


def _find_saved(module: ModuleType) -> Iterator[Target]:
    """A function without arguments that makes torchtitan's list of operators to keep; or one that is given it."""
    for path, value in list(vars(module).items()):
        if not isinstance(value, FunctionType) or value.__module__ != module.__name__:
            continue
        adapter: _Adapter
        if path == "_get_default_save_ops":
            adapter = _save_ops_adapter
        elif _needs(value, "op_sac_save_list"):
            adapter = _given_save_ops_adapter
        else:
            continue
        meaning = "operators whose results are kept"
        yield Target(_OP, _LIBRARY, module.__name__, path, adapter, meaning, supporting=True)


def _needs(function: FunctionType, keyword: str) -> bool:
    parameter = inspect.signature(function).parameters.get(keyword)
    return parameter is not None and parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty


def _save_ops_adapter(original: Any, site: Site) -> Callable[..., set[Any]]:
    def save_ops() -> set[Any]:
        return set(original()) | set(op.SAVE_OPS())

    return save_ops


def _given_save_ops_adapter(original: Any, site: Site) -> Callable[..., Any]:
    def apply(*args: Any, **kwargs: Any) -> Any:
        kwargs["op_sac_save_list"] = set(kwargs["op_sac_save_list"]) | set(op.SAVE_OPS())
        return original(*args, **kwargs)

    return apply
