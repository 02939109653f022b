"""The attentions of every family of torchtitan 0.3.0: reached everywhere, and the same function.

Experts compute in bfloat16 whatever the model's type, and choose differently after the smallest difference; they are
left out where gradients are compared.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types

import pytest
import torch

import npu_patch
from npu_patch.ops import attention as op
from npu_patch.simulator import trace
from tests.support.numerics import assert_no_worse, assert_same_training, recording, replay, training_step

from .models import Counts, packed_positions, plain_positions, uncompilable, uncompiled

attention = pytest.importorskip("torchtitan.models.common.attention", reason="torchtitan 0.3.0")

from . import families  # noqa: E402
from .stand_ins import attend, written_out  # noqa: E402

ROWS = (48,), (7, 1, 40)
PICTURES = ((1, 4, 4), (1, 2, 4))  # one is padded


def without_experts(model):
    for layer in model.layers.values():
        layer.moe = torch.nn.Identity()
    return model


def gpt_oss(dtype=torch.float32, backend="flex"):
    return without_experts(families.build("gpt_oss", backend=backend, dtype=dtype, change=families.first_layers(2)))


def few_windows(config):
    """Fewer layers, since rounding grows from layer to layer, and windows narrower than a row."""
    config.layers = config.layers[:3]
    for layer in config.layers:
        if layer.attention.window_size is not None:
            layer.attention.window_size = 9


MODELS = {  # attentions, and how to make one
    "deepseek_v3": (3, lambda: families.build("deepseek_v3", change=families.dense_layers(3)), ()),
    "gpt_oss": (2, gpt_oss, ()),
    "kimi_k2_7": (2 + 4, lambda: families.build("kimi_k2_7", change=families.dense_layers(2)), PICTURES),
    "muse_glimmer": (3, lambda: families.build("muse_glimmer", change=few_windows), ()),
    "muse_glimmer with pictures": (
        1 + 3,
        lambda: families.build("muse_glimmer", "debugmodel_mm", change=families.first_layers(1)),
        PICTURES,
    ),
}


@functools.cache
def made(name):
    return MODELS[name][1]()


@contextlib.contextmanager
def eager():
    """torchtitan as it is without a compiler."""
    with uncompiled(), families.uncompiled_pictures():
        yield


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_same_in_float32(name):
    attentions, _, grids = MODELS[name]
    subject = made(name)
    for positions in (packed_positions(*ROWS), plain_positions()):
        loss = families.loss_of(subject, positions, grids)
        with eager():
            expected = training_step(subject, loss)
        with npu_patch.scope("attention"), uncompilable():
            counts = Counts()
            patched = training_step(subject, loss)
            assert counts.take("attention") == (attentions, {})
        assert_same_training(expected, patched, loss=1e-5 if name == "gpt_oss" else 1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_attention_adds_no_wait_for_the_device(name):
    subject, grids = made(name), MODELS[name][2]
    loss = families.loss_of(subject, packed_positions(*ROWS), grids)
    # The rotary caches look at the positions, too: one copy of them is enough for both.
    with npu_patch.scope("rope"), without_attention():
        loss()  # compares the rotary caches of the layers, once in their life
        with trace() as without:
            loss()
    with npu_patch.scope("rope", "attention"), trace() as t:
        loss()
    assert t.host_syncs == without.host_syncs


@contextlib.contextmanager
def without_attention():
    """Attentions and masks that cost nothing, so that only the rest of the model is counted."""

    def forward(self, q, k, v, *, out_transform=None, **kwargs):
        out = q[..., : v.shape[-1]] + v.repeat_interleave(q.shape[2] // v.shape[2], 2)
        return out if out_transform is None else out_transform(out, out[..., 0].float())

    def no_mask(*args, **kwargs):
        return None

    with pytest.MonkeyPatch.context() as patch, families.uncompiled_pictures(no_mask):
        patch.setattr(attention.FlexAttention, "forward", forward)
        patch.setattr(attention, "_compiled_create_block_mask", no_mask)
        yield


FULL = {  # flavor and back end: attentions of the whole debug model, as counted in an unpatched forward
    ("deepseek_v3:debugmodel", "flex"): 6,
    ("gpt_oss:debugmodel", "varlen"): 4,
    ("gpt_oss:debugmodel", "flex"): 4,
    ("kimi_k2_7:debugmodel", "flex"): 10,
    ("qwen3:debugmodel", "flex"): 8,
    ("qwen3:debugmodel", "varlen"): 8,
    ("llama3:debugmodel", "flex"): 6,
    ("llama3:debugmodel", "varlen"): 6,
    ("muse_glimmer:debugmodel", "flex"): 8,
    ("muse_glimmer:debugmodel", "varlen"): 8,
    ("muse_glimmer:debugmodel_mm", "flex"): 11,
}


@pytest.mark.parametrize(("name", "backend"), FULL)
def test_every_attention_of_a_debug_model_is_reached(name, backend):
    family, flavor = name.split(":")
    subject = families.build(family, flavor, backend, torch.bfloat16, length=32)
    grids = PICTURES if hasattr(subject, "vision_encoder") and subject.vision_encoder is not None else ()
    with npu_patch.scope("attention"), uncompilable():
        counts = Counts()
        loss = families.loss_of(subject, packed_positions((32,), (7, 1, 24)), grids)()
        assert counts.take("attention") == (FULL[name, backend], {})
        loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in subject.parameters())


# ---- gpt_oss: sinks --------------------------------------------------------------------------------------------------


def sunk(module, q, k, v, *, attention_masks, scale=None, out_transform=None, **kwargs):
    """The formula of an attention with sinks, for what comes in."""
    from torchtitan.models.gpt_oss.model import apply_attention_sink_rescale

    if isinstance(attention_masks, attention.VarlenMetadata):
        from .stand_ins import documents_seen

        window, ends = module.window_size, attention_masks.cu_seq_q
        seen = documents_seen(ends, ends, window)
        tensors = [x.flatten(0, 1).transpose(0, 1) for x in (q, k, v)]
        out, lse = attend(*tensors, seen, scale)
        out, lse = out.transpose(0, 1).unflatten(0, q.shape[:2]), lse.transpose(0, 1).unflatten(0, q.shape[:2])
    else:
        from torch.nn.attention.flex_attention import create_mask

        device = attention_masks.kv_num_blocks.device
        seen = create_mask(attention_masks.mask_mod, q.shape[0], None, q.shape[1], q.shape[1], device=device)
        out, lse = attend(*(x.transpose(1, 2) for x in (q, k, v)), seen, scale)
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    sinks = out_transform.__self__.sinks.detach()
    return apply_attention_sink_rescale(out, lse, sinks.to(lse.device, lse.dtype))


def patched(*args, **kwargs):
    with npu_patch.scope("attention"):
        counts = Counts()
        out = type(args[0]).forward(*args, **kwargs)
        assert counts.take("attention") == (1, {})
    return out


def stock(*args, **kwargs):
    with eager(), written_out():
        return type(args[0]).forward(*args, **kwargs)


@pytest.fixture(params=["sink of the operator", "log-sum-exp"])
def way(request, monkeypatch):
    """With and without sinks among the operator's arguments."""
    if request.param == "log-sum-exp":
        monkeypatch.setattr(op, "_sinks_reason", lambda *_: "this torch_npu has no attention sinks")
    return request.param


@pytest.mark.parametrize("backend", ["varlen", "flex"])
def test_sinks_in_bfloat16_are_no_worse(backend, way):
    subject = gpt_oss(torch.bfloat16, backend)
    owner = attention.VarlenAttention if backend == "varlen" else attention.FlexAttention
    loss = families.loss_of(subject, packed_positions(*ROWS))
    with eager(), written_out(), recording(owner, "forward") as calls:
        loss().backward()
    assert len(calls) == 2
    with trace() as t:
        replay(patched, calls[0])
    assert (t.launches_by_op.get("sigmoid", 0) == 0) == (way == "sink of the operator")
    assert_no_worse(patched, stock, sunk, calls)


def test_sinks_and_their_gradients_in_float32(way):
    subject = made("gpt_oss")
    loss = families.loss_of(subject, packed_positions(*ROWS))
    with eager():
        expected = training_step(subject, loss)
    with npu_patch.scope("attention"):
        counts = Counts()
        result = training_step(subject, loss)
        assert counts.take("attention") == (2, {})
        with trace() as t:
            loss()
    assert (t.launches_by_op.get("sigmoid", 0) == 0) == (way == "sink of the operator")
    assert any("sinks" in name for name in expected.gradients)
    assert_same_training(expected, result, loss=1e-5)


def test_a_transform_is_a_sink_only_if_it_computes_one():
    from npu_patch.adapters.torchtitan.sinks import sinks_of

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rest = torch.nn.Parameter(torch.arange(4.0))
            self.scale = 2.0

        def right(self, out, lse):
            return out * torch.sigmoid(lse - self.rest).unsqueeze(-1).to(out.dtype)

        def other_sign(self, out, lse):
            return out * torch.sigmoid(lse + self.rest).unsqueeze(-1).to(out.dtype)

        def no_gradient(self, out, lse):
            return out * torch.sigmoid(lse - self.rest.detach()).unsqueeze(-1).to(out.dtype)

        def of_the_lse_no_gradient(self, out, lse):
            return out * torch.sigmoid(lse.detach() - self.rest).unsqueeze(-1).to(out.dtype)

        def in_float32(self, out, lse):
            return out * torch.sigmoid(lse - self.rest).unsqueeze(-1)

        def reads_more(self, out, lse):
            return self.scale * out * torch.sigmoid(lse - self.rest).unsqueeze(-1).to(out.dtype)

    module = Attention()
    assert torch.equal(sinks_of(module.right), module.rest)
    assert sinks_of(module.right).requires_grad
    assert sinks_of(module.bfloat16().right).dtype is torch.float32
    for name in ("other_sign", "no_gradient", "of_the_lse_no_gradient", "in_float32", "reads_more"):
        assert sinks_of(getattr(module, name)) is None, name
    assert sinks_of(lambda out, lse: out) is None
    assert sinks_of(None) is None


def test_sinks_survive_activation_checkpointing(way):
    from torchtitan.distributed import activation_checkpoint

    gradients = []
    for on in (False, True):
        subject = families.build("gpt_oss", backend="flex", dtype=torch.bfloat16, change=families.first_layers(2))
        without_experts(subject)
        with npu_patch.scope("attention"), uncompilable():
            if on:
                activation_checkpoint.SelectiveAC(activation_checkpoint.SelectiveAC.Config()).apply(subject)
            with trace() as t:
                families.loss_of(subject, packed_positions(*ROWS))().backward()
        assert t.launches_by_op["npu.npu_fusion_attention"] == 2  # kept
        gradients.append([p.grad for p in subject.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_windows_are_the_layers_own():
    """Even layers of gpt_oss see 128 tokens; a longer row shows it, with both back ends."""
    positions, length = plain_positions(1, 160), 160
    outputs = {}
    for backend in ("flex", "varlen"):
        model = without_experts(
            families.build(
                "gpt_oss", backend=backend, dtype=torch.bfloat16, length=length, change=families.first_layers(1)
            )
        )
        with npu_patch.scope("attention"), torch.no_grad():
            tokens = families.tokens_of(model, 1, length).npu()
            masks = model.get_attention_masks(positions)
            outputs[backend] = model(tokens, positions=positions, attention_masks=masks)
            tokens[:, :20] = 7
            changed = model(tokens, positions=positions, attention_masks=masks)
            # What the last 12 see begins at the 21st token or later.
            assert torch.equal(changed[:, 148:], outputs[backend][:, 148:])
            assert not torch.equal(changed[:, 140:147], outputs[backend][:, 140:147])
    assert torch.equal(outputs["flex"], outputs["varlen"])


# ---- qwen3_5 ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def qwen3_5(monkeypatch):
    """The debug model with something else for its recurrent layers, whose kernels are a package of their own."""
    names = ("modules.conv.triton.ops", "ops.gated_delta_rule.chunk", "ops.gated_delta_rule.fused_recurrent")
    held = ("CausalConv1dFunction", "ChunkGatedDeltaRuleFunction", "FusedRecurrentFunction")
    functions = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
    before = set(sys.modules)
    for name, attribute in zip(names, held, strict=True):
        parts = f"fla.{name}".split(".")
        for i in range(len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[: i + 1]), types.ModuleType(parts[i]))
        setattr(sys.modules[f"fla.{name}"], attribute, type(attribute, (torch.autograd.Function,), {}))
    rule = types.ModuleType("fla.ops.gated_delta_rule")
    for function in functions:
        setattr(rule, function, None)
    rule.chunk = sys.modules["fla.ops.gated_delta_rule.chunk"]
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", rule)
    model_code = importlib.import_module("torchtitan.models.qwen3_5.model")

    def recurrent(self, x, attention_masks=None):
        return torch.tanh(x)

    monkeypatch.setattr(model_code.GatedDeltaNet, "forward", recurrent)
    subject = families.build("qwen3_5", change=lambda config: None)
    yield subject
    for name in set(sys.modules) - before:
        if name.startswith(("torchtitan.models.qwen3_5", "fla")):
            del sys.modules[name]


def test_qwen3_5_computes_the_same_in_float32(qwen3_5):
    loss = families.loss_of(qwen3_5, packed_positions(*ROWS), PICTURES)
    with eager():
        expected = training_step(qwen3_5, loss)
    with npu_patch.scope("attention"), uncompilable():
        counts = Counts()
        patched = training_step(qwen3_5, loss)
        assert counts.take("attention") == (2 + 4, {})
    assert_same_training(expected, patched)
