"""Eager attention functions of models without `sdpa` support: theirs is the only attention that such a model runs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.compiler import is_compiling

from ...discovery import NotRecognised
from ...discovery.eager import EagerMeaning, recognise_eager
from ...ops import attention as op
from ...ops.per_tensor import Derived
from ...registry import Target, Unrecognised
from ...sites import Site
from . import LIBRARY, masks
from .fused import HARMLESS, fused

_OP = "attention"
_CAPTURING = "transformers.utils.output_capturing"  # of transformers 5, which records with hooks
_RECORDING = "transformers.utils.generic"  # of transformers 4, which puts a function over the module's forward
_REQUIRED = ("module", "query", "key", "value", "attention_mask")
# Beside what every attention function ignores, the probe has made sure of these.
_IGNORED = HARMLESS | {"is_causal", "s_aux", "scaling", "dropout", *_REQUIRED}

_hidden = Derived(lambda mask: (mask[:1] if mask.stride(0) == 0 else mask) != 0)
_in_bfloat16 = Derived(lambda mask: mask.clamp(min=torch.finfo(torch.bfloat16).min).bfloat16())


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The eager functions of a module that holds a model without sdpa support."""
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    if not any(c.__module__ == module.__name__ and vars(c).get("_supports_sdpa") is False for c in classes):
        return
    for name, value in list(vars(module).items()):
        if not isinstance(value, FunctionType) or value.__module__ != module.__name__:
            continue
        if tuple(inspect.signature(value).parameters)[:5] != _REQUIRED:
            continue
        try:
            meaning = recognise_eager(value, _IGNORED)
        except NotRecognised as error:
            yield Unrecognised(_OP, LIBRARY, module.__name__, name, str(error))
            continue
        factory = partial(_adapter, meaning)
        yield Target(_OP, LIBRARY, module.__name__, name, factory, str(meaning), rebind=(LIBRARY,), parts=meaning.parts)


def _adapter(meaning: EagerMeaning, original: Any, site: Site) -> Callable[..., Any]:
    names = tuple(inspect.signature(original).parameters)

    def eager(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        reason, output = _attend(meaning, given, site)
        if reason is None:
            return output, None
        site.fallback(reason)
        return original(*args, **kwargs)

    return eager


def _attend(meaning: EagerMeaning, given: Mapping[str, Any], site: Site) -> tuple[str | None, Any]:
    """(reason, None) or (None, output of shape (B, S, N, Dv), contiguous)."""
    try:
        module, query, key, value, mask = (given[name] for name in _REQUIRED)
    except KeyError:
        return "an argument is missing", None
    if query.device.type != "npu":
        return "not on an NPU", None
    dropout = given.get("dropout") or 0.0
    if dropout and not module.training:
        dropout = 0.0
    for name, argument in given.items():
        if name not in _IGNORED and argument is not None and argument is not False:
            return f"keyword {name}", None
    if _weights_wanted(module):
        return "the attention weights are asked for", None
    groups = module.num_key_value_groups if meaning.groups else 1
    if query.dim() != 4 or query.shape[1] != key.shape[1] * groups:
        return "query heads are not key heads times num_key_value_groups", None
    scale = given.get("scaling")
    if scale is None:
        if not meaning.default_scale:
            return "no scaling", None
        scale = (query.shape[-1] if meaning.default_scale == "query" else module.head_dim) ** -0.5
    sinks = None
    if meaning.sinks:
        sinks = module.sinks
        if sinks is not None:
            sinks = sinks.reshape(-1).float()
        elif not meaning.sinks_optional:
            return "no sinks", None
    if torch.is_autocast_enabled("npu"):  # the original's products are cast by autocast, the operator is not
        dtype = torch.get_autocast_dtype("npu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if mask is None:
        return fused(query, key, value, op.Mask.full(), scale, site, sinks, dropout)
    known = masks.known(mask, query, key)
    if known is not None:
        reason, output = fused(query, key, value, known, scale, site, sinks, dropout)
        if reason is None or known.kind != "documents":
            return reason, output
    if not mask.is_floating_point() or mask.dim() != 4:
        return "the mask is not a 4-D additive one", None
    hard = masks.is_hard(mask)
    if hard and sinks is not None:
        written = op.Mask.dense(_hidden(mask))  # a query without a visible key gets zeros: the sink takes all
    else:
        if hard and query.dtype is torch.bfloat16 and mask.dtype is torch.float32:  # under autocast
            mask = _in_bfloat16(mask)
        written = op.Mask.full().with_bias(mask, hard=hard)
    return fused(query, key, value, written, scale, site, sinks, dropout)


def _weights_wanted(module: Any) -> bool:
    """Whether somebody takes the second result: transformers' recorder, or a hook on the attention module."""
    hooks = getattr(module, "_forward_hooks", None)
    if hooks and any(getattr(hook, "__module__", None) != _CAPTURING for hook in hooks.values()):
        return True
    over = module.__dict__.get("forward")
    while isinstance(over, FunctionType):
        if over.__globals__.get("__name__") == _RECORDING:
            return True
        over = getattr(over, "__wrapped__", None)
    capturing = sys.modules.get(_CAPTURING)
    if capturing is None:
        return False
    collector = capturing._active_collector
    recorded = (collector.global_var if collector.compiling else None) if is_compiling() else collector.get()
    return recorded is not None and any("attentions" in key for key in recorded)
