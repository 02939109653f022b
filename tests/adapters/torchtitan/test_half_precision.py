"""Per patched call in bfloat16: no further from the float64 formula than the original."""

from __future__ import annotations

import functools

import pytest
import torch

import npu_patch
from tests.support.numerics import assert_no_worse, recording

from .generation import current
from .models import build, loss_of, packed_positions, uncompiled

pytestmark = current

DOCUMENTS = ((20, 28), (7, 1, 40))


def write(owner, name, value):
    """setattr, and back to an inherited attribute where it was one."""
    inherited = next((vars(base)[name] for base in owner.__mro__[1:] if name in vars(base)), None)
    if value is inherited:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


@functools.cache
def recorded(family):
    """The calls of one unpatched step: class → (original forward, calls)."""
    from torchtitan.models.common import attention, nn_modules, rope

    classes = nn_modules.RMSNorm, rope.ComplexRoPE, rope.CosSinRoPE, attention.FlexAttention
    originals = {cls.__name__: cls.forward for cls in classes}
    subject = build(family, torch.bfloat16)
    norm, complex_rope, cos_sin_rope, flex = (recording(cls, "forward", write) for cls in classes)
    with uncompiled(), norm as a, complex_rope as b, cos_sin_rope as c, flex as d:
        loss_of(subject, packed_positions(*DOCUMENTS))().backward()
    return dict(zip(originals, zip(originals.values(), (a, b, c, d), strict=True), strict=True))


def norm_formula(self, x):
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
    return scaled if self.weight is None else scaled * self.weight


def rope_formula(self, query, key, positions=None):
    rows = self.cache[positions]  # (B, L, width), made in float32
    if rows.is_complex():
        cos, sin = (part.double().repeat_interleave(2, -1) for part in (rows.real, rows.imag))
    else:
        cos, sin = rows.double().chunk(2, -1)

    def rotated(x):
        if rows.is_complex():
            turned = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
        else:
            first, second = x.chunk(2, -1)
            turned = torch.cat((-second, first), -1)
        return x * cos.unsqueeze(2) + turned * sin.unsqueeze(2)

    return rotated(query), rotated(key)


def attention_formula(self, q, k, v, *, attention_masks, scale=None, enable_gqa=False, **_):
    document = torch.stack([torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in DOCUMENTS])
    seen = (document.unsqueeze(1) == document.unsqueeze(2)) & torch.ones(q.shape[1], q.shape[1]).tril().bool()
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("blnh,bmnh->bnlm", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1)
    return torch.einsum("bnlm,bmnh->blnh", weights, v)


def check(cls, formula, family):
    original, calls = recorded(family)[cls.__name__]
    assert calls
    with npu_patch.scope("rms_norm", "rope", "attention"), uncompiled():
        fused = cls.forward
        assert fused is not original
        before = {row.target: row.hits for row in npu_patch.status()}
        assert_no_worse(fused, original, formula, calls)
        after = {row.target: row.hits for row in npu_patch.status()}
    target = f"{cls.__module__}:{cls.__name__}.forward"
    assert after[target] > before.get(target, 0)


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_norms(family):
    from torchtitan.models.common.nn_modules import RMSNorm

    check(RMSNorm, norm_formula, family)


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_rotary_embeddings(family):
    from torchtitan.models.common import rope

    check(rope.ComplexRoPE if family == "llama3" else rope.CosSinRoPE, rope_formula, family)


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_attentions(family):
    from torchtitan.models.common.attention import FlexAttention

    check(FlexAttention, attention_formula, family)
