"""Fused attention for training: ``npu_fusion_attention``, ``npu_fusion_attention_v3`` and their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import limits, rng
from . import flash, mask
from .base import Call, kernel

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
#: The statistics are stored this many times beside each other.
_REPEATS = 8

_ToBNSD = Callable[[Tensor, int], Tensor]
#: layout → (to [B, N, S, D] given the number of heads, back, dimension of the batch, dimension of the tokens)
_LAYOUTS: dict[str, tuple[_ToBNSD, Callable[[Tensor], Tensor]]] = {
    "BNSD": (lambda t, n: t, lambda t: t),
    "BSND": (lambda t, n: t.transpose(1, 2), lambda t: t.transpose(1, 2)),
    "BSH": (lambda t, n: t.unflatten(-1, (n, -1)).transpose(1, 2), lambda t: t.transpose(1, 2).flatten(2)),
    "SBH": (lambda t, n: t.unflatten(-1, (n, -1)).permute(1, 2, 0, 3), lambda t: t.permute(2, 0, 1, 3).flatten(2)),
    # All sequences as one batch entry; they are cut apart by their ends.
    "TND": (lambda t, n: t.transpose(0, 1)[None], lambda t: t[0].transpose(0, 1)),
}
_RANK = {"BNSD": 4, "BSND": 4, "BSH": 3, "SBH": 3, "TND": 3}


@dataclass
class _Request:
    """The arguments that forward and backward share, under one name."""

    call: Call
    query: Tensor
    key: Tensor
    value: Tensor
    head_num: int
    input_layout: str
    pse: Tensor | None
    atten_mask: Tensor | None
    scale: float
    keep_prob: float
    pre_tockens: int
    next_tockens: int
    inner_precise: int
    actual_seq_qlen: Sequence[int] | None
    actual_seq_kvlen: Sequence[int] | None
    sparse_mode: int
    softmax_layout: str
    sink: Tensor | None
    seed: int = 0
    offset: int = 0

    @property
    def layout(self) -> str:
        return self.input_layout.upper()


def _check(r: _Request) -> tuple[int, int]:
    """The documented limits that do not depend on the mask. Returns the number of key heads and the head size."""
    call, q, k, v = r.call, r.query, r.key, r.value
    call.require(q.dtype in _FLOATS, "query", f"dtype {q.dtype} is not supported")
    for name, t in (("key", k), ("value", v), ("pse", r.pse)):
        if t is not None:
            call.require(t.dtype == q.dtype, name, f"dtype {t.dtype} differs from that of query {q.dtype}")
    call.require(0.0 < r.keep_prob <= 1.0, "keep_prob", f"is the share that is kept, in (0, 1], is {r.keep_prob}")
    call.require(r.inner_precise in (0, 1, 2), "inner_precise", f"{r.inner_precise} is not documented")
    call.require(r.sparse_mode in mask.MODES, "sparse_mode", f"{r.sparse_mode} is not simulated")
    for name, t in (("query", q), ("key", k), ("value", v)):
        call.require(t.dim() == _RANK[r.layout], name, f"has {t.dim()} dimensions, {r.layout} has {_RANK[r.layout]}")
        call.require(t.numel() > 0, name, "empty tensors are not supported")
    if r.layout in ("BSH", "SBH"):
        call.require(r.head_num > 0 and q.shape[-1] % r.head_num == 0, "head_num", f"{r.head_num} does not divide H")
        head_dim = q.shape[-1] // r.head_num
        call.require(
            k.shape[-1] % head_dim == 0, "key", f"H {k.shape[-1]} is not a multiple of the head size {head_dim}"
        )
        heads, kv_heads = r.head_num, k.shape[-1] // head_dim
        call.require(v.shape[-1] % kv_heads == 0, "value", f"H {v.shape[-1]} is not a multiple of {kv_heads} heads")
        value_dim = v.shape[-1] // kv_heads
    else:
        at = 1 if r.layout in ("BNSD", "TND") else 2
        heads, kv_heads, head_dim, value_dim = q.shape[at], k.shape[at], q.shape[-1], v.shape[-1]
        call.require(heads == r.head_num, "head_num", f"is {r.head_num}, the query has {heads} heads")
        call.require(k.shape[-1] == head_dim, "key", f"head size {k.shape[-1]} differs from the query's {head_dim}")
        call.require(v.shape[at] == kv_heads, "value", f"has {v.shape[at]} heads, key has {kv_heads}")
    _check_sizes(r, heads, kv_heads, head_dim, value_dim)
    if r.sink is not None:
        call.require(
            call.soc.attention_sink, "sink", "the forward ignores it on this SoC, so the result would be wrong"
        )
        call.require(r.sink.dtype == torch.float32, "sink", f"must be float32, is {r.sink.dtype}")
        call.require(tuple(r.sink.shape) == (heads,), "sink", f"shape {list(r.sink.shape)} is not [{heads}]")
    return kv_heads, head_dim


def _check_sizes(r: _Request, heads: int, kv_heads: int, head_dim: int, value_dim: int) -> None:
    call = r.call
    most = limits.ATTENTION_HEAD_DIM
    call.require(1 <= head_dim <= most, "query", f"the head size must be 1 to {most}, is {head_dim}")
    call.require(
        1 <= value_dim <= head_dim, "value", f"its head size {value_dim} is larger than the query's {head_dim}"
    )
    most = limits.ATTENTION_HEADS
    call.require(1 <= heads <= most, "head_num", f"must be 1 to {most}, is {heads}")
    call.require(heads % kv_heads == 0, "key", f"{heads} query heads are not a multiple of {kv_heads} key heads")
    tokens = {"BNSD": 2, "BSND": 1, "BSH": 1, "SBH": 0, "TND": 0}[r.layout]
    k, v = r.key, r.value
    call.require(v.shape[tokens] == k.shape[tokens], "value", f"has {v.shape[tokens]} tokens, key {k.shape[tokens]}")
    for name, t in (("query", r.query), ("key", k)):
        most = limits.ATTENTION_TOKENS
        call.require(t.shape[tokens] <= most, name, f"has {t.shape[tokens]} tokens, at most {most} are allowed")
    if r.layout != "TND":
        batch = 1 if r.layout == "SBH" else 0
        for name, t in (("key", k), ("value", v)):
            call.require(
                t.shape[batch] == r.query.shape[batch], name, f"batch {t.shape[batch]}, query {r.query.shape[batch]}"
            )


def _check_pse(r: _Request, batch: int, heads: int, q_len: int, kv_len: int) -> None:
    if r.pse is None:
        return
    r.call.require(r.layout != "TND", "pse", "is not simulated for TND")
    shapes = [(batch, heads, q_len, kv_len), (batch, heads, 1, kv_len), (1, heads, q_len, kv_len)]
    shape = tuple(r.pse.shape)
    r.call.require(shape in shapes, "pse", f"shape {list(shape)} is not one of {[list(s) for s in shapes]}")


def _sequences(r: _Request) -> list[tuple[slice, slice]]:
    """The query tokens and key tokens of each sequence of a TND call."""
    ends = {}
    for name, given, tensor in (
        ("actual_seq_qlen", r.actual_seq_qlen, r.query),
        ("actual_seq_kvlen", r.actual_seq_kvlen, r.key),
    ):
        values = [int(x) for x in given] if given is not None else []
        r.call.require(bool(values), name, "TND needs the end of every sequence")
        r.call.require(values[0] != 0, name, f"starts with 0: it holds ends, not starts: {values[:4]}...")
        rising = all(a <= b for a, b in itertools.pairwise(values))
        r.call.require(rising, name, "the ends must not decrease")
        total = tensor.shape[0]
        r.call.require(values[-1] == total, name, f"the last end is {values[-1]}, the tensor has {total} tokens")
        most = limits.ATTENTION_TND_BATCH
        r.call.require(len(values) <= most, name, f"{len(values)} sequences, at most {most} are allowed")
        ends[name] = [slice(a, b) for a, b in itertools.pairwise([0, *values])]
    queries, keys = ends["actual_seq_qlen"], ends["actual_seq_kvlen"]
    r.call.require(len(queries) == len(keys), "actual_seq_kvlen", f"{len(keys)} sequences, query has {len(queries)}")
    return list(zip(queries, keys, strict=True))


def _attentions(r: _Request) -> list[tuple[slice, slice, flash.Attention]]:
    """The call as [B, N, S, D] problems: one, or one per sequence for TND."""
    kv_heads, _ = _check(r)
    r.call.require(r.softmax_layout in ("", "TND"), "softmax_layout", f"{r.softmax_layout!r} is not documented")
    if r.layout != "TND":
        for name, given in (("actual_seq_qlen", r.actual_seq_qlen), ("actual_seq_kvlen", r.actual_seq_kvlen)):
            r.call.require(not given, name, f"selects the varlen kernel, which is not simulated for {r.layout}")
        r.call.require(not r.softmax_layout, "softmax_layout", "is for TND only")
    to_bnsd = _LAYOUTS[r.layout][0]
    q, k, v = to_bnsd(r.query, r.head_num), to_bnsd(r.key, kv_heads), to_bnsd(r.value, kv_heads)
    whole = flash.Attention(q, k, v, r.scale, pse=r.pse, sink=r.sink)
    dropout = _dropout(r)
    batch, heads, q_len, kv_len = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    _check_pse(r, batch, heads, q_len, kv_len)
    if r.layout != "TND":
        hidden = mask.hidden(r.call, mask.Rule.of(r), (batch, heads, q_len, kv_len))
        auto = r.sparse_mode == 3 and hidden is not None and q_len > kv_len
        part = replace(whole, hidden=hidden, zero_hidden_rows=r.inner_precise == 2 or auto)
        return [(slice(None), slice(None), dropout(part))]
    sequences = _sequences(r)
    longest = tuple(max(s[i].stop - s[i].start for s in sequences) for i in (0, 1))
    parts = []
    for q_at, kv_at in sequences:
        lengths = q_at.stop - q_at.start, kv_at.stop - kv_at.start
        hidden = mask.hidden_tnd(r.call, mask.Rule.of(r), lengths, (longest[0], longest[1]))
        part = replace(whole, query=q[:, :, q_at], key=k[:, :, kv_at], value=v[:, :, kv_at], hidden=hidden)
        parts.append((q_at, kv_at, dropout(part)))
    return parts


def _dropout(r: _Request) -> Callable[[flash.Attention], flash.Attention]:
    """Gives each sequence in turn its share of the mask: a function of seed and offset, as on the device."""
    if r.keep_prob == 1.0:
        return lambda part: part
    generator = rng.stream(r.seed, r.offset)

    def give(part: flash.Attention) -> flash.Attention:
        shape = (*part.query.shape[:3], part.key.shape[2])
        kept = torch.rand(shape, generator=generator) < r.keep_prob
        return replace(part, kept=kept, keep_prob=r.keep_prob)

    return give


def _store_statistics(r: _Request, statistics: Tensor) -> Tensor:
    """[B, N, S, 1] as the operator stores it: repeated; for TND in [T, N, 8], by default in the order N, T."""
    repeated = statistics.expand(-1, -1, -1, _REPEATS)
    if r.layout != "TND":
        return repeated.contiguous()
    if r.softmax_layout == "TND":
        return repeated[0].transpose(0, 1).contiguous()
    heads, tokens = repeated.shape[1:3]
    return repeated[0].contiguous().view(tokens, heads, _REPEATS)


def _read_statistics(r: _Request, stored: Tensor) -> Tensor:
    if r.layout != "TND":
        return stored[..., :1]
    if r.softmax_layout == "TND":
        return stored.transpose(0, 1)[None][..., :1]
    tokens, heads = stored.shape[:2]
    return stored.contiguous().view(heads, tokens, _REPEATS)[None][..., :1]


def _forward(r: _Request) -> tuple[Tensor, Tensor, Tensor]:
    results = [flash.forward(part) for _, _, part in _attentions(r)]
    output, maximum, total = (torch.cat(parts, 2) for parts in zip(*results, strict=True))
    return _LAYOUTS[r.layout][1](output), _store_statistics(r, maximum), _store_statistics(r, total)


def _backward(r: _Request, dy: Tensor, saved: dict[str, Tensor | None]) -> tuple[Any, ...]:
    for name, t in saved.items():
        r.call.require(t is not None, name, "is needed: pass what the forward returned")
    to_bnsd, back = _LAYOUTS[r.layout]
    grad, output = to_bnsd(dy, r.head_num), to_bnsd(saved["attention_in"], r.head_num)  # type: ignore[arg-type]
    maximum = _read_statistics(r, saved["softmax_max"])  # type: ignore[arg-type]
    total = _read_statistics(r, saved["softmax_sum"])  # type: ignore[arg-type]
    parts = [
        flash.backward(part, grad[:, :, at], output[:, :, at], maximum[:, :, at], total[:, :, at])
        for at, _, part in _attentions(r)
    ]
    dq, dk, dv = (back(torch.cat([getattr(p, n) for p in parts], 2)) for n in ("query", "key", "value"))
    sinks = [p.sink for p in parts if p.sink is not None]
    return dq, dk, dv, parts[0].pse, torch.stack(sinks).sum(0) if sinks else None


_SHARED = [
    "query",
    "key",
    "value",
    "head_num",
    "input_layout",
    "pse",
    "atten_mask",
    "keep_prob",
    "pre_tockens",
    "next_tockens",
    "inner_precise",
    "actual_seq_qlen",
    "actual_seq_kvlen",
    "sparse_mode",
    "softmax_layout",
    "sink",
]
# Both steer on which stream a dropout mask is made, not what is in it.
_NO_EFFECT = ["gen_mask_parallel", "sync"]
_LENGTHS = ("actual_seq_qlen", "actual_seq_kvlen")


def _request(call: Call, scale: float, arguments: dict[str, Any], seed: Any, offset: Any) -> _Request:
    for name in _LENGTHS:
        value = arguments[name]
        if isinstance(value, Tensor):
            call.require(value.device.type == "cpu", name, "must be on the CPU")
            integer = value.dim() == 1 and not value.is_floating_point()
            call.require(integer, name, f"must be a 1-D integer tensor, is {value.dtype}{list(value.shape)}")
            arguments[name] = value.tolist()
    shared = {name: arguments[name] for name in _SHARED}
    return _Request(call, scale=scale, **shared, seed=int(seed), offset=int(offset))


@kernel("npu_fusion_attention", models=[*_SHARED, *_NO_EFFECT, "scale"])
def npu_fusion_attention(call: Call, scale: float, **arguments: Any) -> tuple[Any, ...]:
    """``softmax(scale * (q @ k^T + pse), hidden) @ v`` with saved row maximum and row sum."""
    # torch_npu draws seed and offset from the device's generator on the host, and hands them to the backward.
    out, maximum, total = _forward(_request(call, scale, arguments, *call.outputs[4:6]))
    return out, maximum, total, None, *call.outputs[4:]


@kernel("npu_fusion_attention_v3", models=[*_SHARED, *_NO_EFFECT, "scale"], cpu=_LENGTHS)
def npu_fusion_attention_v3(call: Call, scale: float, **arguments: Any) -> tuple[Any, ...]:
    """As the first version, with sequence ends and the random state as CPU tensors."""
    dropping = arguments["keep_prob"] != 1.0
    random = [x.clone() if dropping else torch.zeros(1, dtype=torch.int64) for x in call.outputs[4:6]]
    out, maximum, total = _forward(_request(call, scale, arguments, *random))
    return out, maximum, total, None, *random


_SAVED = ["softmax_max", "softmax_sum", "attention_in"]
# The random state of a dropout mask, and the empty third output.
_RANDOM = ["seed", "offset", "softmax_in"]


def _gradient(call: Call, dy: Tensor, scale_value: float, arguments: dict[str, Any]) -> tuple[Any, ...]:
    saved = {name: arguments[name] for name in _SAVED}
    seed, offset = (0 if arguments[name] is None else arguments[name] for name in ("seed", "offset"))
    return _backward(_request(call, scale_value, arguments, seed, offset), dy, saved)


@kernel("npu_fusion_attention_grad", models=[*_SHARED, *_NO_EFFECT, *_SAVED, *_RANDOM, "numels", "dy", "scale_value"])
def npu_fusion_attention_grad(call: Call, dy: Tensor, scale_value: float, **arguments: Any) -> tuple[Any, ...]:
    """``(dq, dk, dv, dpse, dsink)``, recomputed from the saved statistics and output."""
    return _gradient(call, dy, scale_value, arguments)


@kernel(
    "npu_fusion_attention_grad_v3",
    models=[*_SHARED, *_NO_EFFECT, *_SAVED, *_RANDOM, "dy", "scale_value"],
    cpu=(*_LENGTHS, "seed", "offset"),
)
def npu_fusion_attention_grad_v3(call: Call, dy: Tensor, scale_value: float, **arguments: Any) -> tuple[Any, ...]:
    """As the first version."""
    return _gradient(call, dy, scale_value, arguments)
