"""Whole models with experts, of both generations: every call reached, the same function, nothing that waits.

torchtitan 0.3.0 multiplies in bfloat16 whatever the model's type.  Where whole models are compared, it is made not to,
for both runs; the single calls in bfloat16 are the subject of test_experts and test_dispatch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools

import pytest
import torch

import npu_patch
from npu_patch.simulator import trace
from tests.support import fla
from tests.support.numerics import assert_same_training, training_step

from . import families, moe_models, previous
from .generation import CURRENT, PREVIOUS
from .generation import current as needs_current
from .generation import previous as needs_previous
from .models import Counts, packed_positions

if not CURRENT and not PREVIOUS:
    pytest.skip("needs torchtitan", allow_module_level=True)

LAYERS = 2
MOE = ("gmm", "permute", "swiglu", "router")


@pytest.fixture(autouse=True)
def recognised():
    """Before a test changes anything that is looked at."""
    importlib.import_module("torchtitan.models.common.moe" if CURRENT else "torchtitan.models.moe.moe")
    with npu_patch.scope(*MOE):
        pass


@pytest.fixture
def wide():
    """Experts in the model's own type."""
    with moe_models.without_bfloat16() if CURRENT else contextlib.nullcontext():
        yield


@functools.cache
def made(family):
    return moe_models.made(family)


def calls(family):
    """Hits of one forward: products, sorting and combining, gates."""
    if CURRENT:
        return {"gmm": LAYERS * (2 if family == "gpt_oss" else 3), "permute": 2 * LAYERS}
    return {"gmm": LAYERS, "permute": LAYERS}


@contextlib.contextmanager
def no_experts(model):
    """Inside: layers without what comes after the router, and without the router."""
    held = {layer: layer.moe for layer in model.layers.values() if hasattr(layer, "moe")}
    for layer in held:
        layer.moe = torch.nn.Identity()
    try:
        yield
    finally:
        for layer, own in held.items():
            layer.moe = own


@pytest.mark.parametrize("family", moe_models.FAMILIES)
def test_a_model_computes_the_same_in_float32(family, wide):
    model, loss = made(family)
    # Both with the attentions, whose originals need a compiler.
    with npu_patch.scope("attention"):
        expected = training_step(model, loss)
        with no_experts(model), trace() as rest:
            loss()
    with npu_patch.scope("attention", "gmm", "permute", "swiglu"):
        counts = Counts()
        patched = training_step(model, loss)
        taken = {op: counts.take(op) for op in ("gmm", "permute", "swiglu")}
        with trace() as t:
            loss()
    assert taken["swiglu"] == (LAYERS if CURRENT and family != "gpt_oss" else 0, {})
    assert {op: (number, {}) for op, number in calls(family).items()} == {op: taken[op] for op in ("gmm", "permute")}
    assert t.launches_by_op["npu.npu_grouped_matmul"] == LAYERS * (2 if family == "gpt_oss" else 3)
    assert t.launches_by_op["npu.npu_moe_token_permute"] == LAYERS
    assert t.host_syncs == rest.host_syncs  # none in the experts
    assert any("experts" in name for name in expected.gradients)
    assert_same_training(expected, patched, loss=1e-5 if family == "gpt_oss" else 1e-6)


COMBINATIONS = [tuple(itertools.compress(MOE, on)) for on in itertools.product((False, True), repeat=len(MOE))]


@pytest.mark.parametrize("ops", COMBINATIONS, ids=lambda ops: "+".join(ops) or "none")
def test_the_switches_in_every_combination(ops, wide):
    model, loss = made("deepseek_v3")
    with npu_patch.scope("attention"):
        expected = training_step(model, loss)
    with npu_patch.scope("attention", *ops):
        counts = Counts()
        patched = training_step(model, loss)
        taken = {op: counts.take(op) for op in MOE}
    for op, (hits, _) in taken.items():
        # 0.2.2 joins gates of feed-forwards with an option alone, and runs its experts in one function.
        reached = op in ops and not (op == "swiglu" and PREVIOUS)
        assert bool(hits) is reached, (op, taken)
    assert {op: taken[op] for op in ("gmm", "permute") if op in ops} == {
        op: (number, {}) for op, number in calls("deepseek_v3").items() if op in ops
    }
    assert_same_training(expected, patched)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
@pytest.mark.parametrize("mode", ["selective", "full"])
@needs_current
def test_activation_checkpointing_gives_identical_gradients(family, mode):
    from torchtitan.distributed import activation_checkpoint as code

    gradients, hits = [], []
    for on in (False, True):
        model, loss = moe_models.current(family, torch.bfloat16)
        with npu_patch.scope("attention", "rms_norm", "gmm", "permute", "swiglu"):
            if on:
                kind = code.SelectiveAC if mode == "selective" else code.FullAC
                kind(kind.Config()).apply(model)
            counts = Counts()
            loss().backward()
            hits.append([counts.take(op) for op in ("gmm", "permute", "swiglu")])
        gradients.append([p.grad for p in model.parameters()])
    assert [(2 * number, reasons) for number, reasons in hits[0]] == hits[1]  # every layer ran twice
    assert hits[0][0] == (3 * LAYERS, {})
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# ---- every call of the debug models, as counted in an unpatched forward ----------------------------------------------

FULL = {  # products, and places that sort and combine
    "qwen3": (24, 16),
    "deepseek_v3": (15, 10),
    "gpt_oss": (8, 8),
    "kimi_k2_7": (15, 10),
    "qwen3_5": (12, 8),
}


@needs_current
@pytest.mark.parametrize("family", FULL)
def test_every_call_of_a_debug_model_is_fused(family):
    if family == "qwen3_5":
        fla.install()
    flavor = moe_models.CURRENT_MODELS[family][0]
    model = families.build(family, flavor, "flex", torch.bfloat16, change=moe_models.shrink(99))
    with npu_patch.scope("attention", "gmm", "permute"):
        counts = Counts()
        value = families.loss_of(model, packed_positions(*moe_models.ROWS), moe_models.pictures_of(model))()
        assert (counts.take("gmm"), counts.take("permute")) == tuple((number, {}) for number in FULL[family])
        value.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


# ---- torchtitan 0.2.2: grouped products, weights before the experts --------------------------------------------------


@contextlib.contextmanager
def indices_on_the_host():
    """Inside: the padded indices of torchtitan 0.2.2 come from its own loop, not from its Triton kernel."""
    from torchtitan.models.moe import utils

    with pytest.MonkeyPatch.context() as patch:
        original = utils.generate_permute_indices

        def generate(counts, *args):
            found = original(counts.cpu(), *args, use_cpu=True)
            return tuple(tensor.npu() for tensor in found)

        patch.setattr(utils, "generate_permute_indices", generate)
        yield


@needs_previous
@pytest.mark.parametrize("family", ["qwen3", "llama4", "gpt_oss"])
def test_grouped_products_without_padding(family):
    """No kernel of Triton is left, and the loss is that of the padded products."""
    model, loss = moe_models.earlier(family, torch.bfloat16, grouped=True)
    with npu_patch.scope("attention"), indices_on_the_host():
        expected = training_step(model, loss)
    with npu_patch.scope("attention", "gmm", "permute"), trace() as t:
        counts = Counts()
        patched = training_step(model, loss)
        assert (counts.take("gmm"), counts.take("permute")) == ((LAYERS, {}), (3 * LAYERS, {}))
    # Forward and two gradients of each product; the gradients of gpt_oss's biases are products, too.
    assert t.launches_by_op["npu.npu_grouped_matmul"] == LAYERS * (8 if family == "gpt_oss" else 9)
    assert patched.loss == pytest.approx(expected.loss, rel=2e-3)
    assert patched.gradients.keys() == expected.gradients.keys()


@needs_previous
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("shared", [0, 1])
def test_weights_before_or_after_the_experts(before, shared):
    fields = {"score_before_experts": before, "num_shared_experts": shared}
    model, loss = moe_models.earlier("deepseek_v3", **fields)
    with npu_patch.scope("attention"):
        expected = training_step(model, loss)
    with npu_patch.scope("attention", "gmm", "permute"):
        counts = Counts()
        patched = training_step(model, loss)
        assert (counts.take("gmm"), counts.take("permute")) == ((LAYERS, {}), (LAYERS, {}))
    assert_same_training(expected, patched)


@needs_previous
@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_reorderer_with_hooks_is_left_to_them(hook):
    """Tensor parallelism splits what it is given and what it gives over the ranks."""
    model, loss = moe_models.earlier("deepseek_v3")
    seen = []
    for layer in list(model.layers.values())[1:]:
        getattr(layer.moe.reorderer, hook)(lambda *given: seen.append(given))
    with npu_patch.scope("attention", "permute"):
        counts = Counts()
        loss()
        assert counts.take("permute") == (0, {"the router's choice is split over ranks": LAYERS})
    assert len(seen) == LAYERS


@needs_previous
def test_counts_of_tokens_are_those_of_the_original():
    model, loss = moe_models.earlier("deepseek_v3")
    usage = []
    for on in (False, True):
        moes = [layer.moe for layer in model.layers.values() if layer.moe_enabled]
        for moe in moes:
            moe.tokens_per_expert.zero_()
        with npu_patch.scope("attention"), npu_patch.scope(permute=on, gmm=on):
            loss()
        usage.append([moe.tokens_per_expert.clone() for moe in moes])
    assert all(torch.equal(a, b) for a, b in zip(*usage, strict=True))
    assert usage[0][0].sum() == 2 * previous.LENGTH * moes[0].router.top_k


@needs_previous
def test_groups_of_other_sizes_are_padded_as_they_are():
    from torchtitan.models.moe import utils

    x, counts = torch.randn(6, 4).npu(), torch.tensor([4, 2]).npu()
    utils.set_token_group_alignment_size_m(16)
    try:
        with npu_patch.scope("permute"), indices_on_the_host():
            counts_ = Counts()
            shape, rows, indices, sizes = utils._permute(x, counts, 1, 2)
            assert counts_.take("permute") == (0, {"groups of 16 rows are wanted": 1})
            back = utils._unpermute(rows, shape, indices)
            assert sizes.tolist() == [16, 16]
    finally:
        utils.set_token_group_alignment_size_m(8)
    assert torch.equal(back, x)


@needs_previous
@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_of_all_ranks_by_expert_and_back(ranks):
    from torchtitan.distributed import expert_parallel
    from torchtitan.models.gpt_oss.model import moe
    from torchtitan.models.moe import utils

    table = torch.tensor([[4, 0, 2], [1, 5, 0]][:ranks])
    x = torch.randn(int(table.sum()), 4, generator=torch.Generator().manual_seed(1)).npu().requires_grad_()
    stock = utils._permute
    with npu_patch.scope("permute"):
        assert utils._permute is expert_parallel._permute is moe._permute is not stock
        seen = Counts()
        shape, rows, indices, sizes = moe._permute(x, table.flatten().npu(), ranks, 3)
        back = expert_parallel._unpermute(rows.sin(), shape, indices)
        gradient = torch.autograd.grad(back, x, torch.ones_like(back))[0]
        assert seen.take("permute") == (2, {})
    assert utils._permute is expert_parallel._permute is moe._permute is stock
    experts = torch.arange(3).repeat(ranks).repeat_interleave(table.flatten())
    assert torch.equal(rows.cpu(), x.detach().cpu()[torch.argsort(experts, stable=True)])
    assert sizes.tolist() == table.sum(0).tolist()
    assert torch.equal(back, x.sin())
    assert torch.allclose(gradient, x.cos())
