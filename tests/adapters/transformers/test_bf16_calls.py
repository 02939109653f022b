"""bfloat16: replayed call by call, the fused result is no further from float64 than the original's."""

from __future__ import annotations

import importlib

import pytest
import torch

import npu_patch

from ...support.numerics import assert_no_worse, recording
from . import tiny
from .tiny import FAMILIES


def rms_norm(offset: float):
    def formula(self, x):
        eps = getattr(self, "variance_epsilon", getattr(self, "eps", None))
        return (self.weight + offset) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    return formula


def rope(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turn(x):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    return turn(q), turn(k)


def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **kwargs):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is None:
        attention_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return (scores.masked_fill(~attention_mask, -torch.inf).softmax(-1) @ value).transpose(1, 2), None


def modeling(family: str):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def judge(owner, name, formula, family, **places):
    built, ids = tiny.model(family, torch.bfloat16), tiny.tokens(length=40)
    with recording(owner, name, **places) as calls:
        built(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    read = places.get("read", getattr)
    original = read(owner, name)
    with npu_patch.scope("rms_norm", "rope", "attention"):
        fused = read(owner, name)
        assert fused is not original
        counting = tiny.Counting()
        assert_no_worse(fused, original, formula, calls)
        assert sum(counting.hits().values()) >= len(calls)
        assert not counting.fallbacks()


def test_each_norm_call(family):
    module = modeling(family)
    name = next(name for name in vars(module) if name.endswith("RMSNorm"))
    judge(getattr(module, name), "forward", rms_norm(1.0 if family == "gemma3" else 0.0), family)


def test_each_rope_call(family):
    judge(modeling(family), "apply_rotary_pos_emb", rope, family)


def test_each_attention_call(family):
    from transformers.modeling_utils import AttentionInterface

    judge(
        AttentionInterface,
        "sdpa",
        attention,
        family,
        read=lambda owner, key: owner._global_mapping[key],
        write=lambda owner, key, value: owner.register(key, value),
    )
