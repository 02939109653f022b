"""Eager attention functions of models without sdpa support: which are patched, and when the original runs."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn

import npu_patch
from npu_patch import functions
from npu_patch.adapters.transformers import eager_attention
from npu_patch.discovery import NotRecognised
from npu_patch.discovery.eager import recognise_eager
from npu_patch.registry import Target
from npu_patch.sites import Site

from ...support import tiny_models
from ...support.numerics import assert_no_worse, errors, recording, relative_error
from .call import modeling_file, patched, without_sdpa


def plain(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    weights = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class NoSdpa:
    _supports_sdpa = False


def plain_patched() -> tuple[Any, Any, Any]:
    module = modeling_file(plain=plain, Model=type("Model", (NoSdpa,), {"_supports_sdpa": False}))
    (target,) = eager_attention.find(module)
    assert isinstance(target, Target)
    return patched(lambda _: [target], "plain", plain)


def layer(groups: int = 2, training: bool = False, **more: Any) -> Any:
    return types.SimpleNamespace(num_key_value_groups=groups, training=training, **more)


def qkv(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    return tuple(
        torch.randn(2, 6, heads, 16, generator=generator).to(dtype).to("npu").transpose(1, 2) for heads in (4, 2, 2)
    )


FAMILIES = {
    "gemma2": (True, False, False, "head_dim"),
    "gpt_oss": (True, True, False, ""),
    "granite_swa": (True, True, False, ""),
    "mimo_v2_flash": (True, True, True, ""),
    "nllb_moe": (False, False, False, "query"),
    "zamba": (True, False, False, ""),
}


def eager_family(family: str) -> Any:
    module = without_sdpa(family)
    if module is None:
        pytest.skip(f"this transformers has no {family}, or runs it with sdpa")
    return module


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_recognised_by_what_they_compute(family):
    module = eager_family(family)
    (target,) = eager_attention.find(module)
    assert isinstance(target, Target), target
    meaning = recognise_eager(module.eager_attention_forward)
    assert (meaning.groups, meaning.sinks, meaning.sinks_optional, meaning.default_scale) == FAMILIES[family]


def test_a_model_with_sdpa_support_keeps_its_eager_function():
    from transformers.models.llama import modeling_llama

    assert not list(eager_attention.find(modeling_llama))


CHANGES = ("scale", "softmax", "mask", "flag", "window", "no weights", "dropout", "training")


def _changed(change: str) -> Any:
    import inspect
    import textwrap

    source = textwrap.dedent(inspect.getsource(plain))
    old, new = {
        "scale": ("* scaling", "* scaling * 1.01"),
        "softmax": ("dim=-1", "dim=-2"),
        "mask": ("weights + attention_mask", "weights - attention_mask"),
        "flag": ("groups = module.num_key_value_groups", "groups = module.num_key_value_groups\n    module.flag"),
        "window": ("weights @ value", "weights @ value * (1.0 if kwargs.get('sliding_window') is None else 0.5)"),
        "no weights": (", weights\n", ", None\n"),
        "dropout": ("training=module.training", "training=True"),
        "training": ("* scaling", "* (scaling if module.training else 2 * scaling)"),
    }[change]
    assert old in source
    namespace: dict[str, Any] = {"nn": nn, "torch": torch}
    exec(source.replace(old, new), namespace)
    return namespace["plain"]


@pytest.mark.parametrize("change", CHANGES)
def test_a_function_that_computes_something_else_is_left(change):
    with pytest.raises(NotRecognised):
        recognise_eager(_changed(change))


def test_a_soft_cap_runs_the_original():
    modeling_gemma2 = eager_family("gemma2")
    original = modeling_gemma2.eager_attention_forward
    q, k, v = qkv()
    with npu_patch.scope("attention"):
        before = npu_patch.status().fallbacks("attention").get("keyword softcap", 0)
        output, weights = modeling_gemma2.eager_attention_forward(
            layer(head_dim=16), q, k, v, None, scaling=0.25, softcap=30.0
        )
        assert npu_patch.status().fallbacks("attention")["keyword softcap"] == before + 1
    stock, stock_weights = original(layer(head_dim=16), q, k, v, None, scaling=0.25, softcap=30.0)
    assert torch.equal(output, stock)
    assert torch.equal(weights, stock_weights)


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"output_attentions": True}, "keyword output_attentions"),
        ({"position_bias": 1}, "keyword position_bias"),
        ({"something_new": 1}, "keyword something_new"),
        ({"attention_mask": torch.ones(2, 1, 6, 6, dtype=torch.bool)}, "the mask is not a 4-D additive one"),
        ({"module": layer(4)}, "query heads are not key heads times num_key_value_groups"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_the_operator_cannot_honour_runs_the_original(keywords, reason):
    function, site, original = plain_patched()
    q, k, v = qkv()
    arguments = {"module": layer(), "query": q, "key": k, "value": v, "attention_mask": None, "scaling": 0.25}
    arguments |= {name: x.to("npu") if isinstance(x, torch.Tensor) else x for name, x in keywords.items()}

    def outcome(f: Any) -> Any:
        try:
            return f(**arguments)
        except RuntimeError as error:
            return type(error)

    ours, theirs = outcome(function), outcome(original)
    if isinstance(theirs, tuple):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    else:
        assert ours is theirs
    assert (site.hits, site.fallbacks) == (0, {reason: 1})


def test_dropout_has_the_originals_distribution():
    function, site, original = plain_patched()
    q, k, _ = qkv()
    unit = torch.eye(6).expand(2, 2, 6, 6).contiguous().to("npu")  # makes the output the weights
    torch.npu.manual_seed(3)
    results = []
    for f in (function, original):
        drawn = [f(layer(training=True), q, k, unit, None, scaling=0.25, dropout=0.25)[0].cpu() for _ in range(200)]
        results.append(torch.stack(drawn))
    exact = original(layer(), q, k, unit, None, scaling=0.25)[0].cpu()
    for result in results:
        assert abs((result == 0).float().mean() - 0.25) < 0.01
        kept = result[result != 0] / exact.expand_as(result)[result != 0]
        assert (kept * 0.75 - 1).abs().max() < 1e-5
    still = function(layer(), q, k, unit, None, scaling=0.25, dropout=0.25)[0]  # not in training
    assert relative_error(still, exact) < 1e-6
    assert (site.hits, site.fallbacks) == (201, {})


def test_a_forward_hook_on_the_attention_gets_the_weights():
    function, site, original = plain_patched()

    class Attention(nn.Module):
        num_key_value_groups = 2

        def forward(self, q, k, v):
            return function(self, q, k, v, None, scaling=0.25)

    seen: list[Any] = []
    attention, (q, k, v) = Attention(), qkv()
    assert attention(q, k, v)[1] is None
    attention.register_forward_hook(lambda module, args, output: seen.append(output[1]))
    attention(q, k, v)
    assert torch.equal(seen[0], original(attention, q, k, v, None, scaling=0.25)[1])
    assert (site.hits, site.fallbacks) == (1, {"the attention weights are asked for": 1})


@pytest.mark.parametrize("how", ["keyword", "config"])
def test_recorded_weights_are_the_originals_and_recording_hidden_states_needs_none(how):
    model, given = tiny_models.build("gpt_oss").eval(), tiny_models.inputs("gpt_oss")
    keywords = {"output_attentions": True} if how == "keyword" else {}
    model.config.output_attentions = how == "config"
    with torch.no_grad():
        stock = model(**given, **keywords).attentions
        with npu_patch.scope("attention"):
            ours = model(**given, **keywords).attentions
            model.config.output_attentions = False
            hits = npu_patch.status().hits("attention")
            model(**given, output_hidden_states=True)
            assert npu_patch.status().hits("attention") == hits + 2
    assert len(ours) == len(stock) == 2
    assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True))


def test_a_query_that_sees_nothing_has_the_mean_of_all_values_as_in_the_original():
    function, site, original = plain_patched()
    q, k, v = (x.requires_grad_() for x in qkv())
    mask = torch.zeros(2, 1, 6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), torch.finfo(torch.float32).min)
    mask[0, :, :3] = torch.finfo(torch.float32).min
    mask = mask.to("npu")
    ours, theirs = (f(layer(), q, k, v, mask, scaling=0.25)[0] for f in (function, original))
    assert site.hits == 1
    assert relative_error(ours, theirs) < 1e-6
    assert relative_error(ours[0, 0, 0], v[0, 0].mean(0)) < 1e-6
    head = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1)).to("npu")
    gradients = [torch.autograd.grad(x, (q, k, v), head) for x in (ours, theirs)]
    for a, b in zip(*gradients, strict=True):
        assert relative_error(a, b) < 1e-5


def test_padding_under_autocast_uses_the_operator():
    model, given = tiny_models.build("gemma2 without a cap"), tiny_models.inputs("gemma2 without a cap")
    mask = torch.ones_like(given["input_ids"])
    mask[0, :5] = 0
    labels = given["input_ids"].masked_fill(mask == 0, -100)

    def run() -> torch.Tensor:
        with torch.autocast("npu", torch.bfloat16):
            return model(**given, attention_mask=mask, labels=labels, use_cache=False).loss

    stock = run()
    with npu_patch.scope("attention"):
        before = npu_patch.status()
        ours = run()
        after = npu_patch.status()
    assert after.hits("attention") - before.hits("attention") == 2
    assert ours.item() == pytest.approx(stock.item(), rel=2e-3)
    assert ours.dtype is stock.dtype


def test_a_head_size_beyond_the_operators_runs_the_original():
    function, site, original = plain_patched()
    q, k, v = (torch.randn(1, 2, 3, 776).to("npu") for _ in range(3))
    assert torch.equal(
        function(layer(1), q, k, v, None, scaling=0.1)[0], original(layer(1), q, k, v, None, scaling=0.1)[0]
    )
    assert site.fallbacks == {"head size above 768": 1}


@pytest.mark.parametrize("name", ["gemma2 without a cap", "gpt_oss"])
def test_bfloat16_calls_are_no_worse_than_the_originals(name):
    module = eager_family(name.split()[0])
    model, given = tiny_models.build(name, torch.bfloat16), tiny_models.inputs(name)
    padding = torch.ones_like(given["input_ids"])
    padding[1, -6:] = 0
    original = module.eager_attention_forward
    with recording(module, "eager_attention_forward") as calls:
        model(**given, attention_mask=padding, labels=given["input_ids"], use_cache=False).loss.backward()
    (target,) = eager_attention.find(module)
    site = Site(target.name, target.op, {})
    fused = functions.clone(target.adapter(original, site), original)

    def first(function: Any) -> Any:
        return lambda *args, **kwargs: function(*args, **kwargs)[0]

    for call in calls:
        call.gradients = {0: call.gradients[0]}
    if name == "gpt_oss":
        _assert_no_worse_but_for_queries(first(fused), first(original), calls)
    else:
        assert_no_worse(first(fused), first(original), first(original), calls)
    assert site.hits
    assert not site.fallbacks


def _assert_no_worse_but_for_queries(fused: Any, original: Any, calls: Any) -> None:
    """A fused backward takes the sum over a row from the rounded output.

    What that is off by is multiplied with the mean of the keys that a query sees, which is large where keys have a
    bias, as in gpt_oss.  Everything else, and all gradients together, are closer than the original's.
    """
    ours, theirs = (errors(function, calls, original) for function in (fused, original))
    sinks, queries = "gradient 0", "gradient 1"  # of four sinks: too few numbers for a statistic of their own
    for name in ours.keys() - {sinks, queries}:
        assert ours[name].rms <= 1.05 * theirs[name].rms, name
    assert ours[queries].rms <= 1.6 * theirs[queries].rms
    together = [sum(pool.squares for name, pool in pools.items() if "gradient" in name) for pools in (ours, theirs)]
    assert together[0] <= together[1]
