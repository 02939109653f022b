"""Recognise transformers' flash attention function by what it hands on to the flash attention library."""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch

from .bracket import NotRecognised, no_random_draws, plain, quiet

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
    "is_causal",
    "s_aux",
)


def recognise_flash(function: object) -> None:
    """Check that `f(module, query, key, value, attention_mask, …)` turns (B, N, S, D) round and hands everything on.

    It is run with a stand-in for the inner function, since that needs a device and its library.

    Raises:
        NotRecognised: something is changed or dropped on the way.
    """
    original = plain(function)
    names = tuple(inspect.signature(original).parameters)
    if names[:-1] != _PARAMETERS:
        raise NotRecognised(f"takes ({', '.join(names)})")
    if _INNER not in original.__globals__ or "get_target_dtype" not in original.__globals__:
        raise NotRecognised("calls no known flash attention")
    taken: dict[str, Any] = {}

    def inner(query: Any, key: Any, value: Any, attention_mask: Any, **keywords: Any) -> Any:
        taken.update(keywords, query=query, key=key, value=value, attention_mask=attention_mask)
        return query * 2.0

    copy = types.FunctionType(
        original.__code__, {**original.__globals__, _INNER: inner}, original.__name__, original.__defaults__
    )
    with quiet(), no_random_draws():
        q, k, v = (torch.arange(48.0).reshape(2, 4, 3, 2) + n for n in range(3))
        padding = torch.ones(2, 3, dtype=torch.bool)
        for window, softcap, causal in ((None, None, None), (2, 5.0, False)):
            layer: Any = types.SimpleNamespace(
                config=types.SimpleNamespace(_attn_implementation="flash_attention_2"),
                is_causal=True,
                modules=lambda: [torch.nn.utils.skip_init(torch.nn.Linear, 1, 1)],
            )
            try:
                output, weights = copy(layer, q, k, v, padding, 0.1, 0.3, window, softcap, causal, cu_seq_lens_q=7)
            except Exception as error:
                raise NotRecognised(f"fails on a small input: {type(error).__name__}: {str(error)[:80]}") from None
            turned = all(torch.equal(taken[n], x.transpose(1, 2)) for n, x in (("query", q), ("key", k), ("value", v)))
            handed = {
                "query_length": 3,
                "is_causal": causal is None,
                "dropout": 0.1,
                "softmax_scale": 0.3,
                "sliding_window": window,
                "softcap": softcap,
                "s_aux": None,
                "cu_seq_lens_q": 7,
            }
            if not turned or taken["attention_mask"] is not padding:
                raise NotRecognised("hands on other tensors")
            if any(taken.get(name, "dropped") != value for name, value in handed.items()):
                raise NotRecognised("hands on other arguments")
            if weights is not None or not torch.equal(output, q.transpose(1, 2) * 2.0):
                raise NotRecognised("returns something else")
