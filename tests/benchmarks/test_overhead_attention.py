"""What npu_patch's own Python costs per patched call of an attention; test_overhead.py says how it is judged."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

import npu_patch

pytestmark = pytest.mark.xdist_group("time")

WINDOW = 4
ENDS = (3, 8, 16)


@pytest.fixture
def triangle(device):
    """The mask of the operator's compressed modes."""
    return torch.ones(2048, 2048, device=device).triu(1).bool()


@pytest.fixture
def layer():
    return SimpleNamespace(num_key_value_groups=2, is_causal=True, training=True)


def states(device, *, heads_first):
    """Query, key and value of 2 samples of 8 tokens, (B, L, N, D) in memory."""
    found = [torch.randn(2, 8, n, 16, device=device) for n in (4, 2, 2)]
    return [x.transpose(1, 2) for x in found] if heads_first else found


def built(kind, implementation, device):
    """The mask that transformers builds: None for plain causal attention."""
    from transformers import masking_utils

    config = SimpleNamespace(
        _attn_implementation=implementation, sliding_window=WINDOW, attention_chunk_size=3, is_causal=True
    )
    embeddings, padding, positions = torch.empty(2, 8, 4, device=device), None, None
    build = masking_utils.create_causal_mask
    if kind == "window":
        build = masking_utils.create_sliding_window_causal_mask
    if kind == "padding":
        padding = torch.ones(2, 8, dtype=torch.long, device=device)
        padding[0, 0] = 0
    if kind == "packed":
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], list(range(8))], device=device)
    return build(config, embeddings, padding, None, positions)


@pytest.mark.parametrize(
    # Packed documents come so near to the limit (0.385 alone) that it takes a machine that does nothing else.
    "kind",
    ["causal", "full", "window", "padding", pytest.param("packed", marks=pytest.mark.long)],
)
def test_an_sdpa_entry(judge, operators, device, layer, triangle, kind):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    q, k, v = states(device, heads_first=True)
    layer.is_causal = kind != "full"
    arguments = {
        "causal": {"atten_mask": triangle, "sparse_mode": 2},
        "full": {},
        "window": {"atten_mask": triangle, "sparse_mode": 4, "pre_tockens": WINDOW - 1, "next_tockens": 0},
        "padding": {
            "atten_mask": torch.ones(2, 1, 8, 8, dtype=torch.bool, device=device),
            "sparse_mode": 1,
            "inner_precise": 2,
        },
        "packed": {"atten_mask": triangle, "sparse_mode": 3, "actual_seq_qlen": ENDS, "actual_seq_kvlen": ENDS},
    }[kind]

    def bare(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **kwargs):
        operator, (batch, heads, length, _) = torch.ops.npu.npu_fusion_attention.default, query.shape
        if kind == "packed":
            query, key = query.transpose(1, 2).flatten(0, 1), key.transpose(1, 2).flatten(0, 1)
            value = value.transpose(1, 2).flatten(0, 1)
            output = operator(query, key, value, heads, "TND", scale=scaling, **arguments)[0]
            return output.view(batch, length, heads, -1).contiguous(), None
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return operator(query, key, value, heads, "BSND", scale=scaling, **arguments)[0].contiguous(), None

    # As a layer of a model calls it.
    keywords = {"dropout": 0.0, "scaling": 0.25, "position_ids": None, "use_cache": False}
    with npu_patch.scope("attention"):
        mask = built(kind, "sdpa", device) if kind != "full" else None
        assert (mask is None) is (kind in ("causal", "full"))
        patched = ALL_ATTENTION_FUNCTIONS["sdpa"]
        judge(lambda: patched(layer, q, k, v, mask, **keywords), lambda: bare(layer, q, k, v, mask, **keywords))


@pytest.mark.parametrize("kind", ["causal", "window", "packed"])
def test_a_flex_attention(judge, operators, device, triangle, kind):
    from torchtitan.models import common
    from torchtitan.models.common import attention

    module = attention.FlexAttention(attention.FlexAttention.Config()).to(device)
    q, k, v = states(device, heads_first=False)
    arguments = {
        "causal": {"atten_mask": triangle, "sparse_mode": 3},
        "window": {"atten_mask": triangle, "sparse_mode": 4, "pre_tockens": WINDOW - 1, "next_tockens": 0},
        "packed": {"atten_mask": triangle, "sparse_mode": 3, "actual_seq_qlen": ENDS, "actual_seq_kvlen": ENDS},
    }[kind]

    def bare(self, query, key, value, *, attention_masks, scale=None, enable_gqa=False, **kwargs):
        operator = torch.ops.npu.npu_fusion_attention.default
        if kind != "packed":
            return operator(query, key, value, query.shape[2], "BSND", scale=0.25, **arguments)[0]
        q, k, v = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        batch, length, heads, _ = query.shape
        return operator(q, k, v, heads, "TND", scale=0.25, **arguments)[0].view(batch, length, heads, -1)

    with npu_patch.scope("attention"):
        mod = attention.get_causal_mask_mod()
        if kind == "window":
            mod = and_masks(mod, attention.get_sliding_window_mask_mod(WINDOW))
        if kind == "packed":
            positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], list(range(8))], device=device)
            mod = and_masks(mod, attention.get_efficient_causal_mask_mod_for_packed_document(positions))
        masks = common.create_attention_mask(mod, 2, None, 8, 8, device=device)
        assert masks.source.compact.kind == {"packed": "documents", "window": "band"}.get(kind, kind)
        patched = attention.FlexAttention.forward
        keywords = {"attention_masks": masks, "enable_gqa": True}
        judge(lambda: patched(module, q, k, v, **keywords), lambda: bare(module, q, k, v, **keywords))


def test_torchtitans_plain_attention(judge, operators, device, triangle):
    from torchtitan.models.common.attention import ScaledDotProductAttention

    module = ScaledDotProductAttention(ScaledDotProductAttention.Config())
    q, k, v = states(device, heads_first=False)

    def bare(self, query, key, value, *, attention_masks=None, scale=None, enable_gqa=False, is_causal=True):
        return torch.ops.npu.npu_fusion_attention.default(
            query, key, value, query.shape[2], "BSND", scale=0.25, atten_mask=triangle, sparse_mode=2
        )[0]

    with npu_patch.scope("attention"):
        patched = ScaledDotProductAttention.forward
        judge(lambda: patched(module, q, k, v, enable_gqa=True), lambda: bare(module, q, k, v, enable_gqa=True))
