"""Gated MLPs of the library: which are found, and whole models."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

import npu_patch
from npu_patch.adapters.transformers import mlp
from npu_patch.discovery.mlp import NotGated, recognise_gated_mlp
from npu_patch.registry import Unrecognised

from ...support.numerics import assert_no_worse, assert_same_training, recording
from . import tiny
from .call import found

# ---- finding ---------------------------------------------------------------------------------------------------------


def test_an_mlp_without_a_gate_is_not_worth_a_word():
    class Fc(nn.Module):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.up_proj(x)))

    with pytest.raises(NotGated):
        recognise_gated_mlp(Fc)
    assert not found(mlp.find, FcMLP=Fc)


@pytest.mark.parametrize(
    ("family", "meanings"),
    [
        ("llama", {"LlamaMLP.forward": "act_fn of gate_proj"}),
        ("phi3", {"Phi3MLP.forward": "activation_fn of the first half of gate_up_proj"}),
        ("granitemoeshared", {"GraniteMoeSharedMLP.forward": "activation of the first half of input_linear"}),
        ("modernbert", {"ModernBertMLP.forward": "act of the first half of Wi, then drop"}),
        ("moonshine", {"MoonshineDecoderMLP.forward": "activation_fn of the second half of fc1"}),
        ("lfm2", {"Lfm2MLP.forward": "silu of w1"}),
        ("clip", {}),
        ("resnet", {}),
    ],
)
def test_targets_of_a_model(family, meanings):
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    found = {target.path: getattr(target, "meaning", target) for target in mlp.find(module)}
    assert {path: meaning for path, meaning in found.items() if not path.endswith("._apply_gate")} == meanings


@pytest.mark.parametrize("family", ["falcon_h1", "inkling", "beam", "step3p7", "dory", "glm5_next", "t5"])
def test_variants_of_models_are_left_with_a_reason(family):
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    targets = [target for target in mlp.find(module) if not target.path.endswith("._apply_gate")]
    assert targets
    assert all(isinstance(target, Unrecognised) and target.reason for target in targets)


# ---- models ----------------------------------------------------------------------------------------------------------


PACKED = {
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "glm4": {},
}


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new"])
@pytest.mark.parametrize("kind", PACKED)
def test_models_train_the_same(kind, act):
    built, ids = tiny.any_model(kind, hidden_act=act, **PACKED[kind]), tiny.tokens()
    stock = tiny.step(built, ids)
    with npu_patch.scope("swiglu"):
        before = npu_patch.status().hits("swiglu")
        patched = tiny.step(built, ids)
        assert npu_patch.status().hits("swiglu") - before == (0 if act == "gelu_new" else 2)
    assert_same_training(stock, patched)


def test_gradient_checkpointing_trains_the_same():
    built, ids = tiny.any_model("phi3", **PACKED["phi3"]).train(), tiny.tokens()
    enable = getattr(built, "activation_checkpointing_enable", built.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    stock = tiny.step(built, ids)
    with npu_patch.scope("swiglu"):
        before = npu_patch.status().hits("swiglu")
        patched = tiny.step(built, ids)
        assert npu_patch.status().hits("swiglu") - before == 4
    assert_same_training(stock, patched)


@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh"])
def test_each_bfloat16_call_is_no_worse(act):
    module = importlib.import_module("transformers.models.phi3.modeling_phi3")
    built, ids = tiny.any_model("phi3", torch.bfloat16, hidden_act=act, **PACKED["phi3"]), tiny.tokens(length=40)
    original = module.Phi3MLP.forward
    with recording(module.Phi3MLP, "forward") as calls:
        built(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    with npu_patch.scope("swiglu"):
        assert module.Phi3MLP.forward is not original
        assert_no_worse(module.Phi3MLP.forward, original, original, calls)
    assert module.Phi3MLP.forward is original


def test_option_separate_reaches_models():
    built, ids = tiny.model("llama"), tiny.tokens()
    stock = tiny.step(built, ids)
    with npu_patch.scope("swiglu"):
        before = npu_patch.status().hits("swiglu")
        tiny.step(built, ids)
        assert npu_patch.status().hits("swiglu") == before
        npu_patch.configure("swiglu", separate=True)
        try:
            patched = tiny.step(built, ids)
        finally:
            npu_patch.configure("swiglu", separate=False)
        assert npu_patch.status().hits("swiglu") == before + 2
    assert_same_training(stock, patched)


def test_a_model_compiles_into_one_graph_with_the_operators():
    from torch._dynamo.testing import CompileCounterWithBackend

    built, ids = tiny.any_model("phi3", **PACKED["phi3"]), tiny.tokens()
    stock = tiny.step(built, ids)
    counter = CompileCounterWithBackend("aot_eager")
    with npu_patch.scope("swiglu", "cross_entropy"):
        patched = tiny.step(torch.compile(built, backend=counter, fullgraph=True), ids)
        states = {row.op: row.state for row in npu_patch.status() if row.state == "compiled"}
    assert counter.frame_count == 1
    assert states == {"swiglu": "compiled", "cross_entropy": "compiled"}
    (graph,) = counter.graphs
    assert sum(node.target is torch.ops.npu.npu_swiglu.default for node in graph.graph.nodes) == 2
    assert_same_training(stock, patched)
