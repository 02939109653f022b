"""Which scores a fused attention call hides: ``atten_mask``, ``sparse_mode``, ``pre_tockens`` and ``next_tockens``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import limits
from .base import Call

ALL_FROM_MASK, FULL_MASK, LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, BAND = range(5)
#: The modes that are simulated. 5 to 8 (prefixes, outer cuts) are not.
MODES = range(5)
_COMPRESSED = limits.ATTENTION_COMPRESSED_MASK


@dataclass
class Rule:
    """The four arguments, as the caller gave them. ``atten_mask`` is True where a key is hidden."""

    atten_mask: Tensor | None
    sparse_mode: int
    pre_tockens: int
    next_tockens: int

    @classmethod
    def of(cls, request: Any) -> Rule:
        return cls(request.atten_mask, request.sparse_mode, request.pre_tockens, request.next_tockens)


def hidden(call: Call, rule: Rule, shape: tuple[int, int, int, int]) -> Tensor | None:
    """What is hidden in scores of ``shape`` [B, N, Sq, Skv], as something that broadcasts to it."""
    mask = rule.atten_mask
    if mask is None:  # documented: without a mask every mode computes full attention
        return None
    _check_dtype(call, mask)
    batch, heads, q_len, kv_len = shape
    if rule.sparse_mode >= LEFT_UP_CAUSAL:
        _check_compressed(call, mask, rule.sparse_mode)
        return _structured(rule, q_len, kv_len)
    allowed = [(batch, heads, q_len, kv_len), (batch, 1, q_len, kv_len), (1, 1, q_len, kv_len), (q_len, kv_len)]
    call.require(
        tuple(mask.shape) in allowed,
        "atten_mask",
        f"shape {list(mask.shape)} is not one of {[list(s) for s in allowed]}",
    )
    result = mask.bool()
    if rule.sparse_mode == ALL_FROM_MASK:
        _check_band(call, rule, result)
    return result


def hidden_tnd(call: Call, rule: Rule, lengths: tuple[int, int], longest: tuple[int, int]) -> Tensor | None:
    """What is hidden in one sequence of ``lengths`` (Sq, Skv); no row may be hidden fully."""
    q_len, kv_len = lengths
    mask = rule.atten_mask
    result = None
    if mask is not None:
        _check_dtype(call, mask)
        if rule.sparse_mode >= LEFT_UP_CAUSAL:
            _check_compressed(call, mask, rule.sparse_mode)
            if rule.sparse_mode == RIGHT_DOWN_CAUSAL:
                fits = q_len <= kv_len
                call.require(fits, "sparse_mode", f"3 with TND needs Sq <= Skv, a sequence has {q_len} and {kv_len}")
            result = _structured(rule, q_len, kv_len)
        else:
            shape = list(mask.shape)
            call.require(
                shape == list(longest), "atten_mask", f"shape {shape} is not [max Sq, max Skv] {list(longest)}"
            )
            result = mask[:q_len, :kv_len].bool()
            if rule.sparse_mode == ALL_FROM_MASK:
                _check_band(call, rule, result)
    empty = q_len > 0 and (kv_len == 0 or (result is not None and bool(result.all(-1).any())))
    call.require(not empty, "atten_mask", "a row of a TND sequence sees no key, which TND does not allow")
    return result


def _structured(rule: Rule, q_len: int, kv_len: int) -> Tensor:
    row, column = torch.arange(q_len)[:, None], torch.arange(kv_len)[None]
    if rule.sparse_mode == LEFT_UP_CAUSAL:
        return column > row
    diagonal = row + (kv_len - q_len)  # modes 3 and 4 are anchored at the bottom right corner
    if rule.sparse_mode == RIGHT_DOWN_CAUSAL:
        return column > diagonal
    return (column > diagonal + rule.next_tockens) | (column < diagonal - rule.pre_tockens)


def _check_dtype(call: Call, mask: Tensor) -> None:
    call.require(mask.dtype in (torch.bool, torch.uint8), "atten_mask", f"must be bool or uint8, is {mask.dtype}")


def _check_compressed(call: Call, mask: Tensor, mode: int) -> None:
    """The compressed modes read the upper triangle from the mask, so it must really be there."""
    size = _COMPRESSED
    call.require(
        tuple(mask.shape) == (size, size),
        "atten_mask",
        f"sparse_mode {mode} needs the compressed mask of shape [{size}, {size}], got {list(mask.shape)}",
    )
    same = torch.equal(mask.contiguous().view(torch.int64), _triangle())  # eight elements at a time
    call.require(
        same,
        "atten_mask",
        f"sparse_mode {mode} needs torch.triu(torch.ones({size}, {size}, dtype=torch.bool), diagonal=1), got another",
    )


def _check_band(call: Call, rule: Rule, mask: Tensor) -> None:
    """In mode 0 the device skips what lies outside the band of pre_tockens and next_tockens, from the top left."""
    q_len, kv_len = mask.shape[-2:]
    if rule.pre_tockens >= q_len and rule.next_tockens >= kv_len:
        return
    row, column = torch.arange(q_len)[:, None], torch.arange(kv_len)[None]
    outside = (column > row + rule.next_tockens) | (column < row - rule.pre_tockens)
    contradiction = bool((outside & ~mask).any())
    call.require(
        not contradiction,
        "atten_mask",
        f"shows keys outside the band of pre_tockens={rule.pre_tockens} and next_tockens={rule.next_tockens}",
    )


@lru_cache(maxsize=1)
def _triangle() -> Tensor:
    return torch.triu(torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.uint8), diagonal=1).view(torch.int64)
