"""Single calls of the patched `sdpa` entry: masks, layouts, dtypes, keywords, and when the original runs."""

from __future__ import annotations

import gc
import inspect
import types
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward as ORIGINAL

import npu_patch
import npu_patch.simulator
from npu_patch import functions
from npu_patch.adapters.transformers import attention, masks
from npu_patch.discovery import NotRecognised
from npu_patch.ops.masks import Mask
from npu_patch.ops.per_tensor import Derived
from npu_patch.sites import Site

from ...support.numerics import relative_error

HAS_POSITION_BIAS = "position_bias" in inspect.signature(ORIGINAL).parameters


def patched() -> tuple[Any, Site]:
    site = Site("test:sdpa", "attention", {})
    return functions.clone(attention.adapter(ORIGINAL)(ORIGINAL, site), ORIGINAL), site


def qkv(batch=2, heads=4, kv_heads=2, q_len=6, kv_len=6, head=16, dtype=torch.float32, value_head=None, cache=False):
    generator = torch.Generator().manual_seed(4)

    def make(n, length, size):
        shape = (batch, n, length, size) if cache else (batch, length, n, size)
        x = torch.randn(shape, generator=generator).to(dtype).to("npu")
        return x if cache else x.transpose(1, 2)

    return make(heads, q_len, head), make(kv_heads, kv_len, head), make(kv_heads, kv_len, value_head or head)


def layer(groups=2, is_causal=True):
    return types.SimpleNamespace(num_key_value_groups=groups, is_causal=is_causal)


def formula(query, key, value, seen, scale, bias=None):
    """float64, on the CPU; a query that sees nothing gets zeros."""
    query, key, value = (x.detach().cpu().double() for x in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias.detach().cpu().double()
    if seen is not None:
        scores = scores.masked_fill(~seen.cpu(), -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ value).transpose(1, 2)


def outcome(function, *args, **kwargs):
    """The output on the CPU, or the type of the error: a simulated NPU refuses some of what the original asks for."""
    torch.manual_seed(0)
    try:
        return function(*args, **kwargs)[0].cpu()
    except (RuntimeError, ValueError) as error:
        return type(error)


def same(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a is b


def causal(q_len, kv_len):
    return torch.ones(q_len, kv_len, dtype=torch.bool).tril()


def random_mask(*shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(8)) > 0.4
    mask[..., 0] = True
    return mask


CASES = {
    "causal": ({}, None, causal(6, 6), {}),
    "full": ({}, None, None, {"is_causal": False}),
    "one query": ({"q_len": 1, "kv_len": 9}, None, None, {}),
    "one query over a cache": ({"q_len": 1, "kv_len": 9, "cache": True}, None, None, {}),
    "empty static cache": ({"q_len": 6, "kv_len": 11, "cache": True}, None, causal(6, 11), {}),
    "more queries than keys": ({"q_len": 9, "kv_len": 6}, None, causal(9, 6), {}),
    "mask shared by heads": ({}, random_mask(2, 1, 6, 6), ..., {}),
    "mask of each head": ({}, random_mask(2, 4, 6, 6), ..., {}),
    "mask of each head shared by the batch": ({}, random_mask(1, 4, 6, 6), ..., {}),
    "mask of one row": ({}, random_mask(2, 1, 1, 6), ..., {}),
    "mask over a cache": ({"q_len": 3, "kv_len": 11, "cache": True}, random_mask(2, 1, 3, 11), ..., {}),
    "two-dimensional mask": ({}, random_mask(6, 6), ..., {}),
    "mask beats is_causal": ({}, random_mask(2, 1, 6, 6), ..., {"is_causal": True}),
    "head size 256": ({"head": 256}, None, causal(6, 6), {}),
    "smaller value heads": ({"head": 24, "value_head": 16}, None, causal(6, 6), {}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_output_and_gradients_are_those_of_the_formula(name, scaling):
    sizes, mask, seen, keywords = CASES[name]
    seen = mask if seen is ... else seen
    query, key, value = (x.requires_grad_() for x in qkv(**sizes))
    function, site = patched()
    mask = None if mask is None else mask.to("npu")
    output, weights = function(layer(), query, key, value, mask, scaling=scaling, **keywords)
    assert weights is None
    assert output.is_contiguous()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    assert relative_error(output, formula(query, key, value, seen, scale)) < 2e-6
    assert (site.hits, site.fallbacks) == (1, {})
    head = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to("npu")
    ours = torch.autograd.grad(output, (query, key, value), head)
    if mask is not None:
        keywords = {}  # the mask says it all; transformers 4 refuses `is_causal` beside one
    theirs = torch.autograd.grad(
        ORIGINAL(layer(), query, key, value, mask, scaling=scaling, **keywords)[0], (query, key, value), head
    )
    for a, b in zip(ours, theirs, strict=True):
        assert relative_error(a, b) < 1e-5


def test_rows_that_see_nothing_give_zeros_and_finite_gradients():
    query, key, value = (x.requires_grad_() for x in qkv())
    mask = random_mask(2, 1, 6, 6)
    mask[0, :, :3] = False
    function, site = patched()
    output, _ = function(layer(), query, key, value, mask.to("npu"))
    assert relative_error(output, formula(query, key, value, mask, 0.25)) < 2e-6
    assert not output[0, :3].any()
    output.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (query, key, value))
    assert site.hits == 1


def test_future_tokens_do_not_change_the_output():
    query, key, value = qkv()
    function, _ = patched()
    before, _ = function(layer(), query, key, value, None)
    key[:, :, 4:] += 3.0
    value[:, :, 4:] -= 3.0
    after, _ = function(layer(), query, key, value, None)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])


@pytest.mark.parametrize(("head", "dtype"), [(16, torch.float32), (24, torch.float32), (16, torch.bfloat16)])
@pytest.mark.parametrize("soft", [True, False], ids=["soft", "hard"])
def test_an_additive_mask_is_added(head, dtype, soft):
    query, key, value = qkv(head=head, dtype=dtype)
    if soft:
        bias = (torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(6)) * 2).to(dtype)
    else:
        bias = torch.zeros(2, 1, 6, 6, dtype=dtype).masked_fill(~random_mask(2, 1, 6, 6), torch.finfo(dtype).min)
    function, site = patched()
    output, _ = function(layer(), query, key, value, bias.to("npu"))
    expected = formula(query, key, value, None, head**-0.5, bias)
    assert relative_error(output, expected) < (2e-6 if dtype is torch.float32 else 1e-2)
    assert (site.hits, site.fallbacks) == (1, {})


def test_an_additive_mask_that_the_operator_cannot_take_is_still_added():
    query, key, value = qkv(head=24, dtype=torch.bfloat16)  # 24 ** -0.5 is no power of two
    bias = torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(6)).bfloat16() * 2
    function, site = patched()
    output, _ = function(layer(), query, key, value, bias.to("npu"))
    assert relative_error(output, formula(query, key, value, None, 24**-0.5, bias)) < 1e-2
    assert site.hits == 0
    assert len(site.fallbacks) == 1
    stock, _ = ORIGINAL(layer(), query, key, value, bias.to("npu"))
    assert (
        relative_error(stock, formula(query, key, value, None, 24**-0.5, bias)) > 0.1
    )  # on an NPU it drops the values


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"dropout": 1.0}, "a dropout that is not between 0 and 1"),
        ({"s_aux": 1}, "keyword s_aux"),
        ({"something_new": 1}, "keyword something_new"),
        ({"output_attentions": True}, "keyword output_attentions"),
        ({"position_bias": True}, "position_bias" if HAS_POSITION_BIAS else "keyword position_bias"),
        ({"indices": 1}, "keyword indices"),
    ],
    ids=lambda x: str(x),
)
def test_what_the_operator_cannot_honour_runs_the_original(keywords, reason):
    query, key, value = qkv()
    if "position_bias" in keywords:
        keywords = {"position_bias": torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(2)).to("npu")}
    function, site = patched()
    args = layer(), query, key, value, None
    assert same(outcome(function, *args, **keywords), outcome(ORIGINAL, *args, **keywords))
    assert (site.hits, site.fallbacks) == (0, {reason: 1})


@pytest.mark.parametrize("masked", [False, True])
def test_dropout_drops_what_the_original_drops(masked):
    query, key, value = (x.requires_grad_() for x in qkv(q_len=16, kv_len=16))
    mask = random_mask(2, 1, 16, 16).to("npu") if masked else None
    function, site = patched()
    results = []
    for f in (function, ORIGINAL):
        torch.npu.manual_seed(3)
        output = f(layer(), query, key, value, mask, dropout=0.3)[0]
        results.append([output, *torch.autograd.grad(output.square().sum(), (query, key, value))])
    for ours, theirs in zip(*results, strict=True):
        assert relative_error(ours, theirs) < 1e-5
    assert relative_error(results[0][0], function(layer(), query, key, value, mask)[0]) > 0.1
    assert (site.hits, site.fallbacks) == (2, {})


def test_a_soft_cap_is_what_it_is_to_the_original():
    function, site = patched()
    args = layer(), *qkv(), None
    theirs = outcome(ORIGINAL, *args, softcap=30.0)
    assert same(outcome(function, *args, softcap=30.0), theirs)
    assert theirs is ValueError or not HAS_POSITION_BIAS  # transformers 4 goes on without it
    assert (site.hits, site.fallbacks) == (0, {"keyword softcap": 1})


def test_keywords_that_say_nothing_new_are_no_reason():
    function, site = patched()
    nothing = {"sliding_window": 4, "position_ids": torch.arange(6), "use_cache": True, "s_aux": None}
    function(layer(), *qkv(), None, output_attentions=False, softcap=None, **nothing)
    assert (site.hits, site.fallbacks) == (1, {})


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [({"heads": 4, "kv_heads": 4}, 2), ({"heads": 4, "kv_heads": 2}, 1), ({"heads": 4, "kv_heads": 1}, 2)],
)
def test_heads_that_do_not_fit_the_layers_groups_behave_as_the_original(sizes, groups):
    query, key, value = qkv(**sizes)
    function, site = patched()
    args = layer(groups), query, key, value, None
    assert same(outcome(function, *args), outcome(ORIGINAL, *args))
    assert (site.hits, len(site.fallbacks)) == (0, 1)


def test_a_batch_of_one_that_is_broadcast_runs_the_original():
    query, key, value = qkv(heads=2)
    function, site = patched()
    args = layer(1), query[:1], key, value, None
    assert same(outcome(function, *args), outcome(ORIGINAL, *args))
    assert (site.hits, len(site.fallbacks)) == (0, 1)


@pytest.mark.parametrize("flat", [(0,), (1,), (0, 1, 2)], ids=str)
def test_tensors_of_another_rank_behave_as_in_the_original(flat):
    function, site = patched()
    tensors = [x[0] if i in flat else x for i, x in enumerate(qkv(heads=2, kv_heads=2))]
    args = layer(1), *tensors, None
    if flat == (1,):
        for entry in (function, ORIGINAL):
            with pytest.raises((IndexError, ValueError)):
                entry(*args)
    else:
        assert same(outcome(function, *args), outcome(ORIGINAL, *args))
    assert site.fallbacks == {"query heads are not key heads times num_key_value_groups": 1}


def test_an_entry_with_other_parameters_has_no_call_site():
    def swapped(module, key, query, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **kwargs): ...

    def one_more(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, sinks=None): ...

    for entry in (swapped, one_more):
        with pytest.raises(NotRecognised, match="takes"):
            attention.adapter(entry)


@pytest.mark.parametrize("sizes", [(3, 6, 6), (2, 5, 6), (2, 6, 5)], ids=str)
def test_what_a_mask_means_for_other_sizes_says_nothing(sizes):
    query, key, value = qkv()
    seen = random_mask(2, 1, 6, 6).to("npu")
    function, site = patched()
    batch, q_len, kv_len = sizes
    masks._built.put(seen, masks._Built(Mask.band(1), batch, q_len, kv_len))
    for _ in range(2):
        output = function(layer(), query, key, value, seen, scaling=0.25)[0]
        assert relative_error(output, formula(query, key, value, seen, 0.25)) < 1e-6
    masks._built.put(seen, masks._Built(Mask.band(1), 2, 6, 6))
    own = torch.eye(6, dtype=torch.bool)
    output = function(layer(), query, key, value, seen, scaling=0.25)[0]
    assert relative_error(output, formula(query, key, value, own, 0.25)) < 1e-6
    assert site.hits == 3


def test_a_mask_of_another_type_or_rank_runs_the_original():
    query, key, value = qkv()
    function, site = patched()
    for mask in (random_mask(2, 1, 6, 6).long().to("npu"), random_mask(1, 6, 6).to("npu")):
        assert torch.equal(function(layer(), query, key, value, mask)[0], ORIGINAL(layer(), query, key, value, mask)[0])
    assert (site.hits, sum(site.fallbacks.values())) == (0, 2)


def test_mixed_types_under_autocast_give_the_originals_type():
    query, key, value = qkv()
    value = value.bfloat16()
    function, site = patched()
    with torch.autocast("npu", torch.bfloat16):
        ours, _ = function(layer(), query, key, value, None)
        theirs, _ = ORIGINAL(layer(), query, key, value, None)
    assert ours.dtype is theirs.dtype
    assert relative_error(ours, theirs) < 1e-2
    assert site.hits == 1


def test_on_the_cpu_the_original_runs_and_nothing_is_prepared_for_the_operator(monkeypatch):
    query, key, value = (x.cpu() for x in qkv())
    function, site = patched()
    monkeypatch.setattr(attention, "dense_of", Derived(lambda mask: pytest.fail("a mask was prepared")))
    for mask in (None, random_mask(2, 1, 6, 6)):
        assert torch.equal(function(layer(), query, key, value, mask)[0], ORIGINAL(layer(), query, key, value, mask)[0])
    assert site.fallbacks == {"not on an NPU": 2}


def test_what_a_static_cache_holds_behind_the_queries_does_not_matter():
    query, key, value = qkv(q_len=6, kv_len=11, cache=True)
    key[:, :, 6:], value[:, :, 6:] = torch.nan, torch.nan
    function, site = patched()
    output, _ = function(layer(), query, key, value, None)
    assert relative_error(output, formula(query, key[:, :, :6], value[:, :, :6], causal(6, 6), 0.25)) < 2e-6
    assert site.hits == 1


def test_a_mask_is_inverted_once_for_all_layers():
    query, key, value = qkv()
    function, _ = patched()
    mask = random_mask(2, 1, 6, 6).to("npu")
    with npu_patch.simulator.trace() as trace:
        for _ in range(3):
            function(layer(), query, key, value, mask)
    assert trace.launches_by_op["logical_not"] == 1
    assert trace.host_syncs == 0
    stale, _ = function(layer(), query, key, value, mask)
    mask.logical_not_()
    fresh, _ = function(layer(), query, key, value, mask)
    assert relative_error(fresh, formula(query, key, value, mask, 0.25)) < 2e-6
    assert not torch.equal(stale, fresh)


def test_memory_does_not_grow_with_the_number_of_masks():
    query, key, value = qkv()
    function, _ = patched()
    for i in range(1000):
        function(layer(), query, key, value, random_mask(2, 1, 6, 6).to("npu"))
        if i == 10:
            before = torch.npu.memory_allocated(), len(gc.get_objects())
    assert torch.npu.memory_allocated() <= before[0]
    assert len(gc.get_objects()) < before[1] + 500


def test_calls_by_keyword_and_by_position_reach_the_same_parameters():
    query, key, value = qkv()
    function, _ = patched()
    assert inspect.signature(function) == inspect.signature(ORIGINAL)
    by_position, _ = function(layer(), query, key, value, None, 0.0, 0.3, False)
    by_keyword, _ = function(
        is_causal=False, scaling=0.3, attention_mask=None, value=value, key=key, query=query, module=layer()
    )
    assert torch.equal(by_position, by_keyword)


def test_the_registry_entry_is_the_original_again_after_each_scope():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is ORIGINAL
    with npu_patch.scope("attention"):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not ORIGINAL
        assert AttentionInterface()["sdpa"] is ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is ORIGINAL
    assert "sdpa" not in ALL_ATTENTION_FUNCTIONS._local_mapping
