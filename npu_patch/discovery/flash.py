"""Recognise transformers' flash attention function by what it hands on to the flash attention library."""

from __future__ import annotations

import inspect
import types
from dataclasses import dataclass
from typing import Any

import torch

from .bracket import NotRecognised, foreign_code, no_random_draws, plain, quiet

_INNER = "_flash_attention_forward"
_PARAMETERS = (
    "module",
    "query",
    "key",
    "value",
    "attention_mask",
    "dropout",
    "scaling",
    "sliding_window",
    "softcap",
)
_LATER = ("is_causal", "s_aux")


@dataclass(frozen=True)
class FlashMeaning:
    """How `f(module, query, key, value, attention_mask, …)` is called.

    Args:
        named: is_causal and s_aux are parameters, and a soft cap is refused where the device's library lacks it;
            otherwise they come among the other keywords, and it is dropped.
    """

    named: bool


def target_dtype(query: torch.Tensor, module: Any) -> torch.dtype | None:
    """What float32 queries, keys and values are cast to where the function itself says it, line by line."""
    if query.dtype is not torch.float32:
        return None
    if torch.is_autocast_enabled():
        return torch.get_autocast_dtype("cuda")
    if hasattr(module.config, "_pre_quantization_dtype"):
        return module.config._pre_quantization_dtype  # type: ignore[no-any-return]
    return next(layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)).weight.dtype


@foreign_code()
def recognise_flash(function: object) -> FlashMeaning:
    """Check that `f(module, query, key, value, attention_mask, …)` turns (B, N, S, D) round and hands everything on.

    It is run with a stand-in for the inner function, since that needs a device and its library.

    Raises:
        NotRecognised: something is changed or dropped on the way.
    """
    original = plain(function)
    names = tuple(inspect.signature(original).parameters)[:-1]
    if names not in (_PARAMETERS, _PARAMETERS + _LATER):
        raise NotRecognised(f"takes ({', '.join(names)})")
    if _INNER not in original.__globals__:
        raise NotRecognised("calls no known flash attention")
    settings: dict[str, Any] = {}
    copy = types.FunctionType(
        original.__code__, {**original.__globals__, _INNER: _inner(settings)}, original.__name__, original.__defaults__
    )
    with quiet(), no_random_draws():
        for window, softcap, causal, quantized in ((None, None, None, False), (2, 5.0, False, True)):
            _compare(copy, settings, window, softcap, causal, quantized)
    return FlashMeaning(named=len(names) > len(_PARAMETERS))


def _inner(taken: dict[str, Any]) -> Any:
    def inner(query: Any, key: Any, value: Any, attention_mask: Any, **keywords: Any) -> Any:
        taken.clear()
        taken.update(keywords, query=query, key=key, value=value, attention_mask=attention_mask)
        return query * 2.0

    return inner


def _compare(
    copy: Any,
    taken: dict[str, Any],
    window: int | None,
    softcap: float | None,
    causal: bool | None,
    quantized: bool,
) -> None:
    q, k, v = (torch.arange(48.0).reshape(2, 4, 3, 2) + n for n in range(3))
    padding, sinks = torch.ones(2, 3, dtype=torch.bool), torch.arange(4.0)
    config = types.SimpleNamespace(_attn_implementation="flash_attention_2")
    if quantized:
        config._pre_quantization_dtype = config.dtype = torch.float16
        config._is_quantized = True
    linear = torch.nn.utils.skip_init(torch.nn.Linear, 1, 1, dtype=torch.bfloat16)
    layer: Any = types.SimpleNamespace(config=config, is_causal=True, modules=lambda: [linear])
    later = {"is_causal": causal, "s_aux": sinks, "cu_seq_lens_q": 7}
    try:
        output, weights = copy(layer, q, k, v, padding, 0.1, 0.3, window, softcap, **later)
    except Exception as error:
        raise NotRecognised(f"fails on a small input: {type(error).__name__}: {str(error)[:80]}") from None
    turned = all(torch.equal(taken[n], x.transpose(1, 2)) for n, x in (("query", q), ("key", k), ("value", v)))
    if not turned or taken["attention_mask"] is not padding or taken.get("s_aux") is not sinks:
        raise NotRecognised("hands on other tensors")
    own = copy.__globals__.get("get_target_dtype", target_dtype)
    if own(q, layer) is not taken["target_dtype"]:
        raise NotRecognised("casts to another type")
    handed = {
        "query_length": 3,
        "is_causal": causal is None,
        "dropout": 0.1,
        "softmax_scale": 0.3,
        "sliding_window": window,
        "softcap": softcap,
        "cu_seq_lens_q": 7,
        "target_dtype": torch.float16 if quantized else torch.bfloat16,
    }
    if any(taken.get(name, "dropped") != value for name, value in handed.items()):
        raise NotRecognised("hands on other arguments")
    if weights is not None or not torch.equal(output, q.transpose(1, 2) * 2.0):
        raise NotRecognised("returns something else")
