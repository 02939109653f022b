"""Norms, rotary embeddings and feed-forwards in whole models of both generations: all reached, and the same function.

Experts are left out where gradients are compared: they compute in bfloat16, and choose differently after the smallest
difference.
"""

from __future__ import annotations

import functools

import pytest
import torch

import npu_patch
from npu_patch.simulator import trace
from tests.support import fla
from tests.support.numerics import assert_no_worse, assert_same_training, recording, training_step

from . import families, previous
from .generation import CURRENT, PREVIOUS
from .models import Counts, packed_positions

OPS = ("rms_norm", "rope", "swiglu")
ROWS = (48,), (7, 1, 40)
PICTURES = ((1, 4, 4), (1, 2, 4))


@pytest.fixture(autouse=True)
def separate():
    npu_patch.configure("swiglu", separate=True)
    yield
    npu_patch.configure("swiglu", separate=False)


def current(family, flavor="debugmodel", backend=None, dtype=torch.float32, change=None):
    if family == "qwen3_5":
        fla.install()
    subject = families.build(family, flavor, backend, dtype, change=change)
    grids = PICTURES if getattr(subject, "vision_encoder", None) is not None else ()
    return subject, families.loss_of(subject, packed_positions(*ROWS), grids)


def earlier(family, flavor="debugmodel", dtype=torch.float32, **changes):
    if family == "deepseek_v3":
        changes["n_dense_layers"] = 6  # none with experts, which need what the trainer sets
    subject = previous.build(family, flavor, dtype, **changes)
    return subject, previous.loss_of(subject, previous.documents(*ROWS))


# ---- every call of the debug models, as counted in an unpatched forward ----------------------------------------------

FULL = (
    {  # norms, rotary embeddings, feed-forwards and the gates of experts per forward
        "llama3 debugmodel": (13, 6, 6),
        "qwen3 debugmodel": (33, 8, 8),
        "deepseek_v3 debugmodel": (19, 6, 11),
        "gpt_oss debugmodel": (9, 4, 0),
        "kimi_k2_7 debugmodel": (19, 10, 11),
        "muse_glimmer debugmodel": (50, 6, 8),
        "muse_glimmer debugmodel_mm": (51, 9, 8),
        "qwen3_5 debugmodel": (27, 6, 8),
    }
    if CURRENT
    else {  # without the experts of the layers that have them
        "llama3 debugmodel": (13, 6, 6),
        "llama4 debugmodel": (13, 6, 3),
        "qwen3 debugmodel": (33, 8, 8),
        "deepseek_v3 debugmodel": (19, 12, 6),
        "gpt_oss debugmodel": (9, 4, 0),
    }
    if PREVIOUS
    else {}
)


@pytest.mark.parametrize("name", FULL)
def test_every_call_of_a_debug_model_is_fused(name):
    family, flavor = name.split()
    make = current if CURRENT else earlier
    subject, loss = make(family, flavor, dtype=torch.bfloat16)
    with npu_patch.scope(*OPS, "attention"):
        counts = Counts()
        value = loss()
        assert tuple(counts.take(op) for op in OPS) == tuple((number, {}) for number in FULL[name])
        value.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in subject.parameters())


# ---- float32 ---------------------------------------------------------------------------------------------------------


def three_layers(config):
    config.layers = config.layers[:3]


def without_experts(family):
    subject, loss = current(family, backend="flex", change=families.first_layers(2))  # varlen computes in bfloat16
    for layer in subject.layers.values():
        layer.moe = torch.nn.Identity()
    return subject, loss


TWO = {"n_layers": 2}
MODELS = (
    {
        "llama3": lambda: current("llama3", change=families.first_layers(2)),
        "qwen3": lambda: current("qwen3", change=families.first_layers(2)),
        "deepseek_v3": lambda: current("deepseek_v3", change=families.dense_layers(2)),
        "gpt_oss": lambda: without_experts("gpt_oss"),
        "kimi_k2_7": lambda: current("kimi_k2_7", change=families.dense_layers(2)),
        "muse_glimmer": lambda: current("muse_glimmer", change=three_layers),
        "muse_glimmer, pictures": lambda: current("muse_glimmer", "debugmodel_mm", change=families.first_layers(1)),
        "qwen3_5": lambda: current("qwen3_5", change=families.first_layers(4)),  # one of them has attention
    }
    if CURRENT
    else {
        "llama3": lambda: earlier("llama3", **TWO),
        "llama4": lambda: earlier("llama4", **TWO),
        "qwen3": lambda: earlier("qwen3", **TWO),
        "deepseek_v3": lambda: earlier("deepseek_v3", **TWO),
        "gpt_oss": lambda: earlier("gpt_oss", **TWO),
    }
    if PREVIOUS
    else {}
)


@functools.cache
def made(name):
    return MODELS[name]()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_same_in_float32(name):
    subject, loss = made(name)
    # Both with the attentions, whose originals need a compiler.
    with npu_patch.scope("attention"):
        expected = training_step(subject, loss)
        with trace() as stock:
            loss()
    with npu_patch.scope(*OPS, "attention"):
        counts = Counts()
        patched = training_step(subject, loss)
        taken = {op: counts.take(op) for op in OPS}
        with trace() as t:
            loss()
    assert all(reasons == {} for _, reasons in taken.values()), taken
    assert taken["rms_norm"][0] > 0
    assert taken["rope"][0] > 0
    assert t.launches_by_op["npu.npu_rms_norm"] == taken["rms_norm"][0]
    assert t.host_syncs <= stock.host_syncs
    assert_same_training(expected, patched, loss=1e-5 if name == "gpt_oss" else 1e-6)


# ---- bfloat16, call by call ------------------------------------------------------------------------------------------


def norm(self, x):
    eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return scaled if self.weight is None else scaled * (self.weight + getattr(self, "gain_center", 0.0))


def offset_norm(self, x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


def gated_norm(self, x, gate):
    return norm(self, x) * torch.nn.functional.silu(gate)


def classes(name):
    """Norm classes of a model, with their formulas in float64."""
    if name == "qwen3_5":
        from torchtitan.models.qwen3_5 import model

        return {model.OffsetRMSNorm: offset_norm, model.RMSNormGated: gated_norm}
    if name == "muse_glimmer":
        from torchtitan.models.muse_glimmer.model import RMSGainCenterNorm

        return {RMSGainCenterNorm: norm}
    return {torch.nn.RMSNorm: norm}


def write(owner, name, value):
    """setattr, and back to an inherited attribute where it was one."""
    inherited = next((vars(base)[name] for base in owner.__mro__[1:] if name in vars(base)), None)
    if value is inherited:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


CALLS = ("muse_glimmer", "qwen3_5") if CURRENT else ("llama3", "qwen3", "deepseek_v3") if PREVIOUS else ()


@pytest.mark.parametrize("name", CALLS)
def test_norms_in_bfloat16_are_no_further_from_exact_than_the_originals(name):
    if CURRENT:
        _, loss = current(name, dtype=torch.bfloat16, change=families.first_layers(4))
    else:
        _, loss = earlier(name, dtype=torch.bfloat16, **TWO)
    for cls, formula in classes(name).items():
        original = cls.forward
        with npu_patch.scope("attention"), recording(cls, "forward", write) as calls:
            loss().backward()
        assert calls
        assert cls.forward is original
        with npu_patch.scope("rms_norm"):
            fused = cls.forward
            assert fused is not original
            counts = Counts()
            assert_no_worse(fused, original, formula, calls)
            hits, reasons = counts.take("rms_norm")
        assert hits >= len(calls)
        assert reasons == {}
