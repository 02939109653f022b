"""Whole models: the patched one is the same function, and it is the fused operators that compute it."""

from __future__ import annotations

import pytest
import torch

import npu_patch
import npu_patch.simulator

from ...support.numerics import assert_same_training
from . import tiny
from .call import takes_positions
from .tiny import FAMILIES, NORMS, OPS, Counting


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ops", [(op,) for op in OPS] + [OPS], ids=lambda ops: "+".join(ops))
def test_float32_training_is_the_same(family, ops):
    built, ids = tiny.model(family), tiny.tokens()
    stock = tiny.step(built, ids)
    with npu_patch.scope(*ops):
        counting = Counting()
        patched = tiny.step(built, ids)
        expected = {"rms_norm": NORMS[family], "rope": 2, "attention": 2}
        assert counting.hits() == {op: expected[op] if op in ops else 0 for op in OPS}
        assert not counting.fallbacks()
    assert_same_training(stock, patched)
    again = tiny.step(built, ids)
    assert again.loss == stock.loss


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("pad", ["unpadded", "left"])
def test_greedy_decoding_gives_the_same_tokens(family, cache, pad):
    built, ids = tiny.model(family).eval(), tiny.tokens(length=12)
    mask = torch.ones_like(ids)
    if pad == "left":
        mask[0, :5] = 0
    settings = {
        "attention_mask": mask,
        "max_new_tokens": 16,
        "do_sample": False,
        "eos_token_id": None,
        "cache_implementation": None if cache == "dynamic" else "static",
        "disable_compile": True,
    }
    stock = built.generate(ids, **settings)
    with npu_patch.scope(*OPS):
        counting = Counting()
        patched = built.generate(ids, **settings)
        assert counting.hits()["attention"] == 2 * 16
        assert not counting.fallbacks()
    assert stock.shape == (2, 28)
    assert torch.equal(stock, patched)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_trains_the_same(reentrant):
    built, ids = tiny.model("qwen3").train(), tiny.tokens()
    enable = getattr(built, "activation_checkpointing_enable", built.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    stock = tiny.step(built, ids)
    with npu_patch.scope(*OPS):
        counting = Counting()
        patched = tiny.step(built, ids)
        assert counting.hits()["rope"] == 4
        assert not counting.fallbacks()
    assert_same_training(stock, patched)


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_keeps_dtypes_and_loss(family):
    built, ids = tiny.model(family), tiny.tokens()

    def run():
        with torch.autocast("npu", torch.bfloat16):
            output = built(input_ids=ids, labels=ids, use_cache=False, output_hidden_states=True)
        return output, [h.dtype for h in output.hidden_states] + [output.logits.dtype]

    stock, stock_dtypes = run()
    with npu_patch.scope(*OPS):
        counting = Counting()
        patched, dtypes = run()
        patched.loss.backward()
        assert counting.hits() == {"rms_norm": NORMS[family], "rope": 2, "attention": 2}
        assert not counting.fallbacks()
    assert dtypes == stock_dtypes
    assert abs(patched.loss.item() - stock.loss.item()) < 2e-3 * stock.loss.item()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in built.parameters())


def test_a_training_step_waits_for_the_device_no_more_often_than_the_original():
    from transformers.masking_utils import create_causal_mask

    built, ids = tiny.model("gemma3", torch.bfloat16), tiny.tokens()

    def syncs():
        tiny.step(built, ids)  # what is made once
        with npu_patch.simulator.trace() as trace:
            built(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return trace.host_syncs

    stock = syncs()
    with npu_patch.scope(*OPS):
        assert syncs() <= stock + takes_positions(create_causal_mask)  # which are read once a step


def test_two_models_of_one_process_differ_only_by_scope():
    student, teacher, ids = tiny.model("llama"), tiny.model("llama"), tiny.tokens()
    with torch.no_grad():
        counting = Counting()
        with npu_patch.scope("rms_norm"):
            inside = student(ids).logits
        outside = teacher(ids).logits
    assert counting.hits()["rms_norm"] == NORMS["llama"]
    assert torch.allclose(inside, outside, atol=1e-5)


OTHERS = {
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "cohere": {},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_families_that_nobody_listed_train_the_same(kind):
    built, ids = tiny.any_model(kind, **OTHERS[kind]), tiny.tokens()
    stock = tiny.step(built, ids)
    with npu_patch.scope(*OPS):
        counting = Counting()
        patched = tiny.step(built, ids)
        assert counting.hits() == {"rms_norm": 5 if kind == "phi3" else 0, "rope": 2, "attention": 2}
        assert not counting.fallbacks()
    assert_same_training(stock, patched)


def test_yarn_scaled_tables_train_the_same():
    scaling = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    built, ids = tiny.any_model("llama", rope_parameters=scaling), tiny.tokens(length=48)
    stock = tiny.step(built, ids)
    with npu_patch.scope(*OPS):
        counting = Counting()
        patched = tiny.step(built, ids)
        assert counting.hits()["rope"] == 2
    assert_same_training(stock, patched)
