"""Masks that are written out as numbers: which are known to hold zero and the lowest number, and what that gives."""

from __future__ import annotations

import pytest
import torch

import npu_patch
import npu_patch.simulator
from npu_patch.adapters.transformers import masks
from npu_patch.discovery.additive_masks import recognise_additive_mask

from ...support.numerics import assert_same_training, relative_error
from . import tiny
from .tiny import Counting

FAMILIES = {
    "opt": {"hidden_size": 96, "word_embed_proj_dim": 96, "ffn_dim": 96, "dropout": 0.0},
    "gpt2": {"hidden_size": 96, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "persimmon": {"hidden_size": 96, "head_dim": 24},
}
"""Models whose masks transformers 4 writes out as numbers, with heads of 24 channels: no power of two scales them."""


def padding(ids: torch.Tensor) -> torch.Tensor:
    keep = torch.ones_like(ids)
    keep[0, :5], keep[1, -3:] = 0, 0
    return keep


@pytest.mark.parametrize("kind", FAMILIES)
def test_padded_batches_train_the_same_and_their_mask_is_made_once(kind):
    model, ids = tiny.any_model(kind, **FAMILIES[kind]), tiny.tokens()
    keep = padding(ids)
    given = {"attention_mask": keep, "labels": ids.masked_fill(keep == 0, -100)}
    stock = tiny.step(model, ids, **given)
    with npu_patch.scope("attention"):
        counting = Counting()
        with npu_patch.simulator.trace() as trace:
            patched = tiny.step(model, ids, **given)
        assert (counting.hits()["attention"], counting.fallbacks()) == (2, {})
        assert trace.launches_by_op.get("logical_not", 0) + trace.launches_by_op.get("ne", 0) == 1
    assert_same_training(stock, patched)


@pytest.mark.parametrize("kind", FAMILIES)
def test_padding_in_bfloat16_uses_the_operator(kind):
    model, ids = tiny.any_model(kind, torch.bfloat16, **FAMILIES[kind]), tiny.tokens()
    keep = padding(ids)
    with torch.no_grad():
        stock = model(input_ids=ids, attention_mask=keep, use_cache=False).logits[keep.bool()]
        with npu_patch.scope("attention"):
            counting = Counting()
            ours = model(input_ids=ids, attention_mask=keep, use_cache=False).logits[keep.bool()]
            assert (counting.hits()["attention"], counting.fallbacks()) == (2, {})
    assert relative_error(ours, stock) < 2e-2


# ---- the functions of transformers 4 ---------------------------------------------------------------------------------


@pytest.fixture
def functions():
    module = pytest.importorskip("transformers.modeling_attn_mask_utils", reason="of transformers 4")
    with npu_patch.scope("attention"):
        yield module


def test_what_they_write_out_is_known(functions):
    keep = torch.ones(2, 6, dtype=torch.long)
    keep[1, :2] = 0
    keep, embeddings = keep.to("npu"), torch.zeros(2, 6, 8, dtype=torch.bfloat16, device="npu")
    made = [
        functions._prepare_4d_causal_attention_mask(keep, (2, 6), embeddings, 0),
        functions._prepare_4d_causal_attention_mask_for_sdpa(keep, (2, 6), embeddings, 0, 3),
        functions._prepare_4d_attention_mask(keep, torch.bfloat16),
        functions._prepare_4d_attention_mask_for_sdpa(keep, torch.bfloat16),
        functions._create_4d_causal_attention_mask((2, 6), torch.bfloat16, keep.device),
    ]
    unmasked = functions.AttentionMaskConverter._unmask_unattended(made[0], torch.finfo(torch.bfloat16).min)
    for mask in (*made, unmasked):
        assert masks.is_hard(mask)
        assert set(mask.unique().tolist()) <= {0.0, torch.finfo(torch.bfloat16).min}
    assert masks.is_hard(made[0][:, :, :, :4])
    assert not masks.is_hard(made[0] * 0.5)
    made[0].add_(1.0)
    assert not masks.is_hard(made[0])


def test_a_mask_of_the_users_own_stays_unknown(functions):
    from transformers.models.opt.modeling_opt import OPTDecoder

    soft = torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(1)).to("npu")
    embeddings = torch.zeros(2, 6, 8, device="npu")
    given = {"sequence_length": 6, "target_length": 6, "dtype": torch.float32, "batch_size": 2}
    through = OPTDecoder._prepare_4d_causal_attention_mask_with_cache_position(
        soft, cache_position=torch.arange(6, device="npu"), **given
    )
    assert through is soft
    assert functions._prepare_4d_causal_attention_mask_for_sdpa(soft, (2, 6), embeddings, 0) is soft
    unmasked = functions.AttentionMaskConverter._unmask_unattended(soft, torch.finfo(torch.float32).min)
    assert not masks.is_hard(soft)
    assert not masks.is_hard(unmasked)


def test_everything_is_the_original_again_after_the_scope():
    functions = pytest.importorskip("transformers.modeling_attn_mask_utils", reason="of transformers 4")
    from transformers.models.bert import modeling_bert
    from transformers.models.opt.modeling_opt import OPTDecoder

    name = "_prepare_4d_causal_attention_mask_with_cache_position"
    before = functions._prepare_4d_attention_mask_for_sdpa, vars(OPTDecoder)[name]
    with npu_patch.scope("attention"):
        assert modeling_bert._prepare_4d_attention_mask_for_sdpa is functions._prepare_4d_attention_mask_for_sdpa
        assert functions._prepare_4d_attention_mask_for_sdpa is not before[0]
        assert isinstance(vars(OPTDecoder)[name], staticmethod)
        assert vars(OPTDecoder)[name] is not before[1]
    assert modeling_bert._prepare_4d_attention_mask_for_sdpa is before[0]
    assert vars(OPTDecoder)[name] is before[1]


def _soft(attention_mask, dtype, input_shape):
    return attention_mask[:, None, None, :].expand(3, 1, 4, 4).to(dtype) * -0.5


def _half(attention_mask, dtype, input_shape):
    shown = attention_mask[:, None, None, :].expand(3, 1, 4, 4) > 0
    return torch.zeros(3, 1, 4, 4, dtype=dtype).masked_fill(~shown, torch.finfo(dtype).min / 2)


def _other(attention_mask, dtype, heads):
    return torch.full((3, 1, 4, 4), torch.finfo(dtype).min)


def _right(attention_mask, dtype, input_shape):
    shown = attention_mask[:, None, None, :].expand(3, 1, 4, 4) > 0
    return torch.zeros(3, 1, 4, 4, dtype=dtype).masked_fill(~shown, torch.finfo(dtype).min)


def test_only_functions_of_the_two_numbers_are_recognised():
    assert recognise_additive_mask(_right)
    assert not any(recognise_additive_mask(function) for function in (_soft, _half, _other, len))
