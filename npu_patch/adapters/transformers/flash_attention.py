"""The `flash_attention_2` entry of transformers' attention registry.

On an NPU transformers itself drops the sliding window there, and makes the lists of packed sequences in every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor

from ...discovery import NotRecognised, foreign_code
from ...discovery.flash import FlashMeaning, recognise_flash, target_dtype
from ...ops import attention as op
from ...registry import Target, Unrecognised
from ...sites import Site
from . import LIBRARY
from .flash_calls import Call, document_ends, hidden, in_plain_pytorch
from .fused import HARMLESS, fused

_OP = "attention"
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
_ENTRY = "flash_attention_2"


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The `flash_attention_2` entry, in the module that holds the registry."""
    registry = getattr(module, _REGISTRY, None)
    if registry is None or getattr(type(registry), "__module__", None) != module.__name__:
        return
    path = f"{_REGISTRY}[{_ENTRY}]"
    entry = getattr(type(registry), "_global_mapping", registry).get(_ENTRY)
    if entry is None:
        return
    try:
        with foreign_code():
            meaning = recognise_flash(entry)
    except NotRecognised as error:
        yield Unrecognised(_OP, LIBRARY, module.__name__, path, str(error))
        return
    yield Target(_OP, LIBRARY, module.__name__, path, adapter(meaning), "flash attention")


def adapter(meaning: FlashMeaning) -> Callable[[Any, Site], Callable[..., Any]]:
    """A factory for the entry's function, by its parameters."""
    return _with_causal_and_sinks if meaning.named else _without


def _with_causal_and_sinks(original: Any, site: Site) -> Callable[..., Any]:
    run = _runner(original, site, silent=False)

    def flash(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        tensors = query, key, value, attention_mask
        output = run(module, *tensors, dropout, scaling, sliding_window, softcap, is_causal, s_aux, kwargs)
        if output is not None:
            return output, None
        kwargs.update(is_causal=is_causal, s_aux=s_aux)
        return original(module, *tensors, dropout, scaling, sliding_window, softcap, **kwargs)

    return flash


def _without(original: Any, site: Site) -> Callable[..., Any]:
    """Of transformers 4, which hands other keywords on as they are."""
    run = _runner(original, site, silent=True)

    def flash(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> Any:
        tensors = query, key, value, attention_mask
        rest = {name: given for name, given in kwargs.items() if name not in ("is_causal", "s_aux")}
        is_causal, s_aux = kwargs.get("is_causal"), kwargs.get("s_aux")
        output = run(module, *tensors, dropout, scaling, sliding_window, softcap, is_causal, s_aux, rest)
        if output is not None:
            return output, None
        return original(module, *tensors, dropout, scaling, sliding_window, softcap, **kwargs)

    return flash


def _runner(original: Any, site: Site, silent: bool) -> Callable[..., Tensor | None]:
    """What both signatures have in common.

    Args:
        silent: the original drops a soft cap on an NPU; otherwise it refuses it.

    Returns:
        A function that gives the output (B, S, N, Dv), contiguous, or None where the original is to be run: it computes
        what was asked for, or says that it does not.
    """
    settings = original.__globals__

    def run(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor | None,
        dropout: float,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        is_causal: bool | None,
        s_aux: Tensor | None,
        kwargs: Mapping[str, Any],
    ) -> Tensor | None:
        call = None
        reason = _refusal(query, softcap, kwargs)
        if query.device.type == "npu" and query.dim() == 4 and query.numel():
            target = settings.get("get_target_dtype", target_dtype)(query, module)
            tensors = query, key, value
            if target is not None:
                tensors = query.to(target), key.to(target), value.to(target)
            causal = is_causal if is_causal is not None else module.is_causal
            call = Call(*tensors, padding, causal, scale, window, bool(settings["_use_top_left_mask"]), softcap, s_aux)
            if reason is None:
                reason, output = _attend(call, dropout, kwargs, site)
                if reason is None:
                    return output  # type: ignore[no-any-return]
        assert reason is not None
        site.fallback(reason)
        if call is None or (padding is not None and padding.dim() != 2):
            return None
        if (softcap is not None and not silent) or not call.extras():
            return None
        return in_plain_pytorch(call, dropout, kwargs, reason)  # the original would drop them

    return run


def _refusal(query: Tensor, softcap: float | None, kwargs: Mapping[str, Any]) -> str | None:
    if query.device.type != "npu":
        return "not on an NPU"
    if softcap is not None:
        return "keyword softcap"
    for name, given in kwargs.items():
        if name not in HARMLESS and given is not None and given is not False:
            return f"keyword {name}"
    if query.dim() != 4 or not query.numel():
        return "query is not a 4-D tensor with elements"
    return None


def _attend(call: Call, dropout: float, kwargs: Mapping[str, Any], site: Site) -> tuple[str | None, Any]:
    """(reason, None) or (None, output of shape (B, S, N, Dv), contiguous)."""
    query, key, value, padding, causal, scale, _, top_left, _, s_aux = call
    sinks = None if s_aux is None else s_aux.reshape(-1).float()
    window = call.window if call.windowed() else None
    if padding is not None:
        if padding.dim() != 2:
            return "a mask that is not (B, S)", None
        seen = padding.shape[1]
        key, value = key[:, :, :seen], value[:, :, :seen]  # a static cache holds nothing behind
        mask = op.Mask.dense(hidden(padding, query.shape[2], causal, window))
        return fused(query, key, value, mask, scale, site, sinks, dropout)
    ends = document_ends(query, key, kwargs)
    if isinstance(ends, str):
        return ends, None
    if ends is not None:
        if window is not None and not causal:
            return "a window without causality", None
        try:
            mask = op.Mask.documents(ends[0], ends[1], causal=causal, window=window)
        except ValueError as error:
            return str(error), None
        return fused(query, key, value, mask, scale, site, sinks, dropout)
    if not causal:
        if window is not None:
            return "a window without causality", None
        mask = op.Mask.full()
    elif top_left and query.shape[2] != key.shape[2]:
        if window is not None:
            return "a window counted from the first key", None
        mask = op.Mask.full() if query.shape[2] == 1 else op.Mask.causal("upper_left")
    else:
        mask = op.Mask.causal() if window is None else op.Mask.band(window)
    return fused(query, key, value, mask, scale, site, sinks, dropout)
