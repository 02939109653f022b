"""The `flash_attention_2` entry on an NPU: windows, packed sequences, padding, and when plain PyTorch runs instead."""

from __future__ import annotations

import inspect
import types
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.flash_attention import flash_attention_forward as ORIGINAL

import npu_patch
import npu_patch.simulator
from npu_patch import functions
from npu_patch.adapters.transformers import flash_attention
from npu_patch.discovery import NotRecognised
from npu_patch.discovery.flash import recognise_flash
from npu_patch.sites import Site

from ...support import tiny_models
from ...support.numerics import relative_error

WINDOW = 3
REFUSES = recognise_flash(ORIGINAL).named
"""Whether the original refuses a soft cap on an NPU; transformers 4 drops it."""


def patched() -> tuple[Any, Site]:
    site = Site("test:flash", "attention", {})
    return functions.clone(flash_attention.adapter(recognise_flash(ORIGINAL))(ORIGINAL, site), ORIGINAL), site


def layer(groups: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    module = nn.Linear(1, 1, dtype=dtype)
    module.num_key_value_groups, module.is_causal = groups, True
    module.config = types.SimpleNamespace(_attn_implementation="flash_attention_2")
    return module


def qkv(q_len: int = 8, kv_len: int = 8, batch: int = 2, value_head: int = 16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    sizes = ((4, q_len, 16), (2, kv_len, 16), (2, kv_len, value_head))
    return tuple(
        torch.randn(batch, length, heads, size, generator=generator).to("npu").transpose(1, 2)
        for heads, length, size in sizes
    )


def exact(q: Any, k: Any, v: Any, seen: torch.Tensor, softcap: float | None = None, sinks: Any = None) -> torch.Tensor:
    q, k, v = (x.cpu().double() for x in (q, k, v))
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = q @ k.transpose(-1, -2) * 16**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sinks = sinks.detach().cpu().double().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), -1)
    return (scores.softmax(-1).nan_to_num(0.0)[..., : k.shape[2]] @ v).transpose(1, 2)


def band(length: int = 8, window: int | None = WINDOW) -> torch.Tensor:
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    return seen if window is None else seen.triu(1 - window)


def packed(lengths: list[int], **more: Any) -> dict[str, Any]:
    ends = torch.tensor([0, *lengths]).cumsum(0).int().to("npu")
    longest = max(lengths)
    keywords = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return {**keywords, **more}


def block_diagonal(lengths: list[int]) -> torch.Tensor:
    return torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool()


def test_the_window_that_transformers_drops_is_honoured():
    function, site = patched()
    q, k, v = qkv()
    ours, weights = function(layer(), q, k, v, None, sliding_window=WINDOW)
    assert weights is None
    assert relative_error(ours, exact(q, k, v, band())) < 2e-6
    assert relative_error(ORIGINAL(layer(), q, k, v, None, sliding_window=WINDOW)[0], exact(q, k, v, band())) > 0.1
    assert (site.hits, site.fallbacks) == (1, {})


@pytest.mark.parametrize("keywords", [{"output_attentions": True}, {"dropout": 0.0, "something_new": 1}])
@pytest.mark.parametrize("padded", [False, True])
def test_the_window_is_honoured_without_the_operator_too(keywords, padded):
    function, site = patched()
    q, k, v = qkv()
    padding = torch.ones(2, 8, dtype=torch.bool)
    padding[1, :2] = not padded
    ours, _ = function(layer(), q, k, v, padding.to("npu") if padded else None, sliding_window=WINDOW, **keywords)
    real = padding.unsqueeze(1).unsqueeze(2)
    seen = band() & real & real.transpose(-1, -2)
    assert relative_error(ours, exact(q, k, v, seen)) < 1e-5
    assert (site.hits, len(site.fallbacks)) == (0, 1)


def test_a_window_of_packed_sequences_is_refused_where_nothing_can_honour_it():
    function, _ = patched()
    with pytest.raises(ValueError, match="sliding window over packed sequences"):
        function(layer(), *qkv(batch=1), None, dropout=0.1, sliding_window=WINDOW, **packed([3, 5]))


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("by", ["cu_seq_lens", "position_ids"])
def test_packed_sequences_are_read_once_for_all_layers(window, by):
    function, site = patched()
    q, k, v = qkv(batch=1)
    lengths = [2, 6]
    if by == "cu_seq_lens":
        keywords = packed(lengths)
    else:
        keywords = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None].to("npu")}
    with npu_patch.simulator.trace() as trace:
        outputs = [function(layer(), q, k, v, None, sliding_window=window, **keywords)[0] for _ in range(3)]
    assert trace.host_syncs == (2 if by == "cu_seq_lens" else 1) - (by == "cu_seq_lens")
    seen = band(window=window) & block_diagonal(lengths)
    assert relative_error(outputs[2], exact(q, k, v, seen)) < 2e-6
    assert site.hits == 3


def test_positions_that_only_rise_are_no_packed_sequences():
    function, site = patched()
    q, k, v = qkv(batch=1)
    ours, _ = function(layer(), q, k, v, None, position_ids=torch.arange(4, 12)[None].to("npu"))
    assert relative_error(ours, exact(q, k, v, band(window=None))) < 2e-6
    assert site.hits == 1


@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_padding_gives_what_the_original_gives_without_its_waits(side):
    function, site = patched()
    q, k, v = qkv()
    padding = torch.ones(2, 8, dtype=torch.bool)
    padding[1, {"left": slice(0, 3), "right": slice(5, 8), "holes": slice(2, 4)}[side]] = False
    padding = padding.to("npu")
    with npu_patch.simulator.trace() as trace:
        ours = [function(layer(), q, k, v, padding)[0] for _ in range(2)][1]
    assert trace.host_syncs == 0
    assert trace.launches_by_op["cumsum"] == 1
    assert relative_error(ours, ORIGINAL(layer(), q, k, v, padding)[0]) < 2e-6
    assert site.hits == 2


@pytest.mark.parametrize("q_len", [1, 3])
def test_the_last_queries_of_a_padded_batch(q_len):
    function, site = patched()
    q, k, v = qkv(q_len=q_len)
    padding = torch.ones(2, 8, dtype=torch.bool)
    padding[1, :3] = False
    padding = padding.to("npu")
    ours = function(layer(), q, k, v, padding)[0]
    assert relative_error(ours, ORIGINAL(layer(), q, k, v, padding)[0]) < 2e-6
    assert site.hits == 1


def test_a_static_cache_longer_than_the_mask():
    function, site = patched()
    q, k, v = qkv(q_len=3, kv_len=12)
    padding = torch.ones(2, 8, dtype=torch.bool)
    padding[0, :2] = False
    k[:, :, 8:], v[:, :, 8:] = torch.nan, torch.nan
    ours = function(layer(), q, k, v, padding.to("npu"))[0]
    assert relative_error(ours, ORIGINAL(layer(), q, k, v, padding.to("npu"))[0]) < 2e-6
    assert site.hits == 1


def test_smaller_value_heads_and_sinks():
    function, site = patched()
    q, k, v = qkv(value_head=8)
    ours = function(layer(), q, k, v, None)[0]
    assert relative_error(ours, ORIGINAL(layer(), q, k, v, None)[0]) < 2e-6
    sinks = torch.full((4,), 50.0, device="npu")
    assert function(layer(), q, k, v, None, s_aux=sinks)[0].abs().max() < 1e-6
    assert (site.hits, site.fallbacks) == (2, {})


def test_float32_inputs_are_cast_to_the_layers_type_as_the_original_casts_them():
    function, _ = patched()
    q, k, v = qkv()
    ours, _ = function(layer(dtype=torch.bfloat16), q, k, v, None)
    theirs, _ = ORIGINAL(layer(dtype=torch.bfloat16), q, k, v, None)
    assert ours.dtype is theirs.dtype is torch.bfloat16
    assert relative_error(ours, theirs) < 1e-2


@pytest.mark.parametrize("window", [None, WINDOW])
def test_dropout_drops_what_the_original_drops(window):
    function, site = patched()
    q, k, v = qkv()
    torch.npu.manual_seed(3)
    ours, _ = function(layer(), q, k, v, None, dropout=0.3, sliding_window=window)
    if window is None:
        torch.npu.manual_seed(3)
        assert relative_error(ours, ORIGINAL(layer(), q, k, v, None, dropout=0.3)[0]) < 1e-6
    assert relative_error(ours, exact(q, k, v, band(window=window))) > 0.1
    assert (site.hits, site.fallbacks) == (1, {})


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("what", ["softcap", "s_aux"])
def test_a_soft_cap_and_sinks_without_the_operator_are_refused_or_computed_never_dropped(what, window):
    function, site = patched()
    q, k, v = (x.requires_grad_() for x in qkv())
    sinks = torch.linspace(-1.0, 2.0, 4, device="npu", requires_grad=True)
    given = {"softcap": {"softcap": 0.5}, "s_aux": {"s_aux": sinks, "something_new": 1}}[what]
    if REFUSES and what == "softcap":
        with pytest.raises(ValueError, match="softcap"):
            function(layer(), q, k, v, None, sliding_window=window, **given)
    else:
        padding = torch.ones(2, 8, dtype=torch.bool)
        padding[1, :2] = False
        ours, _ = function(layer(), q, k, v, padding.to("npu"), sliding_window=window, **given)
        real = padding.unsqueeze(1).unsqueeze(2)
        seen = band(window=window) & real & real.transpose(-1, -2)
        wanted = exact(q, k, v, seen, given.get("softcap"), given.get("s_aux"))
        assert relative_error(ours, wanted) < 1e-5
        assert relative_error(ours, exact(q, k, v, seen)) > 0.05
        ours.sum().backward()
        assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
    assert (site.hits, site.fallbacks) == (0, {f"keyword {'softcap' if what == 'softcap' else 'something_new'}": 1})


def test_a_soft_cap_or_sinks_of_packed_sequences_are_refused_where_nothing_can_compute_them():
    function, site = patched()
    with pytest.raises(ValueError, match=r"soft ?cap"):
        function(layer(), *qkv(batch=1), None, softcap=30.0, **packed([3, 5]))
    assert site.hits == 0


def test_bidirectional_attention():
    function, site = patched()
    q, k, v = qkv(q_len=5)
    ours, _ = function(layer(), q, k, v, None, is_causal=False)
    assert relative_error(ours, exact(q, k, v, torch.ones(5, 8, dtype=torch.bool))) < 2e-6
    both, _ = function(layer(), *qkv(), None, is_causal=False, sliding_window=WINDOW)
    q, k, v = qkv()
    seen = band() | band().T
    assert relative_error(both, exact(q, k, v, seen)) < 1e-5
    assert (site.hits, site.fallbacks) == (1, {"a window without causality": 1})


def test_it_is_recognised_by_what_it_hands_on():
    recognise_flash(ORIGINAL)
    source = inspect.getsource(ORIGINAL).replace("sliding_window=sliding_window", "sliding_window=None")
    namespace = dict(ORIGINAL.__globals__)
    exec(source, namespace)
    with pytest.raises(NotRecognised, match="other arguments"):
        recognise_flash(namespace["flash_attention_forward"])


def test_the_signature_is_the_originals():
    assert inspect.signature(patched()[0]) == inspect.signature(ORIGINAL)


@pytest.mark.parametrize("kind", ["plain", "left", "packed"])
def test_a_model_with_a_window_computes_what_sdpa_computes(kind):
    model, given = tiny_models.build("gemma3"), tiny_models.inputs("gemma3", batch=1 if kind == "packed" else 2)
    keep = torch.ones_like(given["input_ids"])
    if kind == "left":
        keep[0, :5] = 0
        given["attention_mask"] = keep
    if kind == "packed":
        given["position_ids"] = torch.cat([torch.arange(8), torch.arange(12)])[None].to("npu")
    with torch.no_grad():
        wanted = model(**given, use_cache=False).logits[keep.bool()]
        model.set_attn_implementation("flash_attention_2")
        stock = model(**given, use_cache=False).logits[keep.bool()]
        with npu_patch.scope("attention"):
            ours = model(**given, use_cache=False).logits[keep.bool()]
    assert relative_error(stock, wanted) > 0.1
    assert relative_error(ours, wanted) < 1e-5


@pytest.mark.parametrize("head", [96, 256])
def test_head_sizes_of_packed_sequences(head):
    function, site = patched()
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, 8, n, head, generator=generator).to("npu").transpose(1, 2) for n in (4, 2, 2))
    tensors = [x.requires_grad_() for x in (q, k, v)]
    ours, _ = function(layer(), *tensors, None, scaling=0.25, **packed([3, 5]))
    doubles = [x.detach().cpu().double().requires_grad_() for x in tensors]
    wanted = exact(*doubles, band(window=None) & block_diagonal([3, 5]))
    assert relative_error(ours, wanted) < 2e-6
    cotangent = torch.randn(ours.shape, generator=generator)
    gradients = torch.autograd.grad(ours, tensors, cotangent.to("npu"))
    for a, b in zip(gradients, torch.autograd.grad(wanted, doubles, cotangent.double()), strict=True):
        assert relative_error(a, b) < 1e-5
    assert site.hits == 1


@pytest.mark.parametrize(
    ("name", "implementation"), [("gemma2 without a cap", None), ("gemma3", "flash_attention_2"), ("mistral", None)]
)
def test_compiled_models_are_one_graph_with_the_operator(name, implementation):
    model, given = tiny_models.build(name).eval(), tiny_models.inputs(name)
    if implementation is not None:
        model.set_attn_implementation(implementation)
    called: list[str] = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    with torch.no_grad(), npu_patch.scope("attention"):
        eager = model(**given, use_cache=False).logits
        compiled = torch.compile(model, backend=backend, fullgraph=True)(**given, use_cache=False).logits
    assert sum("npu_fusion_attention_v3" in target for target in called) == 2
    assert relative_error(compiled, eager) < 1e-6
