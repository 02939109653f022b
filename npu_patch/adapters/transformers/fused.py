"""What the attention functions of transformers have in common: tensors (B, N, S, D) in, (B, S, N, Dv) out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops import attention as op
from ...ops.per_tensor import Derived
from ...sites import Site

# Keywords that models hand through to every attention function and that the sdpa one rightly ignores: what they say is
# in the mask already, or concerns other functions.  Any other keyword, unless None or False, is a reason.
HARMLESS = frozenset(
    (
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "deterministic",
        "labels",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "seq_idx",
        "sliding_window",
        "use_cache",
    )
)


def _first_of_one(mask: Tensor) -> Tensor:
    """One for all samples where they share it in memory."""
    return mask[:1] if mask.dim() == 4 and mask.stride(0) == 0 else mask


def _inverted(mask: Tensor) -> Tensor:
    """True where a key is hidden."""
    return torch.logical_not(_first_of_one(mask))


dense_of = Derived(lambda mask: op.Mask.dense(_inverted(mask)), lambda dense: dense.hidden)
"""A bool mask, True where a key is seen, for the operator: made once for all layers of a step."""
hidden_where_not_zero = Derived(lambda mask: op.Mask.dense(_first_of_one(mask) != 0), lambda dense: dense.hidden)
"""The same for a mask of 0 and the type's lowest number."""


def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: op.Mask,
    scale: float | None,
    site: Site,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    eager: bool | None = None,
) -> tuple[str | None, Any]:
    """(reason, None) or (None, output of shape (B, S, N, Dv), contiguous), for tensors (B, N, S, D) on an NPU.

    Args:
        eager: whether nothing compiles, where the caller has asked.
    """
    if mask.kind == "documents":
        return packed(query, key, value, mask, scale, site, sinks, dropout, eager)
    # Projections are (B, S, N, D) in memory, as the result must be; a decoding step reads a (B, N, S, D) cache.
    layout = "BNSD"
    if not query.is_contiguous() or not key.is_contiguous():
        layout = "BSND"
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    reason, output = op.attend(query, key, value, mask, layout, scale, dropout, sinks, eager)
    if reason is not None:
        return reason, None
    if eager:
        site.hits += 1
    else:
        site.hit()
    return None, (output if layout == "BSND" else output.transpose(1, 2)).contiguous()


def packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: op.Mask,
    scale: float | None,
    site: Site,
    sinks: Tensor | None,
    dropout: float,
    eager: bool | None,
) -> tuple[str | None, Any]:
    """The same for documents, which the operator takes as (T, N, D)."""
    batch, heads, length, _ = query.shape
    query = query.transpose(1, 2).flatten(0, 1)
    key, value = key.transpose(1, 2).flatten(0, 1), value.transpose(1, 2).flatten(0, 1)
    reason, output = op.attend(query, key, value, mask, "TND", scale, dropout, sinks, eager)
    if reason is not None:
        return reason, None
    if eager:
        site.hits += 1
    else:
        site.hit()
    return None, output.view(batch, length, heads, -1).contiguous()
