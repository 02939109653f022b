"""What a rotary class computes, found out by running it on small CPU inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...discovery.bracket import NotRecognised, quiet, same

__all__ = ["FULL_WIDTH", "NotRecognised", "recognise_forward", "recognise_rotation"]


def _complex_table(cache: Tensor) -> tuple[Tensor, Tensor]:
    """From e^(i θ), (..., D / 2) complex, to cos and sin with every entry twice, (..., D)."""
    parts = torch.view_as_real(cache.resolve_conj()).resolve_neg()
    cos, sin = (
        parts[..., i].unsqueeze(-1).expand(*cache.shape, 2).reshape(*cache.shape[:-1], 2 * cache.shape[-1])
        for i in (0, 1)
    )
    return cos, sin


def _cos_sin_table(cache: Tensor) -> tuple[Tensor, Tensor]:
    """From cos | sin side by side, (..., 2 D), to two tensors of their own."""
    halves = cache.resolve_neg().chunk(2, -1)
    cos, sin = (half.clone(memory_format=torch.contiguous_format) for half in halves)
    return cos, sin


FULL_WIDTH: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "interleave": _complex_table,
    "half": _cos_sin_table,
}
"""Rotary mode → how a module's cache becomes full-width cos and sin."""


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    if mode == "half":
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    return x * cos + turned * sin


def _expected(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    return _rotated(x.float(), cos, sin, mode).type_as(x)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_B, _L, _D = 2, 5, 8


def _inputs(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    query = torch.randn(_B, _L, 4, _D, generator=generator)
    key = torch.randn(_B, _L, 1, _D, generator=generator)
    query[0, 0], query[0, 1], query[1, 0] = 0.0, query[0, 1] * 1e-4, query[1, 0] * 1e4
    return query.to(dtype).requires_grad_(), key.to(dtype).requires_grad_()


def _agrees(call: Callable[[Tensor, Tensor], Any], cos: Tensor, sin: Tensor, mode: str, dtype: torch.dtype) -> bool:
    """Whether results and gradients of the call are those of a rotation by the tables."""
    generator = torch.Generator().manual_seed(7)
    pair = _inputs(generator, dtype)
    results = call(*pair)
    if not (isinstance(results, tuple) and len(results) == 2):
        return False
    for x, y in zip(pair, results, strict=True):
        if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
            return False
        wanted = _expected(x, cos, sin, mode)
        gradient = torch.randn(y.shape, generator=generator).to(dtype)
        ours = torch.autograd.grad(y, x, gradient)[0]
        theirs = torch.autograd.grad(wanted, x, gradient)[0]
        if not same(y, wanted) or not same(ours, theirs, loose=True):
            return False
    return True


def recognise_rotation(cls: Any) -> str:
    """The rotary mode of `cls.apply_rotary_emb(query, key, rope_cache)`.

    Raises:
        NotImplementedError: it is abstract.
        NotRecognised: it computes something else.
    """
    function = cls.apply_rotary_emb
    if list(inspect.signature(function).parameters) != ["query", "key", "rope_cache"]:
        raise NotRecognised("takes other arguments than query, key and a rotary cache")
    reason = "computes no known rotation"
    with quiet():
        generator = torch.Generator().manual_seed(3)
        for mode in FULL_WIDTH:
            width = _D if mode == "interleave" else 2 * _D
            raw = [torch.randn(batch, _L, 1, width, generator=generator) for batch in (1, _B)]
            caches = [torch.view_as_complex(c.unflatten(-1, (-1, 2))) for c in raw] if mode == "interleave" else raw
            try:
                if all(
                    _agrees(partial(function, rope_cache=cache), *FULL_WIDTH[mode](cache), mode, dtype)
                    for cache in caches
                    for dtype in _DTYPES
                ):
                    return mode
            except NotImplementedError as error:
                if not str(error):
                    raise
                reason = f"fails on a small input: NotImplementedError: {str(error)[:80]}"
            except Exception as error:
                reason = f"fails on a small input: {type(error).__name__}: {str(error)[:80]}"
    raise NotRecognised(reason)


def recognise_forward(cls: Any, mode: str) -> None:
    """Check that `cls.forward(query, key, positions)` rotates by the rows `positions` of `self.cache`.

    Raises:
        NotRecognised: it does something else.
    """
    if list(inspect.signature(cls.forward).parameters) != ["self", "query", "key", "positions"]:
        raise NotRecognised("takes other arguments than query, key and positions")
    try:
        with quiet():
            module = cls(cls.Config(dim=_D, max_seq_len=3 * _L, theta=50.0))
            cos, sin = FULL_WIDTH[mode](module.cache)
            generator = torch.Generator().manual_seed(5)
            rows = torch.randint(0, 3 * _L, (_B, _L), generator=generator)
            for positions in (None, rows, rows[:1], torch.arange(_L).expand(_B, _L)):
                index = torch.arange(_L).unsqueeze(0) if positions is None else positions
                tables = cos[index].unsqueeze(2), sin[index].unsqueeze(2)
                for dtype in _DTYPES:
                    if not _agrees(partial(module, positions=positions), *tables, mode, dtype):
                        raise NotRecognised("does not rotate by the rows of its cache that the positions name")
    except NotRecognised:
        raise
    except Exception as error:
        raise NotRecognised(f"fails on a small input: {type(error).__name__}: {str(error)[:80]}") from None
