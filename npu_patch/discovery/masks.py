"""Recognise transformers' functions that write a mask out, by what they return on a small CPU input."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from .bracket import no_random_draws, plain, quiet

_NAMES = ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "attention_mask")


def recognise_builder(function: object, additive: bool) -> bool:
    """Whether `f(batch_size=, q_length=, …, mask_function=, attention_mask=)` writes out that function and the padding.

    The result is (B, 1, Sq, Skv), bool and True where the key is seen, or with `additive` 0 there and the type's lowest
    number elsewhere.  Indices start at the offsets; padding is (B, Skv + kv_offset), False where a key is hidden.
    """
    try:
        original = plain(function)
        if not {*_NAMES, "use_vmap"} <= set(inspect.signature(original).parameters):
            return False
        with quiet(), no_random_draws():
            return all(
                _right(original, additive, *case)
                for case in ((3, 5, 0, 0, False), (5, 5, 0, 0, True), (2, 6, 4, 0, True), (3, 4, 6, 5, True))
            ) and (additive or _skips_without_padding(original))
    except Exception:  # foreign code was run
        return False


def _odd(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query * 3 + key * 5 + batch) % 4 != 0


def _right(original: Any, additive: bool, q_len: int, kv_len: int, q_offset: int, kv_offset: int, padded: bool) -> bool:
    b = torch.arange(2).reshape(2, 1, 1, 1)
    query, key = torch.arange(q_len).reshape(1, 1, -1, 1) + q_offset, torch.arange(kv_len).reshape(1, 1, 1, -1)
    wanted = _odd(b, 0, query, key + kv_offset)
    padding = None
    if padded:
        padding = torch.ones(2, kv_len + kv_offset, dtype=torch.bool)
        padding[1, kv_offset : kv_offset + 2] = False
        wanted = wanted & padding[:, kv_offset:].reshape(2, 1, 1, -1)
    result = original(
        batch_size=2,
        q_length=q_len,
        kv_length=kv_len,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=_odd,
        attention_mask=padding,
        allow_is_causal_skip=False,
        dtype=torch.float32,
        device="cpu",
    )
    if additive:
        wanted = torch.zeros(wanted.shape).masked_fill(~wanted, torch.finfo(torch.float32).min)
    return isinstance(result, torch.Tensor) and result.dtype is wanted.dtype and torch.equal(result, wanted)


def _skips_without_padding(original: Any) -> bool:
    """Whether a causal mask is left out exactly where the padding hides nothing."""

    def built(padding: torch.Tensor) -> Any:
        return original(batch_size=2, q_length=4, kv_length=4, attention_mask=padding, device="cpu")

    padding = torch.ones(2, 4, dtype=torch.bool)
    if built(padding) is not None:
        return False
    for hidden in range(4):
        padding[:] = True
        padding[1, hidden] = False
        if built(padding) is None:
            return False
    return True
