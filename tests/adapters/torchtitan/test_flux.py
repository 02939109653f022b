"""Flux of both generations of torchtitan: full attention over text and picture."""

from __future__ import annotations

import functools
import zlib

import pytest
import torch

import npu_patch
from npu_patch.simulator import trace
from tests.support.numerics import assert_same_training, training_step

from .models import Counts

flux = pytest.importorskip("torchtitan.models.flux")

DEPTH = 1  # of each kind of block


def config():
    """The debug model, of less depth and width, and whether it is one of the previous generation."""
    if hasattr(flux, "model_registry"):
        made = flux.model_registry("flux-debug").model
        made.double_blocks, made.single_blocks = made.double_blocks[:DEPTH], made.single_blocks[:DEPTH]
        return made, False
    from torchtitan.models.flux.model.args import FluxModelArgs

    sizes = {"depth": DEPTH, "depth_single_blocks": DEPTH, "hidden_size": 256, "num_heads": 2, "context_in_dim": 64}
    return FluxModelArgs(in_channels=64, out_channels=64, vec_in_dim=32, axes_dim=(16, 56, 56), **sizes), True


@functools.cache
def model():
    made, previous = config()
    with torch.device("meta"):
        subject = flux.get_train_spec().model_cls(made) if previous else made.build()
    subject.to_empty(device="cpu")
    with torch.no_grad():
        subject.init_weights(buffer_device=torch.device("cpu")) if previous else subject.init_weights()
        for name, parameter in subject.named_parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            parameter.copy_(1 + 0.1 * noise if "norm" in name and "lin" not in name else 0.03 * noise)
    return subject.to("npu").train()


def loss():
    subject = model()
    generator = torch.Generator().manual_seed(5)

    def random(*shape):
        return torch.randn(*shape, generator=generator).npu()

    picture, text = random(2, 16, subject.img_in.in_features), random(2, 8, subject.txt_in.in_features)
    vector = next(m for m in subject.vector_in.modules() if hasattr(m, "in_features")).in_features
    out = subject(
        img=picture,
        img_ids=torch.arange(96).reshape(2, 16, 3).float().npu() % 7,
        txt=text,
        txt_ids=torch.zeros(2, 8, 3).npu(),
        timesteps=torch.tensor([0.2, 0.7]).npu(),
        y=random(2, vector),
    )
    return (out - 1.0).square().mean()


def test_flux_computes_the_same_in_float32():
    expected = training_step(model(), loss)
    with npu_patch.scope("attention"):
        counts = Counts()
        patched = training_step(model(), loss)
        assert counts.take("attention") == (2 * DEPTH, {})
        with trace() as t, torch.no_grad():
            loss()
    assert t.launches_by_op["npu.npu_fusion_attention"] == 2 * DEPTH
    with npu_patch.scope(attention=False), trace() as stock, torch.no_grad():
        loss()
    assert t.host_syncs == stock.host_syncs
    assert_same_training(expected, patched)


def test_what_comes_first_sees_what_comes_last():
    with npu_patch.scope("attention"), torch.no_grad():
        counts, subject = Counts(), model()
        kinds = [m for m in subject.modules() if type(m).__name__.startswith("ScaledDotProductAttention")]
        shape = (2, 6, 2, 128) if type(kinds[0]).__name__ == "ScaledDotProductAttention" else (2, 2, 6, 128)
        tokens = 1 if shape[1] == 6 else 2
        q = k = v = torch.randn(shape, generator=torch.Generator().manual_seed(1)).npu()
        changed = v.clone()
        changed.select(tokens, 5).mul_(-1)
        for is_causal in (False, True):
            before, after = (kinds[0](q, k, x, is_causal=is_causal) for x in (v, changed))
            same = torch.equal(before.select(tokens, 0), after.select(tokens, 0))
            assert same == is_causal
        assert counts.take("attention") == (4, {})
