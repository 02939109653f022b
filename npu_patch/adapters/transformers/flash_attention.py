"""The `flash_attention_2` entry of transformers' attention registry.

On an NPU transformers itself drops the sliding window there, and makes the lists of packed sequences in every layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from ...discovery import NotRecognised
from ...discovery.flash import recognise_flash
from ...ops import attention as op
from ...ops.per_tensor import Derived
from ...registry import Target, Unrecognised
from ...sites import Site
from . import LIBRARY
from .fused import HARMLESS, fused

_OP = "attention"
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
_ENTRY = "flash_attention_2"
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The `flash_attention_2` entry, in the module that holds the registry."""
    registry = getattr(module, _REGISTRY, None)
    if registry is None or getattr(type(registry), "__module__", None) != module.__name__:
        return
    path = f"{_REGISTRY}[{_ENTRY}]"
    entry = getattr(type(registry), "_global_mapping", registry).get(_ENTRY)
    if entry is None:
        return
    try:
        recognise_flash(entry)
    except NotRecognised as error:
        yield Unrecognised(_OP, LIBRARY, module.__name__, path, str(error))
        return
    yield Target(_OP, LIBRARY, module.__name__, path, _adapter, "flash attention")


def _adapter(original: Any, site: Site) -> Callable[..., Any]:
    settings = original.__globals__

    def flash(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        call = None
        reason = _refusal(query, softcap, kwargs)
        if query.device.type == "npu" and query.dim() == 4 and query.numel():
            target = settings["get_target_dtype"](query, module)
            tensors = query, key, value
            if target is not None:
                tensors = query.to(target), key.to(target), value.to(target)
            causal = is_causal if is_causal is not None else module.is_causal
            call = _Call(
                *tensors, attention_mask, causal, scaling, sliding_window, bool(settings["_use_top_left_mask"])
            )
            if reason is None:
                reason, output = _attend(call, s_aux, dropout, kwargs, site)
                if reason is None:
                    return output, None
        assert reason is not None
        site.fallback(reason)
        if call is not None and call.windowed() and softcap is None and s_aux is None:
            return _with_window(call, dropout, kwargs, reason), None  # the original drops the window
        return original(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            is_causal=is_causal,
            s_aux=s_aux,
            **kwargs,
        )

    return flash


def _refusal(query: Tensor, softcap: float | None, kwargs: Mapping[str, Any]) -> str | None:
    if query.device.type != "npu":
        return "not on an NPU"
    if softcap is not None:
        return "keyword softcap"
    for name, given in kwargs.items():
        if name not in HARMLESS and given is not None and given is not False:
            return f"keyword {name}"
    if query.dim() != 4 or not query.numel():
        return "query is not a 4-D tensor with elements"
    return None


class _Call(NamedTuple):
    """What is asked for; tensors (B, N, S, D), padding (B, Skv), False where a token is padding."""

    query: Tensor
    key: Tensor
    value: Tensor
    padding: Tensor | None
    causal: bool
    scale: float | None
    window: int | None
    top_left: bool

    def windowed(self) -> bool:
        """Whether the window hides anything."""
        return self.window is not None and self.key.shape[2] > self.window


def _attend(
    call: _Call, s_aux: Tensor | None, dropout: float, kwargs: Mapping[str, Any], site: Site
) -> tuple[str | None, Any]:
    """(reason, None) or (None, output of shape (B, S, N, Dv), contiguous)."""
    query, key, value, padding, causal, scale, _, top_left = call
    sinks = None if s_aux is None else s_aux.reshape(-1).float()
    window = call.window if call.windowed() else None
    if padding is not None:
        if padding.dim() != 2:
            return "a mask that is not (B, S)", None
        seen = padding.shape[1]
        key, value = key[:, :, :seen], value[:, :, :seen]  # a static cache holds nothing behind
        mask = op.Mask.dense(_hidden(padding, query.shape[2], causal, window))
        return fused(query, key, value, mask, scale, site, sinks, dropout)
    ends = _document_ends(query, key, kwargs)
    if isinstance(ends, str):
        return ends, None
    if ends is not None:
        if window is not None and not causal:
            return "a window without causality", None
        try:
            mask = op.Mask.documents(ends[0], ends[1], causal=causal, window=window)
        except ValueError as error:
            return str(error), None
        return fused(query, key, value, mask, scale, site, sinks, dropout)
    if not causal:
        if window is not None:
            return "a window without causality", None
        mask = op.Mask.full()
    elif top_left and query.shape[2] != key.shape[2]:
        if window is not None:
            return "a window counted from the first key", None
        mask = op.Mask.full() if query.shape[2] == 1 else op.Mask.causal("upper_left")
    else:
        mask = op.Mask.causal() if window is None else op.Mask.band(window)
    return fused(query, key, value, mask, scale, site, sinks, dropout)


# ---- packed sequences ------------------------------------------------------------------------------------------------

_host_list: Derived[Any] = Derived(lambda tensor: tensor.tolist(), lambda _: torch.empty(0, device="cpu"))
"""A tensor's content: read from the device once for all layers."""


def _document_ends(query: Tensor, key: Tensor, kwargs: Mapping[str, Any]) -> Any:
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


def _hidden(padding: Tensor, q_len: int, causal: bool, window: int | None) -> Tensor:
    """(B, 1, Sq, Skv), True where the key is hidden: made once for all layers.

    Distances are counted in tokens that are no padding, as they are where padding is cut out first.  Queries are the
    last tokens; a query that is padding sees nothing, except that the one query of a decoding step is none.
    """
    made, question = _written(padding), (q_len, causal, window)
    hidden = made.get(question)
    if hidden is None:
        with torch.no_grad():
            hidden = made[question] = _write(padding.bool(), q_len, causal, window)
    return hidden


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
    hidden = ~seen
    return hidden.expand(-1, -1, q_len, -1)


@functools.lru_cache(maxsize=32)
def _all_real(batch: int, kv_len: int, device: torch.device) -> Tensor:
    return torch.ones(batch, kv_len, dtype=torch.bool, device=device)


def _with_window(call: _Call, dropout: float, kwargs: Mapping[str, Any], reason: str) -> Tensor:
    """The attention that was asked for, in plain PyTorch.

    Raises:
        ValueError: of packed sequences; neither the operator nor the original does that.
    """
    query, key, value, padding, causal, scale, window, _ = call
    if padding is None:
        ends = _document_ends(query, key, kwargs)
        if ends is not None:
            raise ValueError(
                f"flash_attention_2 on an NPU: a sliding window over packed sequences, where npu_patch cannot use the "
                f"fused operator ({reason}). Use attn_implementation='sdpa'"
            )
        padding = _all_real(query.shape[0], key.shape[2], query.device)
    seen = padding.shape[1]
    groups = query.shape[1] // key.shape[1]
    key, value = (x[:, :, :seen].repeat_interleave(groups, 1) for x in (key, value))
    mask = ~_hidden(padding, query.shape[2], causal, window)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)
    return output.transpose(1, 2).contiguous()
