"""Attention of transformers through its registry entries and eager functions, against float64 mathematics.

Masks come from transformers' own builders, so that what is remembered of them is tested too.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import npu_patch

from ...support.numerics import relative_error
from .call import create_mask, without_sdpa

HEAD = 16
BATCH = 2
TABLE = 500


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Args:
        entry: "sdpa", "eager", "eager with sinks", "flash" or "flash with sinks".
        mask: "none", "built", "padded left", "padded right", "all seen", "packed", "bool", "bool of heads" or "soft".
        causal: by the mask, or for "none" by the keyword.
        window: how many keys a query sees; None without a window.
        ahead: how many keys lie before the queries, in a cache.
        cache: keys lie (B, N, S, D) in memory.
    """

    entry: str
    mask: str
    causal: bool
    window: int | None
    q_len: int
    ahead: int
    kv_heads: int
    groups: int
    value_head: int
    cache: bool
    dtype: torch.dtype
    seed: int

    @property
    def kv_len(self) -> int:
        return self.q_len + self.ahead


MASKS = {
    "sdpa": ("none", "built", "padded left", "padded right", "all seen", "packed", "bool", "bool of heads", "soft"),
    "eager": ("none", "built", "padded left", "padded right", "all seen", "packed", "soft"),
    "flash": ("none", "padded left", "padded right", "packed"),
}


@st.composite
def cases(draw: Any) -> Case:
    entry = draw(st.sampled_from(["sdpa", "eager", "eager with sinks", "flash", "flash with sinks"]))
    kind = entry.split()[0]
    mask = draw(st.sampled_from(MASKS[kind]))
    windowed = mask not in ("none", "bool", "bool of heads", "soft") or kind == "flash"
    window = draw(st.one_of(st.none(), st.integers(1, 12))) if windowed else None
    causal = True if windowed and (window is not None or kind != "flash") else draw(st.booleans())
    if kind == "eager" and mask == "none":
        causal = False
    return Case(
        entry=entry,
        mask=mask,
        causal=causal,
        window=window,
        q_len=draw(st.integers(1, 10)),
        ahead=0 if mask == "packed" else draw(st.sampled_from([0, 0, 1, 5])),
        kv_heads=draw(st.sampled_from([1, 2])),
        groups=draw(st.sampled_from([1, 2, 4])),
        value_head=draw(st.sampled_from([HEAD, 8])),
        cache=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 1000)),
    )


class Cache:
    """As much of a cache as the mask builders ask for."""

    is_compileable, is_sliding = False, (False,)

    def __init__(self, case: Case) -> None:
        self.case = case

    def get_query_offset(self, layer: int) -> int:
        return self.case.ahead

    def get_mask_sizes(self, q_len: int, layer: int) -> tuple[int, int]:
        return self.case.kv_len, 0


def tensors(case: Case) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(case.seed)

    def make(heads: int, length: int, size: int, cache: bool) -> torch.Tensor:
        shape = (BATCH, heads, length, size) if cache else (BATCH, length, heads, size)
        x = torch.randn(shape, generator=generator).to(case.dtype).to("npu")
        return (x if cache else x.transpose(1, 2)).requires_grad_()

    return (
        make(case.kv_heads * case.groups, case.q_len, HEAD, False),
        make(case.kv_heads, case.kv_len, HEAD, case.cache),
        make(case.kv_heads, case.kv_len, case.value_head, case.cache),
    )


def padding_of(case: Case) -> torch.Tensor | None:
    if case.mask not in ("padded left", "padded right", "all seen"):
        return None
    padding = torch.ones(BATCH, case.kv_len, dtype=torch.long)
    count = min(3, case.kv_len - 1)
    if case.mask == "padded left":
        padding[1, :count] = 0
    elif case.mask == "padded right" and count:
        padding[0, -count:] = 0
    return padding


def positions_of(case: Case) -> torch.Tensor:
    """Packed sequences: of (q_len - n, n) tokens, another n in each sample."""
    cuts = (case.q_len // 2, max(case.q_len // 3, 0))
    return torch.stack([torch.cat((torch.arange(cut), torch.arange(case.q_len - cut))) for cut in cuts])


def given_mask(case: Case) -> torch.Tensor | None:
    """What the attention function of the entry gets, made by transformers where it makes it."""
    from transformers import masking_utils

    generator = torch.Generator().manual_seed(case.seed + 1)
    shape = (BATCH, 1, case.q_len, case.kv_len)
    if case.mask == "none":
        return None
    if case.mask.startswith("bool"):
        heads = case.kv_heads * case.groups if case.mask == "bool of heads" else 1
        mask = torch.rand((BATCH, heads, *shape[2:]), generator=generator) > 0.4
        mask[..., 0] = True
        return (mask & causal_of(case) if case.causal else mask).to("npu")
    if case.mask == "soft":
        bias = torch.randn(shape, generator=generator) * 2.0
        if case.causal:
            bias = bias.masked_fill(~causal_of(case), torch.finfo(case.dtype).min)
        return bias.to(case.dtype).clamp(min=torch.finfo(case.dtype).min).to("npu")
    implementation = {"sdpa": "sdpa", "eager": "eager", "flash": "flash_attention_2"}[case.entry.split()[0]]
    padding = padding_of(case)
    if implementation == "flash_attention_2":
        return None if padding is None else padding.bool().to("npu")
    embeddings = torch.empty(BATCH, case.q_len, 4, dtype=case.dtype, device="npu")
    build = masking_utils.create_sliding_window_causal_mask if case.window else masking_utils.create_causal_mask
    config = types.SimpleNamespace(_attn_implementation=implementation, sliding_window=case.window, is_causal=True)
    padding = None if padding is None else padding.to("npu")
    cache = Cache(case) if case.ahead else None
    positions = positions_of(case).to("npu") if case.mask == "packed" else None
    if padding is not None and case.window:  # models make the full mask, too, which tells whether anything is padded
        create_mask(masking_utils.create_causal_mask, config, embeddings, padding, cache, positions)
    return create_mask(build, config, embeddings, padding, cache, positions)


def causal_of(case: Case) -> torch.Tensor:
    return torch.ones(case.q_len, case.kv_len, dtype=torch.bool).tril(case.ahead)


def seen_by(case: Case, mask: torch.Tensor | None) -> torch.Tensor:
    """(B, N, Sq, Skv) or what broadcasts to it: the mathematics, without the masks that transformers built."""
    query, key = torch.arange(case.q_len)[:, None] + case.ahead, torch.arange(case.kv_len)[None]
    if case.mask.startswith("bool"):
        assert mask is not None
        return mask.cpu()
    if case.mask == "soft":
        return torch.ones(case.q_len, case.kv_len, dtype=torch.bool)
    if case.mask == "none" and case.entry == "sdpa":
        # Without a mask keys behind the queries are those of a static cache, which is filled from the left.
        return key <= query - case.ahead if case.causal and case.q_len > 1 else key >= 0
    padding = padding_of(case)
    if case.entry.startswith("flash") and padding is not None:
        return cut_out(case, padding.bool())
    seen = key <= query if case.causal else key >= 0
    if case.window is not None:
        seen = seen & (key > query - case.window)
    seen = seen.expand(BATCH, 1, -1, -1)
    if padding is not None:
        seen = seen & padding.bool()[:, None, None, :]
    if case.mask == "packed":
        document = (positions_of(case) == 0).cumsum(-1)
        if case.entry.startswith("flash"):
            document = document[:1].expand(BATCH, -1) + torch.arange(BATCH)[:, None] * 100
        seen = seen & (document[:, None, :, None] == document[:, None, None, :])
    return seen


def cut_out(case: Case, real: torch.Tensor) -> torch.Tensor:
    """Padding is cut out of every sample, and what is left counted from its end; one query alone is no padding."""
    seen = torch.zeros(BATCH, 1, case.q_len, case.kv_len, dtype=torch.bool)
    for b in range(BATCH):
        keys = [j for j in range(case.kv_len) if real[b, j]]
        queries = [i for i in range(case.q_len) if case.q_len == 1 or real[b, i + case.ahead]]
        for r, i in enumerate(queries):
            at = r + len(keys) - len(queries)
            for c, j in enumerate(keys):
                hidden = (case.causal and c > at) or (case.window is not None and c <= at - case.window)
                seen[b, 0, i, j] = not hidden
    return seen


def formula(case: Case, q: Any, k: Any, v: Any, seen: torch.Tensor, bias: Any, sinks: Any) -> torch.Tensor:
    k, v = k.repeat_interleave(case.groups, 1), v.repeat_interleave(case.groups, 1)
    scores = q @ k.transpose(-1, -2) * HEAD**-0.5
    if bias is not None:
        scores = scores + bias.cpu().double()
    if case.entry == "eager":  # added, so that a query that sees nothing has equal weights, and a gradient
        scores = scores + torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    else:
        scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)), -1)
    nothing = torch.isneginf(scores).all(-1, keepdim=True)
    weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    return (weights[..., : case.kv_len] @ v).transpose(1, 2)


@functools.cache
def eager_module() -> Any:
    """A model that the installed transformers runs without sdpa and without sinks."""
    return next(module for name in ("gemma2", "zamba") if (module := without_sdpa(name)) is not None)


def attend(case: Case, q: Any, k: Any, v: Any, mask: Any, sinks: Any) -> torch.Tensor:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.gpt_oss import modeling_gpt_oss

    layer = torch.nn.Linear(1, 1, dtype=case.dtype)
    layer.num_key_value_groups, layer.is_causal, layer.sinks = case.groups, True, sinks
    layer.config = types.SimpleNamespace(_attn_implementation="flash_attention_2")
    keywords: dict[str, Any] = {"scaling": HEAD**-0.5, "dropout": 0.0}
    if case.entry == "sdpa":
        keywords["is_causal"] = case.causal if mask is None else None
        function = ALL_ATTENTION_FUNCTIONS["sdpa"]
    elif case.entry == "eager":
        function = eager_module().eager_attention_forward
    elif case.entry == "eager with sinks":
        function, keywords["s_aux"] = modeling_gpt_oss.eager_attention_forward, sinks
    else:
        function = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
        keywords |= {"sliding_window": case.window, "s_aux": sinks, "is_causal": case.causal}
        if case.mask == "packed":
            row = positions_of(case)[0]
            starts = [int(i) for i in torch.nonzero(row == 0).flatten()]
            ends = [b * case.q_len + start for b in range(BATCH) for start in starts] + [BATCH * case.q_len]
            cumulative = torch.tensor(ends, dtype=torch.int32).to("npu")
            keywords |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), cumulative)
            keywords |= dict.fromkeys(("max_length_q", "max_length_k"), case.q_len)
    return function(layer, q, k, v, mask, **keywords)[0]


@pytest.fixture(scope="module")
def patched() -> Any:
    import transformers.modeling_utils  # noqa: F401
    from transformers.models.gpt_oss import modeling_gpt_oss  # noqa: F401

    eager_module()


ROWS: set[Case] = set()


@settings(max_examples=TABLE + 60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=cases())
def row(case: Case) -> None:
    ROWS.add(case)
    q, k, v = tensors(case)
    mask = given_mask(case)
    sinks = None
    if "sinks" in case.entry:
        sinks = torch.linspace(-1.0, 2.0, case.kv_heads * case.groups, dtype=case.dtype).to("npu").requires_grad_()
    output = attend(case, q, k, v, mask, sinks)
    inputs = [x for x in (q, k, v, sinks) if x is not None]
    exact = [x.detach().cpu().double().requires_grad_() for x in inputs]
    seen = seen_by(case, mask)
    bias = mask if case.mask == "soft" else None
    expected = formula(case, *exact[:3], seen, bias, exact[3] if sinks is not None else None)
    assert output.dtype is case.dtype
    assert output.is_contiguous()
    half = case.dtype is torch.bfloat16
    assert relative_error(output, expected) < (1e-2 if half else 3e-6)
    head = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(case.dtype)
    ours = torch.autograd.grad(output, inputs, head.to("npu"))
    theirs = torch.autograd.grad(expected, exact, head.double())
    for a, b in zip(ours, theirs, strict=True):
        gap = (a.cpu().double() - b).norm() / max(float(b.norm()), 1.0)  # one visible key: no gradient but rounding
        assert gap < (3e-2 if half else 1e-5)
    _check_later_tokens(case, q, k, v, mask, sinks, output)


def _check_later_tokens(case: Case, q: Any, k: Any, v: Any, mask: Any, sinks: Any, output: torch.Tensor) -> None:
    """A later token never changes an earlier output."""
    if not case.causal or case.q_len < 2 or (case.mask.startswith("padded") and case.entry == "eager"):
        return  # (a query without a visible key has the mean of all)
    with torch.no_grad():
        first = case.q_len // 2 + (0 if case.mask == "none" and case.entry == "sdpa" else case.ahead)
        later_k, later_v = k.clone(), v.clone()
        later_k[:, :, first + 1 :] += 3.0
        later_v[:, :, first + 1 :] -= 3.0
        again = attend(case, q, later_k, later_v, mask, sinks)
    assert torch.equal(again[:, : case.q_len // 2 + 1], output[:, : case.q_len // 2 + 1])


def test_the_table(patched):
    with npu_patch.scope("attention"):
        before = npu_patch.status()
        row()
        after = npu_patch.status()
    assert len(ROWS) >= TABLE
    fallen = {r: n - before.fallbacks("attention").get(r, 0) for r, n in after.fallbacks("attention").items()}
    assert not {r: n for r, n in fallen.items() if n}
    assert after.hits("attention") - before.hits("attention") >= TABLE
    for entry in ("sdpa", "eager", "eager with sinks", "flash", "flash with sinks"):
        kinds = {case.mask for case in ROWS if case.entry == entry}
        assert kinds == set(MASKS[entry.split()[0]])
    assert {case.window is None for case in ROWS} == {True, False}
