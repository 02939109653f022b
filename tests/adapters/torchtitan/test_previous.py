"""The attentions of torchtitan 0.2.2, which are (B, N, L, H)."""

from __future__ import annotations

import contextlib
import functools
import inspect

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_mask

import npu_patch
from npu_patch.simulator import trace
from tests.support.numerics import assert_no_worse, assert_same_training, recording, relative_error, training_step

from .models import Counts

attention = pytest.importorskip("torchtitan.models.attention", reason="torchtitan 0.2.2")

from . import previous  # noqa: E402
from .previous import documents, uncompilable, uncompiled  # noqa: E402
from .stand_ins import attend, varlen_attn  # noqa: E402

B, L, D = 2, 40, 16
ROWS = (40,), (7, 1, 32)


def qkv(heads=4, kv_heads=2, dtype=torch.float32, length=L, size=D, value_size=D):
    """As the models hand them over: views of (B, L, N, H)."""
    generator = torch.Generator().manual_seed(9)
    sizes = ((heads, size), (kv_heads, size), (kv_heads, value_size))
    return [
        torch.randn(B, length, n, d, generator=generator).to("npu", dtype).requires_grad_().transpose(1, 2)
        for n, d in sizes
    ]


def expected(tensors, seen, scale=None):
    """Output and log-sum-exp by the formula in float64, and the tensors that they depend on."""
    tensors = [x.detach().cpu().double().requires_grad_() for x in tensors]
    return (*attend(*tensors, seen.cpu(), scale), tensors)


def flex(*args, **kwargs):
    return attention.FlexAttentionWrapper().to("npu")(*args, **kwargs)


def mask_of(tokens, *more, batch=B):
    mods = [attention.get_causal_mask_mod(), attention.get_document_mask_mod(tokens, previous.EOS), *more]
    return attention.create_attention_mask(and_masks(*mods), batch, None, L, L)


MASKS = {
    "causal": lambda: attention.create_attention_mask(attention.get_causal_mask_mod(), 1, None, L, L),
    "documents": lambda: mask_of(documents(*ROWS)),
    "windows": lambda: mask_of(documents(*ROWS), attention.get_sliding_window_mask_mod(5)),
    "chunks": lambda: mask_of(documents(*ROWS), attention.get_fixed_block_mask_mod(9)),
    "not causal": lambda: attention.create_attention_mask(
        attention.get_document_mask_mod(documents(*ROWS), previous.EOS), B, None, L, L
    ),
    "none": lambda: None,
}


def seen_by(name):
    with uncompiled():
        mask = MASKS[name]()
    if mask is None:
        return torch.ones(B, 1, L, L, dtype=torch.bool)
    return create_mask(mask.mask_mod, B, None, L, L, device="npu")


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_flex_attention(name, return_lse):
    tensors, seen = qkv(), seen_by(name)
    with npu_patch.scope("attention"), uncompilable():
        counts, mask = Counts(), MASKS[name]()
        result = flex(*tensors, block_mask=mask, enable_gqa=True, scale=0.3, return_lse=return_lse)
        assert counts.take("attention") == (1, {})
        assert mask is None or not mask.source._dense
    out, lse = result if return_lse else (result, None)
    theirs, their_lse, leaves = expected(tensors, seen, 0.3)
    ours = out.sin().sum() + (0 if lse is None else lse.cos().sum())
    theirs = theirs.sin().sum() + (0 if lse is None else their_lse.cos().sum())
    assert out.shape == (B, 4, L, D)
    assert relative_error(ours, theirs) < 1e-5
    for a, b in zip(torch.autograd.grad(ours, tensors), torch.autograd.grad(theirs, leaves), strict=True):
        assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize("is_causal", [None, True, False])
def test_plain_attention(is_causal):
    tensors = qkv(size=24)
    options = {} if is_causal is None else {"is_causal": is_causal}
    module = attention.ScaledDotProductAttentionWrapper()
    with npu_patch.scope("attention"):
        counts = Counts()
        out = module(*tensors, enable_gqa=True, scale=0.3, **options)
        assert counts.take("attention") == (1, {})
    seen = torch.ones(L, L, dtype=torch.bool)
    theirs, _, leaves = expected(tensors, seen if is_causal is False else seen.tril(), 0.3)
    assert relative_error(out, theirs) < 1e-5
    gradients = torch.autograd.grad(out.sin().sum(), tensors), torch.autograd.grad(theirs.sin().sum(), leaves)
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(*gradients, strict=True))


def packed(module, q, k, v, metadata, scale=None):
    tensors = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    return varlen_attn(*tensors, metadata.cu_seq_q, metadata.cu_seq_k, 0, 0, scale=scale, window_size=(-1, 0))


def varlen(*args, **kwargs):
    with npu_patch.scope("attention"), uncompilable():
        counts = Counts()
        out = attention.VarlenAttentionWrapper.forward(*args, **kwargs)
        assert counts.take("attention") == (1, {})
    return out


def stock_varlen(*args, **kwargs):
    with uncompiled():
        return attention.VarlenAttentionWrapper.forward(*args, **kwargs)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_packed_documents(scale):
    module, metadata = attention.VarlenAttentionWrapper(), None
    tensors = qkv(dtype=torch.bfloat16)
    with npu_patch.scope("attention"), trace() as t:
        metadata = attention.create_varlen_metadata_for_document(documents(*ROWS), previous.EOS)
    assert t.host_syncs == 1
    theirs = attention.create_varlen_metadata_for_document(documents(*ROWS), previous.EOS)
    assert torch.equal(metadata.cu_seq_q, theirs.cu_seq_q)
    assert metadata[2:] == theirs[2:]
    assert metadata.cu_seq_q.dtype is theirs.cu_seq_q.dtype
    with uncompiled(), recording(attention.VarlenAttentionWrapper, "forward") as calls:
        module(*tensors, metadata, scale).float().sin().sum().backward()
    assert_no_worse(varlen, stock_varlen, packed, calls)
    assert varlen(module, *tensors, metadata, scale).is_contiguous()


def reasons(call):
    with npu_patch.scope("attention"):
        counts = Counts()
        with contextlib.suppress(Exception):
            call()
        hits, found = counts.take("attention")
    assert hits == 0
    return list(found)


def test_what_the_operator_cannot_honour_runs_the_original(monkeypatch):
    q, k, v = qkv()
    assert reasons(lambda: flex(q, k, v, block_mask={"rope": None}, enable_gqa=True)) == ["a dict for a block mask"]
    assert reasons(lambda: flex(q, k, v, score_mod=lambda s, *_: s, enable_gqa=True)) == ["a score_mod"]
    assert reasons(lambda: flex(q, k, v)) == ["fewer key heads than query heads without enable_gqa"]
    assert reasons(lambda: flex(q[0], k[0], v[0])) == ["query is not BNLH"]
    plain = attention.ScaledDotProductAttentionWrapper()
    assert reasons(lambda: plain(q, k, v)) == ["fewer key heads than query heads without enable_gqa"]
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *args, **kwargs: q)
    assert reasons(lambda: plain(q, k, v, enable_gqa=True)) == [
        "scaled_dot_product_attention is somebody else's, as in context parallelism"
    ]


def test_a_score_mod_is_ignored_as_the_original_ignores_it():
    q, k, v = qkv()
    with npu_patch.scope("attention"), uncompiled(), torch.no_grad():
        with_mod = flex(q, k, v, score_mod=lambda score, *_: score * 0, enable_gqa=True)
        torch.testing.assert_close(with_mod, flex(q, k, v, enable_gqa=True), rtol=1e-4, atol=1e-5)


def test_signatures_are_the_originals():
    names = ("FlexAttentionWrapper", "VarlenAttentionWrapper", "ScaledDotProductAttentionWrapper")
    before = [inspect.signature(getattr(attention, name).forward) for name in names]
    with npu_patch.scope("attention"):
        assert [inspect.signature(getattr(attention, name).forward) for name in names] == before


# ---- models ----------------------------------------------------------------------------------------------------------

CHANGED = {"n_layers": 2}
MODELS = {  # family, flavor, changes and attentions
    "llama3": ("llama3", "debugmodel", CHANGED, 2),
    "llama3 flex": ("llama3", "debugmodel_flex_attn", CHANGED, 2),
    "qwen3": ("qwen3", "debugmodel", CHANGED, 2),
    "qwen3 flex": ("qwen3", "debugmodel", {**CHANGED, "attn_type": "flex", "attn_mask_type": "block_causal"}, 2),
    "deepseek_v3": ("deepseek_v3", "debugmodel", {**CHANGED, "n_dense_layers": 2}, 2),
    "deepseek_v3 flex": ("deepseek_v3", "debugmodel_flex_attn", {**CHANGED, "n_dense_layers": 2}, 2),
    "gpt_oss": ("gpt_oss", "debugmodel", {**CHANGED, "sliding_window_size": 9}, 2),
    "gpt_oss documents": ("gpt_oss", "debugmodel", {**CHANGED, "attn_mask_type": "block_causal"}, 2),
    "llama4": ("llama4", "debugmodel", CHANGED, 2),
}


@functools.cache
def model(name):
    family, flavor, changes, _ = MODELS[name]
    return previous.build(family, flavor, **changes)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_same_in_float32(name):
    subject = model(name)
    loss = previous.loss_of(subject, documents((48,), (7, 1, 40)))
    with uncompiled():
        expected = training_step(subject, loss)
    with npu_patch.scope("attention"), uncompilable():
        counts = Counts()
        patched = training_step(subject, loss)
        assert counts.take("attention") == (MODELS[name][3], {})
        with trace(list(subject.parameters())) as t:
            loss().backward()
    assert t.launches_by_op["npu.npu_fusion_attention"] == MODELS[name][3]
    documented = "flex" in name or "documents" in name
    assert t.host_syncs == (1 if documented else 0)  # one copy of the tokens, to find where documents end
    assert_same_training(expected, patched)


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_models_of_packed_documents(family):
    """Flash attention takes half types only, so that calls are judged."""
    changes = {**CHANGED, "attn_type": "varlen", "attn_mask_type": "block_causal"}
    subject = previous.build(family, dtype=torch.bfloat16, **changes)
    loss = previous.loss_of(subject, documents((48,), (7, 1, 40)))
    with uncompiled(), recording(attention.VarlenAttentionWrapper, "forward") as calls:
        loss().backward()
    assert len(calls) == 2
    assert_no_worse(varlen, stock_varlen, packed, calls)
    with npu_patch.scope("attention"), uncompilable():
        counts = Counts()
        with trace() as t:
            loss().backward()
        assert counts.take("attention") == (2, {})
    assert t.host_syncs == 1


def test_the_masks_of_llama4_are_the_original_s_fault():
    """It hands its attention both masks at once, which no attention takes."""
    subject = previous.build("llama4", "debugmodel_irope", **CHANGED)
    loss = previous.loss_of(subject, documents((48,), (7, 1, 40)))
    with uncompiled(), pytest.raises(Exception) as without:  # noqa: PT011
        loss()
    counts = Counts()
    with npu_patch.scope("attention"), uncompiled(), pytest.raises(type(without.value)):
        loss()
    assert counts.take("attention")[1] == {"a dict for a block mask": 1}


def test_the_masks_of_llama4_serve_its_layers():
    """As they would if it chose the one of the layer."""
    subject, tokens = previous.build("llama4", "debugmodel_irope", **CHANGED, fixed_attn_block_size=9), documents(*ROWS)
    tensors = qkv(4, 2)
    for key, name in (("rope", "chunks"), ("nope", "documents")):
        with npu_patch.scope("attention"), uncompilable():
            mask = subject.get_attention_masks(tokens, previous.Tokenizer())[key]
            out = flex(*tensors, block_mask=mask, enable_gqa=True)
            assert mask.source.compact.kind == "documents"
        assert relative_error(out, expected(tensors, seen_by(name))[0]) < 1e-5


def test_activation_checkpointing_keeps_the_attention():
    from torchtitan.config.job_config import ActivationCheckpoint
    from torchtitan.distributed.activation_checkpoint import apply_ac

    settings = ActivationCheckpoint(mode="selective", selective_ac_option="op")
    loss_and_gradients, launches = [], []
    for on in (False, True):
        subject = previous.build("llama3", **CHANGED)
        with npu_patch.scope("attention"):
            if on:
                apply_ac(subject, settings, model_compile_enabled=False, op_sac_save_list=set())
            loss = previous.loss_of(subject, documents((48,), (7, 1, 40)))
            with trace() as t:
                loss().backward()
            launches.append(t.launches_by_op["npu.npu_fusion_attention"])
        loss_and_gradients.append([p.grad for p in subject.parameters()])
    assert launches == [2, 2]
    assert all(torch.equal(a, b) for a, b in zip(*loss_and_gradients, strict=True))


def test_undo_leaves_the_identical_originals():
    from torchtitan.distributed import activation_checkpoint
    from torchtitan.models.llama3.model import model as llama3

    def places():
        names = ("FlexAttentionWrapper", "VarlenAttentionWrapper", "ScaledDotProductAttentionWrapper")
        functions = ("create_attention_mask", "get_document_mask_mod", "create_varlen_metadata_for_document")
        return (
            *(vars(getattr(attention, name))["forward"] for name in names),
            *(getattr(attention, name) for name in functions),
            *(getattr(llama3, name) for name in functions),
            activation_checkpoint._apply_op_sac,
        )

    before = places()
    with npu_patch.scope("attention"):
        assert all(a is not b for a, b in zip(places(), before, strict=True))
    assert all(a is b for a, b in zip(places(), before, strict=True))
