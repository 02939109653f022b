"""The kinds of rotary tables that torchtitan's models hold, and the cos and sin of full width in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


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


def _matrix_table(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """From a 2 x 2 matrix per pair of neighbours, (..., D / 2, 2, 2), whatever its entries, to (..., D).

    y0 = m00 x0 + m01 x1 and y1 = m10 x0 + m11 x1: cos holds m00, m11, sin holds -m01, m10.
    """
    m = matrices.resolve_neg()
    cos = torch.stack((m[..., 0, 0], m[..., 1, 1]), -1).flatten(-2)
    sin = torch.stack((m[..., 0, 1].neg(), m[..., 1, 0]), -1).flatten(-2)
    return cos, sin


FULL_WIDTH: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "interleave": _complex_table,
    "half": _cos_sin_table,
    "matrices": _matrix_table,
}
"""Kind of table → how it becomes full-width cos and sin."""

MODES: Mapping[str, str] = {"interleave": "interleave", "half": "half", "matrices": "interleave"}
"""Kind of table → rotary mode of the operator."""
