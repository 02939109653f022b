"""One call of flash attention: packed sequences, padding and windows written out, and plain PyTorch for the rest."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from ...ops.per_tensor import Derived

_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class Call(NamedTuple):
    """What is asked for; tensors (B, N, S, D), padding (B, Skv), False where a token is padding."""

    query: Tensor
    key: Tensor
    value: Tensor
    padding: Tensor | None
    causal: bool
    scale: float | None
    window: int | None
    top_left: bool
    softcap: float | None
    s_aux: Tensor | None

    def windowed(self) -> bool:
        """Whether the window hides anything."""
        return self.window is not None and self.key.shape[2] > self.window

    def extras(self) -> str:
        """What of the call a plain flash attention does not compute."""
        given = {"a sliding window": self.windowed(), "a soft cap": self.softcap is not None}
        given["sinks"] = self.s_aux is not None
        return " and ".join(name for name, there in given.items() if there)


# ---- packed sequences ------------------------------------------------------------------------------------------------

_host_list: Derived[Any] = Derived(lambda tensor: tensor.tolist(), lambda _: torch.empty(0, device="cpu"))
"""A tensor's content: read from the device once for all layers."""


def document_ends(query: Tensor, key: Tensor, kwargs: Mapping[str, Any]) -> Any:
    """Ends of packed queries and keys, None without packed sequences, or the reason why they cannot be told."""
    if all(kwargs.get(name) is not None for name in _PACKED):
        if is_compiling():
            return "the ends of packed sequences are on the device while compiling"
        ends = []
        for name, tokens in (("cu_seq_lens_q", query), ("cu_seq_lens_k", key)):
            given = _host_list(kwargs[name])
            if given[:1] != [0] or given[-1] != tokens.shape[0] * tokens.shape[2]:
                return f"{name} does not cover the tokens"
            ends.append(tuple(given[1:]))
        return ends
    positions = kwargs.get("position_ids")
    if positions is None or query.shape[0] != 1 or positions.shape[-1] == 1:
        return None
    if is_compiling():
        return "position_ids are on the device while compiling"
    if positions.dim() != 2 or positions.shape[0] != 1:
        return "position_ids of another shape"
    (row,) = _host_list(positions)
    if row == list(range(min(row), min(row) + len(row))):
        return None
    starts = [i for i, position in enumerate(row) if position == 0]
    if starts[:1] != [0] or len(row) != query.shape[2] or len(row) != key.shape[2]:
        return "position_ids that start or end elsewhere"
    both = (*starts[1:], len(row))
    return both, both


# ---- padding and windows, written out --------------------------------------------------------------------------------

_written: Derived[dict[Any, Tensor]] = Derived(lambda padding: {}, lambda _: torch.empty(0, device="cpu"))


def hidden(padding: Tensor, q_len: int, causal: bool, window: int | None) -> Tensor:
    """(B, 1, Sq, Skv), True where the key is hidden: made once for all layers.

    Distances are counted in tokens that are no padding, as they are where padding is cut out first.  Queries are the
    last tokens; a query that is padding sees nothing, except that the one query of a decoding step is none.
    """
    made, question = _written(padding), (q_len, causal, window)
    written = made.get(question)
    if written is None:
        with torch.no_grad():
            written = made[question] = _write(padding.bool(), q_len, causal, window)
    return written


def _write(real: Tensor, q_len: int, causal: bool, window: int | None) -> Tensor:
    count = real.cumsum(-1)
    key_at = count[:, None, None, :]
    query_at = count[:, None, -q_len:, None]
    seen = real[:, None, None, :]
    if q_len > 1:
        seen = seen & real[:, None, -q_len:, None]
    if causal:
        seen = seen & (key_at <= query_at)
    if window is not None:
        seen = seen & (key_at > query_at - window)
        if not causal:
            seen = seen & (key_at < query_at + window)
    return (~seen).expand(-1, -1, q_len, -1)


@functools.lru_cache(maxsize=32)
def _all_real(batch: int, kv_len: int, device: torch.device) -> Tensor:
    return torch.ones(batch, kv_len, dtype=torch.bool, device=device)


def in_plain_pytorch(call: Call, dropout: float, kwargs: Mapping[str, Any], reason: str) -> Tensor:
    """The attention that was asked for, without a fused operator.

    Raises:
        ValueError: of packed sequences, or with a window counted from the first key; neither the operator nor the
            original does that.
    """
    query, key, value, padding, causal, scale, window, top_left, softcap, s_aux = call
    if padding is None:
        packed = document_ends(query, key, kwargs) is not None
        if packed or (top_left and causal and query.shape[2] != key.shape[2]):
            raise ValueError(
                f"flash_attention_2 on an NPU: {call.extras()} "
                f"{'over packed sequences' if packed else 'counted from the first key'}, where npu_patch cannot use "
                f"the fused operator ({reason}). Use attn_implementation='sdpa' or 'eager'"
            )
        padding = _all_real(query.shape[0], key.shape[2], query.device)
    seen = padding.shape[1]
    groups = query.shape[1] // key.shape[1]
    key, value = (x[:, :, :seen].repeat_interleave(groups, 1) for x in (key, value))
    unseen = hidden(padding, query.shape[2], causal, window if call.windowed() else None)
    if softcap is None and s_aux is None:
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=~unseen, dropout_p=dropout, scale=scale)
        return output.transpose(1, 2).contiguous()
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.float()
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(unseen, torch.finfo(torch.float32).min)
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).float().expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., :seen].masked_fill(unseen, 0.0).to(value.dtype)
    return (F.dropout(weights, dropout) @ value).transpose(1, 2).contiguous()
