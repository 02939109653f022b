"""Recognise transformers' `sdpa` attention function by what it computes."""

from __future__ import annotations

import types
from typing import Any

import torch

from .bracket import NotRecognised, foreign_code, no_random_draws, plain, quiet


@foreign_code()
def recognise_sdpa(function: object) -> None:
    """Check `f(module, query, key, value, attention_mask, dropout, scaling, is_causal, …)` against the formula.

    Queries, keys and values are (B, N, S, D); the result is (B, S, N, D), and None.  A mask is bool, True where a key
    is seen.  Without one, and unless is_causal is false, query i sees keys up to i.

    Raises:
        NotRecognised: a case differs.
    """
    original = plain(function)
    with quiet(), no_random_draws():
        generator = torch.Generator().manual_seed(5)
        for heads, kv_heads, q_len, kv_len, causal, masked in (
            (2, 2, 5, 5, None, False),
            (4, 2, 5, 5, True, False),
            (4, 2, 5, 5, False, False),
            (4, 2, 3, 6, None, False),
            (4, 2, 1, 6, None, False),
            (4, 2, 5, 5, None, True),
        ):
            query = torch.randn(2, heads, q_len, 4, generator=generator)
            key, value = (torch.randn(2, kv_heads, kv_len, 4, generator=generator) for _ in range(2))
            mask = None
            if masked:
                mask = torch.rand(2, 1, q_len, kv_len, generator=generator) > 0.5
                mask[..., 0] = True
            module: Any = types.SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True)
            expected = _formula(query, key, value, mask, 0.3, causal is not False)
            try:
                output, weights = original(module, query, key, value, mask, 0.0, 0.3, causal)
            except Exception as error:
                raise NotRecognised(f"fails on a small input: {type(error).__name__}: {str(error)[:80]}") from None
            if weights is not None or output.shape != expected.shape:
                raise NotRecognised("returns something else than an attention's output")
            if not torch.allclose(output, expected, rtol=1e-5, atol=1e-5):
                raise NotRecognised("computes no scaled dot product attention")


def _formula(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * scale
    q_len, kv_len = scores.shape[-2:]
    if mask is None and causal and q_len > 1:
        mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)
