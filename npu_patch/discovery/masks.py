"""Recognise transformers' functions that write a mask out, by what they return on a small CPU input."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from .bracket import NotRecognised, foreign_code, no_random_draws, plain, quiet

_NAMES = {"batch_size", "kv_length", "kv_offset", "mask_function", "attention_mask"}


@dataclass(frozen=True)
class BuilderMeaning:
    """How a function is called that writes out `mask_function(sample, head, query, key)` and the padding.

    Args:
        positions: queries are given as `cache_position`, their indices in a tensor on the mask's device; otherwise as
            `q_length` and `q_offset`.
        by_element: the mask function gets one index at a time, under vmap; otherwise tensors that broadcast.
    """

    positions: bool
    by_element: bool


def recognise_builder(function: object, additive: bool) -> BuilderMeaning | None:
    """How `f(batch_size=, …, kv_length=, mask_function=, attention_mask=)` is called; None for other functions.

    The result is (B, 1, Sq, Skv), bool and True where the key is seen, or with `additive` 0 there and the type's lowest
    number elsewhere.  Indices start at the offsets; padding is (B, Skv + kv_offset), False where a key is hidden.
    """
    try:
        with foreign_code():
            original = plain(function)
            names = set(inspect.signature(original).parameters)
            positions = "cache_position" in names
            if not (_NAMES | ({"cache_position"} if positions else {"q_length", "q_offset"})) <= names:
                return None
            with quiet(), no_random_draws():
                how = [
                    _form(original, additive, positions, *case)
                    for case in ((3, 5, 0, 0, False), (5, 5, 0, 0, True), (2, 6, 4, 0, True), (3, 4, 6, 5, True))
                ]
                if None in how or len(set(how)) > 1 or not (additive or _skips_without_padding(original, positions)):
                    return None
            return how[0]
    except NotRecognised:
        return None


def looks_at_packed(function: FunctionType) -> bool | None:
    """Whether `f(position_ids)` gives None where nothing is packed, for which it has to wait for the device.

    None for a function that does something else than number the packed sequences of each sample.
    """
    try:
        with foreign_code():
            if list(inspect.signature(function).parameters) != ["position_ids"]:
                return None
            with quiet(), no_random_draws():
                numbers = plain(function)(torch.tensor([[0, 1, 2, 0, 1], [3, 4, 5, 6, 7]]))
                if not torch.equal(numbers, torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])):
                    return None
                unpacked = plain(function)(torch.arange(4).expand(2, -1))
                if unpacked is not None and unpacked.any():
                    return None
            return unpacked is None
    except NotRecognised:
        return None


def _odd(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query * 3 + key * 5 + batch) % 4 != 0


def _form(
    original: Any, additive: bool, positions: bool, q_len: int, kv_len: int, q_offset: int, kv_offset: int, padded: bool
) -> BuilderMeaning | None:
    """How it is called if it is right for these sizes."""
    b = torch.arange(2).reshape(2, 1, 1, 1)
    query, key = torch.arange(q_len).reshape(1, 1, -1, 1) + q_offset, torch.arange(kv_len).reshape(1, 1, 1, -1)
    wanted = _odd(b, 0, query, key + kv_offset)
    padding = None
    if padded:
        padding = torch.ones(2, kv_len + kv_offset, dtype=torch.bool)
        padding[1, kv_offset : kv_offset + 2] = False
        wanted = wanted & padding[:, kv_offset:].reshape(2, 1, 1, -1)
    ranks: set[int] = set()

    def shown(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        ranks.update((query.dim(), key.dim()))
        return _odd(batch, head, query, key)  # type: ignore[no-any-return]

    result = original(
        batch_size=2,
        kv_length=kv_len,
        kv_offset=kv_offset,
        mask_function=shown,
        attention_mask=padding,
        allow_is_causal_skip=False,
        dtype=torch.float32,
        **_queries(positions, q_len, q_offset),
    )
    if additive:
        wanted = torch.zeros(wanted.shape).masked_fill(~wanted, torch.finfo(torch.float32).min)
    if not isinstance(result, Tensor) or result.dtype is not wanted.dtype or not torch.equal(result, wanted):
        return None
    return BuilderMeaning(positions, by_element=ranks == {0})


def _queries(positions: bool, q_len: int, q_offset: int) -> dict[str, Any]:
    if positions:
        return {"cache_position": torch.arange(q_len) + q_offset}
    return {"q_length": q_len, "q_offset": q_offset, "device": "cpu"}


def _skips_without_padding(original: Any, positions: bool) -> bool:
    """Whether a causal mask is left out exactly where the padding hides nothing."""

    def built(padding: Tensor) -> Any:
        return original(batch_size=2, kv_length=4, attention_mask=padding, **_queries(positions, 4, 0))

    padding = torch.ones(2, 4, dtype=torch.bool)
    if built(padding) is not None:
        return False
    for hidden in range(4):
        padding[:] = True
        padding[1, hidden] = False
        if built(padding) is None:
            return False
    return True
