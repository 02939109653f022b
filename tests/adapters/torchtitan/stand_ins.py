"""What stands in for parts of torchtitan that have no code for this device: the same formulas, written out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def documents_seen(q_ends: Tensor, k_ends: Tensor, window: tuple[int, int]) -> Tensor:
    """(Tq, Tk) bool, True where the query sees the key, for cumulative lengths with a leading zero."""
    queries, keys = torch.arange(int(q_ends[-1])), torch.arange(int(k_ends[-1]))
    q_ends, k_ends = q_ends.cpu().long(), k_ends.cpu().long()
    q_document, k_document = (torch.bucketize(x, e[1:], right=True) for x, e in ((queries, q_ends), (keys, k_ends)))
    # Distances count from the ends of the two documents.
    q_left, k_left = q_ends[q_document + 1] - queries, k_ends[k_document + 1] - keys
    distance = k_left[None] - q_left[:, None]  # how far the key lies before the query
    seen = q_document[:, None] == k_document[None]
    if window[0] >= 0:
        seen &= distance <= window[0]
    if window[1] >= 0:
        seen &= -distance <= window[1]
    return seen


class _Flash(torch.autograd.Function):
    """As flash attention kernels compute: what goes into a product is rounded to the type of the inputs first, the
    softmax is not, and the backward starts from the rounded output."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        scores = (q.float() @ k.float().transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)
        lse = scores.logsumexp(-1)
        weights = scores.softmax(-1).nan_to_num()
        out = (weights.to(q.dtype).float() @ v.float()).to(q.dtype)
        ctx.save_for_backward(q, k, v, weights, out)
        ctx.scale = scale
        return out, lse

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights, out = ctx.saved_tensors
        g = dy.float()
        rows = (g * out.float()).sum(-1, keepdim=True) - dlse.unsqueeze(-1)
        d_scores = (weights * (g @ v.float().transpose(-1, -2) - rows) * ctx.scale).to(q.dtype).float()
        dv = weights.to(q.dtype).float().transpose(-1, -2) @ g
        dq, dk = d_scores @ k.float(), d_scores.transpose(-1, -2) @ q.float()
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """(…, N, L, H) tensors; output in their type, and log-sum-exp; half types are rounded as in flash attention."""
    group = query.shape[-3] // key.shape[-3]
    key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
    scale, seen = query.shape[-1] ** -0.5 if scale is None else scale, seen.to(query.device)
    if query.dtype in (torch.bfloat16, torch.float16):
        pair: tuple[Tensor, Tensor] = _Flash.apply(query, key, value, seen, scale)
        return pair
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ value, scores.logsumexp(-1)


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    return_aux: Any = None,
    **kwargs: Any,
) -> Any:
    """`torch.nn.attention.varlen.varlen_attn`."""
    seen = documents_seen(cu_seq_q, cu_seq_k, window_size)
    out, lse = attend(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), seen, scale)
    out = out.transpose(0, 1).contiguous()
    return (out, lse) if return_aux is not None else out


@contextlib.contextmanager
def written_out() -> Iterator[None]:
    """Inside: the attentions of torchtitan over packed documents run here, all else of them being their own."""
    import torchtitan.models

    try:
        from torchtitan.models.common import attention

        owner, name = attention, "varlen_attn"
    except ImportError:
        from torchtitan.models import attention as previous

        owner, name = previous.VarlenAttentionWrapper, "_compiled_varlen_attn"
    genuine = vars(owner)[name]
    setattr(owner, name, varlen_attn if owner.__class__ is type(torchtitan.models) else staticmethod(varlen_attn))
    try:
        yield
    finally:
        setattr(owner, name, genuine)
