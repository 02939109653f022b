"""Whole models: the same function, reached everywhere, without a compiler."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch

import npu_patch
from npu_patch.simulator import trace
from tests.support.numerics import assert_same_training, training_step

from .generation import current
from .models import OPS, Counts, build, loss_of, packed_positions, plain_positions, uncompilable, uncompiled

pytestmark = current

POSITIONS = {
    "plain": plain_positions,
    "packed alike": lambda: packed_positions((20, 28), (20, 28)),
    "packed per sample": lambda: packed_positions((48,), (7, 1, 40)),
    "one sample": lambda: packed_positions((13, 35)),
}
PER_LAYER = {"llama3": (2, 1, 1), "qwen3": (4, 1, 1)}  # norms, rotary embeddings, attentions; and one norm at the end
model = functools.cache(build)


@functools.cache
def stock(family, kind):
    subject = model(family)
    with uncompiled():
        return training_step(subject, loss_of(subject, POSITIONS[kind]()))


@pytest.mark.parametrize("kind", POSITIONS)
@pytest.mark.parametrize("family", PER_LAYER)
def test_a_model_computes_the_same_in_float32(family, kind):
    subject, expected = model(family), stock(family, kind)
    with npu_patch.scope(*OPS), uncompilable():
        counts = Counts()
        patched = training_step(subject, loss_of(subject, POSITIONS[kind]()))
        norms, ropes, attentions = (2 * n for n in PER_LAYER[family])
        assert counts.take("rms_norm") == (norms + 1, {})
        assert counts.take("rope") == (ropes, {})
        assert counts.take("attention") == (attentions, {})
    assert_same_training(expected, patched)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("family", PER_LAYER)
def test_an_op_alone_computes_the_same_in_float32(family, op):
    subject, expected = model(family), stock(family, "packed per sample")
    with npu_patch.scope(op), uncompiled():
        counts = Counts()
        patched = training_step(subject, loss_of(subject, POSITIONS["packed per sample"]()))
        assert counts.take(op)[0] > 0
        assert counts.take(op)[1] == {}
    assert_same_training(expected, patched)


@pytest.mark.parametrize("kind", POSITIONS)
def test_a_step_waits_for_the_device_once(kind):
    subject = model("llama3")
    with npu_patch.scope(*OPS):
        loss = loss_of(subject, POSITIONS[kind]())
        loss().backward()  # compares the rotary caches of the layers, once in their life
        with trace(list(subject.parameters())) as t:
            loss().backward()
    assert t.host_syncs == 1
    assert t.launches_by_op["npu.npu_fusion_attention"] == 2
    assert t.launches_by_op["npu.npu_rotary_mul"] == 2 * 2 * 2  # layers, query and key, forward and backward
    assert t.launches_by_op.get("index_select", 0) == (0 if kind == "plain" else 3)  # cos, sin, adjoint: for all layers


def test_undo_leaves_the_identical_originals():
    from torchtitan.distributed import activation_checkpoint
    from torchtitan.models import common
    from torchtitan.models.common import attention, decoder, nn_modules, rope

    def places():
        return (
            nn_modules.RMSNorm.__dict__.get("forward"),
            torch.nn.RMSNorm.__dict__["forward"],
            rope.ComplexRoPE.__dict__.get("forward"),
            rope.CosSinRoPE.__dict__.get("forward"),
            rope.RoPE.__dict__["forward"],
            rope.ComplexRoPE.__dict__["apply_rotary_emb"],
            rope.CosSinRoPE.__dict__["apply_rotary_emb"],
            attention.FlexAttention.__dict__["forward"],
            attention.ScaledDotProductAttention.__dict__["forward"],
            attention.create_attention_mask,
            decoder.create_attention_mask,
            common.create_attention_mask,
            decoder.get_efficient_causal_mask_mod_for_packed_document,
            activation_checkpoint._get_default_save_ops,
        )

    before = places()
    assert before[0] is None
    assert before[2] is None
    with npu_patch.scope(*OPS):
        during = places()
        kept = {1, 4}  # torch's own class and the abstract base
        assert all((a is b) == (i in kept) for i, (a, b) in enumerate(zip(before, during, strict=True)))
        assert isinstance(during[5], staticmethod)
        assert during[9] is during[10] is during[11]
    assert all(a is b for a, b in zip(before, places(), strict=True))
    with pytest.raises(KeyError), npu_patch.scope("rope"):
        raise KeyError
    assert all(a is b for a, b in zip(before, places(), strict=True))


def test_status_says_what_each_target_means():
    model("llama3")
    with npu_patch.scope(*OPS):
        rows = {row.target: row for row in npu_patch.status() if row.library == "torchtitan" and row.op in OPS}
    assert rows["torchtitan.models.common.nn_modules:RMSNorm.forward"].meaning.startswith("fp32")
    assert rows["torchtitan.models.common.rope:ComplexRoPE.forward"].meaning.startswith("interleave")
    assert rows["torchtitan.models.common.rope:CosSinRoPE.forward"].meaning.startswith("half")
    assert {row.state for row in rows.values()} <= {"active", "compiled"}, rows


@functools.cache
def checkpointed():
    from torchtitan.distributed import activation_checkpoint

    subject = build("llama3", torch.bfloat16, layers=6, length=32)
    with npu_patch.scope(*OPS):
        activation_checkpoint.SelectiveAC(activation_checkpoint.SelectiveAC.Config()).apply(subject)
    return subject


def test_activation_checkpointing_keeps_the_attention():
    from torchtitan.distributed import activation_checkpoint

    subject, positions = checkpointed(), packed_positions((20, 12), (32,))
    with npu_patch.scope(*OPS), uncompilable():
        loss_of(subject, positions)().backward()
        fresh = positions.clone()  # the trainer, too, keeps the positions until the step is over
        with trace(list(subject.parameters())) as t:
            logits = subject(
                torch.zeros_like(fresh), positions=fresh, attention_masks=subject.get_attention_masks(fresh)
            )
            logits.float().square().mean().backward()
    assert t.launches_by_op["npu.npu_fusion_attention"] == 6
    assert t.launches_by_op["npu.npu_fusion_attention_grad"] == 6
    assert t.launches_by_op["npu.npu_rms_norm"] == 25  # every layer's norms run again, the last one does not
    assert t.launches_by_op["index_select"] == 3
    assert t.host_syncs == 1
    assert torch.ops.npu.npu_fusion_attention.default not in activation_checkpoint._get_default_save_ops()


@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_activation_checkpointing_changes_no_gradient(kind):
    """Also when nobody keeps the positions, so that what is known of them is found out again in the backward."""
    positions = plain_positions(length=32) if kind == "plain" else packed_positions((20, 12), (32,))
    plain, subject = build("llama3", torch.bfloat16, layers=6, length=32), checkpointed()
    with npu_patch.scope(*OPS):
        expected = training_step(plain, loss_of(plain, positions))
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        for context in (contextlib.nullcontext(), hooks):
            with context:
                run = training_step(subject, loss_of(subject, positions))
            assert run.loss == expected.loss
            for name, gradient in run.gradients.items():
                assert torch.equal(gradient, expected.gradients[name.replace("_checkpoint_wrapped_module.", "")]), name


def test_hits_of_the_debug_model_without_checkpointing():
    subject = build("llama3", torch.bfloat16, layers=6, length=32)
    with npu_patch.scope(*OPS), torch.no_grad():
        counts = Counts()
        loss_of(subject, plain_positions(length=32))()
        assert [counts.take(op) for op in OPS] == [(13, {}), (6, {}), (6, {})]
