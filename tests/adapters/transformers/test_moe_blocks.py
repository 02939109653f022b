"""Blocks of experts in transformers 4: lists of modules that run as grouped products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import npu_patch
import npu_patch.simulator

from ...ops.tools import compiled
from ...support.numerics import assert_same_training, relative_error
from . import tiny

pytestmark = pytest.mark.skipif(transformers.__version__ >= "5", reason="transformers 5 stacks its experts")

_MANY: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1}
_DEEPSEEK: dict[str, Any] = {
    **_MANY,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
}
#: kind: (changes, layers with experts, whether the block returns logits of its router)
KINDS: dict[str, tuple[dict[str, Any], int, bool]] = {
    "mixtral": ({"num_local_experts": 4}, 2, True),
    "minimax": ({"num_local_experts": 4, "layer_types": ["full_attention"] * 2}, 2, True),
    "olmoe": ({"num_experts": 4, "num_experts_per_tok": 2}, 2, True),
    "flex_olmo": ({"num_experts": 4, "num_experts_per_tok": 2}, 2, True),
    "qwen2_moe": ({**_MANY, **_SHARED, "num_experts": 4}, 2, True),
    "qwen3_moe": ({**_MANY, "num_experts": 4, "decoder_sparse_step": 1}, 2, True),
    "qwen3_next": (
        {**_MANY, **_SHARED, "num_experts": 4, "layer_types": ["linear_attention", "full_attention"]},
        2,
        True,
    ),
    "deepseek_v2": ({**_DEEPSEEK, "topk_method": "greedy"}, 1, False),
    "deepseek_v3": (_DEEPSEEK, 1, False),
    "glm4_moe": ({**_DEEPSEEK, "num_key_value_heads": 2}, 1, False),
    "dots1": ({**_DEEPSEEK, "num_key_value_heads": 2}, 1, False),
}
PRODUCT = "npu.npu_grouped_matmul"
OPS = [("gmm",), ("gmm", "permute")]


def model(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    own = dict(KINDS[kind][0])
    return tiny.any_model(kind, dtype, **{**own, **changes})


def counted() -> tuple[int, dict[str, int]]:
    status = npu_patch.status()
    return status.hits("gmm"), dict(status.fallbacks("gmm"))


class Since:
    def __init__(self) -> None:
        self._hits, self._fallbacks = counted()

    def hits(self) -> int:
        return counted()[0] - self._hits

    def fallbacks(self) -> dict[str, int]:
        now = counted()[1]
        rest = {reason: count - self._fallbacks.get(reason, 0) for reason, count in now.items()}
        return {reason: count for reason, count in rest.items() if count}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ops", OPS, ids="+".join)
def test_float32_training_and_router_logits_are_the_same(kind, ops):
    ids, layers = tiny.tokens(), KINDS[kind][1]
    extra = {"output_router_logits": True} if KINDS[kind][2] else {}
    built = model(kind)  # transformers leaves the forward of the time when router logits were recorded on its instances
    stock = tiny.step(built, ids, **extra)
    with torch.no_grad():
        before = built(input_ids=ids, **extra)
    state = built.state_dict()
    built = model(kind)
    built.load_state_dict(state)
    with npu_patch.scope(*ops):
        since = Since()
        with npu_patch.simulator.trace() as trace:
            patched = tiny.step(built, ids, **extra)
        assert (since.hits(), since.fallbacks()) == (layers, {})
        assert trace.launches_by_op[PRODUCT] == 9 * layers
        assert trace.launches_by_op.get("npu.npu_moe_token_permute", 0) == (layers if "permute" in ops else 0)
        with torch.no_grad():
            after = built(input_ids=ids, **extra)
    assert_same_training(stock, patched)
    assert relative_error(after.logits, before.logits) < 1e-5
    if extra:
        assert len(after.router_logits) == layers
        for a, b in zip(after.router_logits, before.router_logits, strict=True):
            assert relative_error(a, b) < 1e-5
    since = Since()
    assert tiny.step(built, ids, **extra).loss == stock.loss
    assert since.hits() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_decoding_gives_the_same_tokens(kind):
    built, ids = model(kind).eval(), tiny.tokens(length=8)
    options = {"max_new_tokens": 32, "do_sample": False, "use_cache": kind != "minimax"}
    stock = built.generate(ids, **options)
    with npu_patch.scope("gmm", "permute"):
        since = Since()
        patched = built.generate(ids, **options)
        assert since.hits() == (patched.shape[1] - ids.shape[1]) * KINDS[kind][1]
        assert not since.fallbacks()
    assert torch.equal(stock, patched)


def block(kind: str = "mixtral", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    built = model(kind, dtype, **changes)
    return next(one for one in built.modules() if isinstance(getattr(one, "experts", None), nn.ModuleList))


def inputs(dtype: torch.dtype = torch.float32, rows: int = 20, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, rows, 64, generator=generator).to(dtype).npu().requires_grad_()


def first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("ops", OPS, ids="+".join)
def test_bfloat16_is_no_worse_than_the_original_and_nothing_waits_or_is_copied(kind, ops):
    low, errors = block(kind, torch.bfloat16), {"stock": 0.0, "patched": 0.0}
    exact = block(kind, torch.bfloat16).double().cpu()
    if "deepseek" in kind:  # which routes in float32
        exact.moe = lambda x, ids, weights: type(exact).moe(exact, x, ids, weights.double())
    for seed in range(4):
        x = inputs(torch.bfloat16, seed=seed)
        wide = x.detach().cpu().double()
        with torch.no_grad():
            agreed = (chosen(low, x).cpu() == chosen(exact, wide)).all(-1)
            assert agreed.float().mean() > 0.8
            wanted = first(exact(wide)).view(-1, 64)[agreed]
            stock = first(low(x))
            with npu_patch.scope(*ops), npu_patch.simulator.trace() as trace:
                patched = first(low(x))
        for name, found in (("stock", stock), ("patched", patched)):
            errors[name] += (found.cpu().double().view(-1, 64)[agreed] - wanted).square().sum().item()
        assert trace.host_syncs == 0
        assert not any("stack" in name or name == "cat" for name in trace.launches_by_op)
        assert trace.launches_by_op[PRODUCT] == 3
    assert errors["patched"] <= 1.05**2 * errors["stock"], errors


def chosen(one: Any, x: torch.Tensor) -> torch.Tensor:
    """The experts of each token, sorted."""
    if isinstance(one.gate, nn.Linear):
        return one.gate(x.view(-1, 64)).softmax(-1).topk(one.top_k).indices.sort(-1).values
    ids: torch.Tensor = one.gate(x)[0]
    return ids.sort(-1).values


def fallback_of(changed: Any, x: torch.Tensor | None = None) -> dict[str, int]:
    """Reasons of one call, which must equal the original's."""
    x = inputs() if x is None else x
    state = torch.npu.get_rng_state()
    stock = first(changed(x.clone()))
    torch.npu.set_rng_state(state)
    with npu_patch.scope("gmm"):
        since = Since()
        patched = first(changed(x.clone()))
        assert since.hits() == 0
    assert torch.equal(stock, patched)
    return since.fallbacks()


class Wrapped(nn.Linear):
    pass


def test_experts_that_are_more_than_plain_layers_run_the_original():
    one = block()
    handle = one.experts[1].register_forward_hook(lambda module, given, out: out * 2)
    assert fallback_of(one) == {"an expert has hooks": 1}
    handle.remove()
    handle = one.experts[2].w2.register_forward_pre_hook(lambda module, given: None)
    assert fallback_of(one) == {"a projection of an expert has hooks": 1}
    handle.remove()
    one.experts[0].forward = lambda x: x * 3
    assert fallback_of(one) == {"an expert has a forward of its own": 1}
    del one.experts[0].forward
    one.experts[3].w1.forward = lambda x: nn.functional.linear(x, one.experts[3].w1.weight) * 3
    assert fallback_of(one) == {"a projection of an expert has a forward of its own": 1}
    del one.experts[3].w1.forward
    one.experts[3].w3.__class__ = Wrapped
    assert fallback_of(one) == {"a projection of an expert is a tests.Wrapped": 1}
    one.experts[3].w3.__class__ = nn.Linear
    one.experts[3].w3.bias = nn.Parameter(torch.ones(96, device="npu"))
    assert fallback_of(one) == {"a projection of an expert has a bias": 1}
    one.experts[3].w3.bias = None
    one.experts[1] = nn.Identity()
    assert fallback_of(one) == {"the experts are of several classes": 1}
    one.experts[0] = nn.Identity()
    assert fallback_of(one) == {"an expert is a Identity": 1}


def test_adapters_on_experts_run_the_original():
    peft = pytest.importorskip("peft")
    built = model("mixtral")
    ids = tiny.tokens()
    wrapped = peft.get_peft_model(built, peft.LoraConfig(target_modules=["w1"], r=2, init_lora_weights=False))
    stock = tiny.step(wrapped, ids)
    with npu_patch.scope("gmm"):
        since = Since()
        patched = tiny.step(wrapped, ids)
        assert (since.hits(), since.fallbacks()) == (0, {"a projection of an expert is a peft.Linear": 2})
    assert patched.loss == stock.loss


def test_other_activations_and_lists_run_the_original():
    one = block()
    one.experts[1].act_fn = nn.GELU()
    assert fallback_of(one) == {"the experts have several activations": 1}
    for expert in one.experts:
        expert.act_fn = nn.Tanh()
    assert fallback_of(one) == {"the activation Tanh is not known": 1}

    class Chosen(nn.ModuleList):
        def __getitem__(self, index):
            return super().__getitem__(0)

    one = block()
    one.experts = Chosen(list(one.experts))
    assert fallback_of(one) == {"the experts are in no plain list": 1}


def test_a_replaced_forward_of_the_experts_runs_the_original(monkeypatch):
    one = block()
    monkeypatch.setattr(type(one.experts[0]), "forward", lambda self, x: self.w2(self.w1(x)))
    assert fallback_of(one) == {"the forward of the experts was replaced": 1}


def test_noise_runs_the_original_in_training_alone():
    one = block(router_jitter_noise=0.1).train()
    assert fallback_of(one) == {"the router is trained with noise": 1}
    with npu_patch.scope("gmm"):
        since = Since()
        one.eval()(inputs())
        assert (since.hits(), since.fallbacks()) == (1, {})


def test_other_shapes_and_types_run_the_original():
    one = block()
    assert fallback_of(one.double(), inputs().double()) == {"rows of type float64": 1}
    assert fallback_of(block(), inputs(rows=0)) == {"no tokens": 1}
    one = block()
    one.experts[0].w1.weight = nn.Parameter(torch.randn(96, 64).bfloat16().npu())
    with npu_patch.scope("gmm"):
        since = Since()
        with pytest.raises(RuntimeError):  # as the original does
            one(inputs())
        assert since.fallbacks() == {"the matrices of the experts differ in type or device": 1}
    one = block("deepseek_v2", first_k_dense_replace=0)
    one.ep_rank = 1
    with npu_patch.scope("gmm"):
        since = Since()
        with pytest.raises(IndexError):
            one(inputs())
        assert since.fallbacks() == {"experts of several ranks": 1}


def test_fewer_experts_than_the_router_knows_run_the_original():
    one = block(num_local_experts=5)
    one.gate.weight.data[4] = one.gate.weight.data[3] - 0.5  # may be chosen
    one.experts = nn.ModuleList(list(one.experts)[:4])
    with npu_patch.scope("gmm"):
        since = Since()
        with pytest.raises(IndexError):
            one(inputs())
        assert since.fallbacks() == {"not as many experts as the router knows": 1}


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_autocast_computes_in_its_type_and_returns_the_originals(kind):
    one, x = block(kind), inputs()

    def run() -> list[torch.Tensor]:
        with torch.autocast("npu", dtype=torch.bfloat16):
            y = first(one(x))
        leaves = [one.experts[0].parameters().__next__(), x]
        return [y, *torch.autograd.grad(y.float().square().sum(), leaves)]

    stock = run()
    with npu_patch.scope("gmm", "permute"):
        since = Since()
        with npu_patch.simulator.trace() as trace:
            patched = run()
        assert since.hits() == 1
    assert trace.launches_by_op[PRODUCT] == 9
    for a, b in zip(patched, stock, strict=True):
        assert a.dtype == b.dtype
        assert relative_error(a, b) < 2e-2


def test_an_expert_without_tokens_gets_zeros_where_the_original_leaves_none():
    one, x = block(), inputs().detach().abs()
    with torch.no_grad():
        for expert, weight in enumerate((0.02, 0.01, -0.01, -0.02)):
            one.gate.weight[expert] = weight
    first(one(x)).sum().backward()
    assert [expert.w1.weight.grad is None for expert in one.experts] == [False, False, True, True]
    one.zero_grad()
    with npu_patch.scope("gmm"):
        first(one(x)).sum().backward()
    assert [bool(expert.w1.weight.grad.any()) for expert in one.experts] == [True, True, False, False]


def test_switching_off_restores_the_original():
    one = block()
    original = type(one).__dict__["forward"]
    with npu_patch.scope("gmm"):
        assert type(one).__dict__["forward"] is not original
    assert type(one).__dict__["forward"] is original


def test_frozen_experts_cost_no_gradient_of_their_matrices():
    one, x = block(), inputs()
    one.experts.requires_grad_(False)
    with npu_patch.scope("gmm"), npu_patch.simulator.trace() as trace:
        first(one(x)).sum().backward()
    assert trace.launches_by_op[PRODUCT] == 6
    assert x.grad is not None


UNKNOWN = {
    "ernie4_5_moe": "Ernie4_5_MoeSparseMoeBlock.forward",
    "hunyuan_v1_moe": "HunYuanMoEV1Moe.forward",
    "jamba": "JambaSparseMoeBlock.forward",
    "phimoe": "PhimoeSparseMoeBlock.forward",
    "gpt_oss": "GptOssExperts.forward",
    "llama4": "Llama4TextExperts.forward",
    "qwen3_vl_moe": "Qwen3VLMoeTextExperts.forward",
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_blocks_that_route_otherwise_are_said_not_to_be_recognised(kind):
    import importlib

    with npu_patch.scope("gmm"):
        importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        rows = [row for row in npu_patch.status().rows if row.target.endswith(UNKNOWN[kind])]
    assert [row.state for row in rows] == ["unrecognised"]


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_recomputed_layers_get_the_same_gradients(kind):
    built, ids = model(kind).train(), tiny.tokens()
    stock = tiny.step(built, ids)
    built.gradient_checkpointing_enable({"use_reentrant": False})
    with npu_patch.scope("gmm", "permute"):
        since = Since()
        patched = tiny.step(built, ids)
        assert (since.hits(), since.fallbacks()) == (2 * KINDS[kind][1], {})
    assert_same_training(stock, patched)


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("ops", OPS, ids="+".join)
def test_a_block_compiles_whole(kind, ops):
    one, x = block(kind), inputs()
    stock = first(one(x))
    with npu_patch.scope(*ops):
        run, operators = compiled(one)
        patched = first(run(x))
        assert relative_error(patched, stock) < 1e-5
        pairs = [torch.autograd.grad(y.square().sum(), [x, *one.experts.parameters()]) for y in (patched, stock)]
    assert sum("npu_grouped_matmul" in name for name in operators) == 9
    for a, b in zip(*pairs, strict=True):
        assert relative_error(a, b) < 1e-5
