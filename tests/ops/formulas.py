"""What the fused ops compute, in plain PyTorch: the reference in float64, the originals in other dtypes."""

from __future__ import annotations

import torch
from torch import Tensor


def llama_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rounds the normalised input before it multiplies."""
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def gemma_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Multiplies by 1 + weight in float32 and rounds once."""
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + weight.to(wide.dtype))).to(x.dtype)


def rotated(x: Tensor, mode: str) -> Tensor:
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def rope(x: Tensor, cos: Tensor, sin: Tensor, mode: str = "half") -> Tensor:
    return x * cos + rotated(x, mode) * sin


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(B, N, S, D) in; output and log-sum-exp; a query that sees nothing gets zeros."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)), -1)
    nothing = torch.isneginf(scores).all(-1, keepdim=True)
    weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    return weights[..., : key.shape[-2]] @ value, scores.logsumexp(-1)


def hidden_of(kind: str, q_len: int, kv_len: int, window: int = 0) -> Tensor | None:
    """True where a key is hidden."""
    row, column = torch.arange(q_len)[:, None], torch.arange(kv_len)[None]
    last = row + kv_len - q_len
    if kind == "full":
        return None
    if kind == "upper_left":
        return column > row
    if kind == "lower_right":
        return column > last
    assert kind == "band"
    return (column > last) | (column <= last - window)
