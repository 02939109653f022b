"""Inner attentions and the masks that reach them."""

from __future__ import annotations

import contextlib
import gc
import inspect

import pytest
import torch
from torch.distributed.pipelining.microbatch import _split_block_mask
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask

import npu_patch
from npu_patch.adapters.torchtitan.block_mask import DenseMaskError, NpuBlockMask
from npu_patch.simulator import trace
from tests.adapters.torchtitan.test_mask_meaning import UNKNOWN, causal, dilated, prefix

from .generation import current
from .models import Counts, packed_positions, plain_positions, uncompilable, uncompiled

pytestmark = current

B, L, D = 2, 40, 16
ROWS = ((40,), (7, 1, 32))


def flex():
    from torchtitan.models.common.attention import FlexAttention

    return FlexAttention(FlexAttention.Config()).to("npu")


def qkv(heads=4, kv_heads=2, batch=B, length=L, dtype=torch.float32, value_size=D):
    generator = torch.Generator().manual_seed(9)
    sizes = ((heads, D), (kv_heads, D), (kv_heads, value_size))
    return [
        torch.randn(batch, length, n, size, generator=generator).to("npu", dtype).requires_grad_() for n, size in sizes
    ]


def expected(q, k, v, seen, scale=None):
    """Outputs and gradients by the formula; `seen` is (B, 1 or N, L, L)."""
    tensors = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    q, k, v = tensors
    groups = q.shape[2] // k.shape[2]
    scores = torch.einsum("blnh,bmnh->bnlm", q, k.repeat_interleave(groups, 2)) * (scale or D**-0.5)
    weights = scores.masked_fill(~seen.cpu(), -torch.inf).softmax(-1).nan_to_num()
    out = torch.einsum("bnlm,bmnh->blnh", weights, v.repeat_interleave(groups, 2))
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), tensors)]


def run(module, q, k, v, masks, **kwargs):
    out = module(q, k, v, attention_masks=masks, enable_gqa=True, **kwargs)
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), (q, k, v))]


def assert_close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-5, atol=1e-5)


def decoder_mask(positions, *more):
    """The mask as torchtitan's decoders build it."""
    from torchtitan.models.common import attention, decoder

    class Config:
        inner_attention = attention.FlexAttention.Config()

    mods = [
        attention.get_causal_mask_mod(),
        attention.get_efficient_causal_mask_mod_for_packed_document(positions),
        *more,
    ]
    return decoder.Decoder._create_flex_attention_mask(None, positions, Config, mods)


def window_mod(window):
    from torchtitan.models.common.attention import get_sliding_window_mask_mod

    return get_sliding_window_mask_mod(window)


def build(mod, batch=B, length=L, heads=None):
    from torchtitan.models import common

    return common.create_attention_mask(mod, batch, heads, length, length, device="npu", BLOCK_SIZE=16)


def seen_by(mod, batch=B, heads=None, length=L):
    return create_mask(mod, batch, heads, length, length, device="npu")


@pytest.mark.parametrize("window", [None, 1, 5, L - 1, L])
@pytest.mark.parametrize("rows", [((40,), (40,)), ROWS, ((13, 27),)])
def test_the_masks_of_the_decoders(rows, window):
    tensors, positions = qkv(batch=len(rows)), packed_positions(*rows)
    more = [window_mod(window)] if window is not None else []
    with uncompiled():
        wanted = expected(*tensors, seen_by(decoder_mask(positions, *more).mask_mod, len(rows)))
    with npu_patch.scope("attention"), uncompilable():
        counts = Counts()
        masks = decoder_mask(positions, *more)
        assert isinstance(masks, BlockMask)
        result = run(flex(), *tensors, masks)
        assert counts.take("attention") == (1, {})
    assert_close(result, wanted)


def test_building_a_mask_launches_nothing_and_waits_once():
    positions = packed_positions(*ROWS)
    with npu_patch.scope("attention"), trace() as t:
        decoder_mask(positions)
        decoder_mask(positions, window_mod(5))
    assert t.launches == 0
    assert t.host_syncs == 1


@pytest.mark.parametrize("mod", UNKNOWN)
def test_an_unknown_mask_is_written_out(mod):
    tensors = qkv()
    wanted = expected(*tensors, seen_by(mod, heads=4))
    with npu_patch.scope("attention"), uncompilable():
        counts = Counts()
        masks = build(mod)
        results = [run(flex(), *tensors, masks) for _ in range(2)]
        assert counts.take("attention") == (2, {})
    for result in results:
        assert_close(result, wanted)


def test_an_unknown_mask_is_written_out_once_per_step():
    tensors = qkv()
    with npu_patch.scope("attention"):
        masks = build(prefix)
        run(flex(), *tensors, masks)
        with trace() as t:
            run(flex(), *tensors, masks)
    assert "bitwise_or" not in t.launches_by_op


def test_an_unknown_mask_above_the_limit_is_an_error_that_says_what_to_do():
    with npu_patch.scope("attention"):
        limit = npu_patch.strategy()["attention"]["dense_mask_limit"]
        npu_patch.configure("attention", dense_mask_limit=L - 1)
        try:
            with pytest.raises(DenseMaskError, match=r"dilated.*dense_mask_limit=39.*NPU_PATCH_OPS"):
                build(and_masks(causal, dilated))
            build(causal)
            npu_patch.configure("attention", dense_mask_limit=L)
            build(prefix)
        finally:
            npu_patch.configure("attention", dense_mask_limit=limit)


def test_more_documents_than_the_operator_takes_are_written_out():
    length = 1200
    tensors = qkv(heads=1, kv_heads=1, batch=1, length=length)
    positions = torch.zeros(1, length, dtype=torch.long)
    positions[0, 1::2] = 0
    positions[0, 2:40] = torch.arange(1, 39)
    positions = positions.to("npu")
    with npu_patch.scope("attention"), uncompilable():
        counts = Counts()
        masks = decoder_mask(positions)
        assert len(masks.source.compact.q_ends) > 1024
        result = run(flex(), *tensors, masks)
        assert counts.take("attention") == (1, {})
    with uncompiled():
        wanted = expected(*tensors, seen_by(decoder_mask(positions).mask_mod, 1, length=length))
    assert_close(result, wanted)


def documents(positions):
    with uncompiled():
        return seen_by(decoder_mask(positions).mask_mod)


def moved(mask):
    return mask.to("cpu").to("npu")


def rebuilt(mask):
    """As pipelining and context parallelism rebuild masks."""
    return BlockMask.from_kv_blocks(
        mask.kv_num_blocks,
        mask.kv_indices,
        mask.full_kv_num_blocks,
        mask.full_kv_indices,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask.mask_mod,
        seq_lengths=mask.seq_lengths,
    )


def reassigned(mask):
    part = mask[0:2]
    part.mask_mod = mask.mask_mod
    return part


@pytest.mark.parametrize("change", [moved, rebuilt, reassigned, lambda mask: mask[0:2], lambda mask: mask[:, :, :]])
def test_a_mask_keeps_its_meaning(change):
    positions, tensors = packed_positions(*ROWS), qkv()
    wanted = expected(*tensors, documents(positions))
    with npu_patch.scope("attention"), uncompilable():
        masks = change(decoder_mask(positions))
        assert isinstance(masks, BlockMask)
        counts = Counts()
        with trace() as t:
            result = run(flex(), *tensors, masks)
        assert counts.take("attention") == (1, {})
        assert t.launches_by_op["npu.npu_fusion_attention"] == 1
    assert_close(result, wanted)


@pytest.mark.parametrize("row", [0, 1, -1])
def test_one_sample_of_a_mask(row):
    positions, tensors = packed_positions(*ROWS), [x[[row]].detach().requires_grad_() for x in qkv()]
    wanted = expected(*tensors, documents(positions)[[row]])
    with npu_patch.scope("attention"), uncompilable():
        result = run(flex(), *tensors, decoder_mask(positions)[row])
    assert_close(result, wanted)


def test_the_chunks_of_pipelining():
    positions, tensors = packed_positions(*ROWS), qkv()
    with npu_patch.scope("attention"), uncompilable():
        chunks = _split_block_mask(decoder_mask(positions), 2)
        for row, chunk in enumerate(chunks):
            part = [x[[row]].detach().requires_grad_() for x in tensors]
            assert_close(run(flex(), *part, chunk), expected(*part, documents(positions)[[row]]))


def test_the_block_tensors_are_the_stock_ones():
    positions = packed_positions(*ROWS)
    with uncompiled():
        stock = decoder_mask(positions)
    with npu_patch.scope("attention"), uncompilable():
        ours = decoder_mask(positions)
        assert ours.shape == stock.shape
        assert "kv_indices" not in vars(ours)
        assert not hasattr(ours, "no_such_attribute")
        assert "kv_indices" not in vars(ours)
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "q_num_blocks", "q_indices"):
            assert torch.equal(getattr(ours, name), getattr(stock, name)), name
        assert ours.sparsity() == stock.sparsity()
        assert ours.BLOCK_SIZE == stock.BLOCK_SIZE
        assert ours.as_tuple()[:2] == stock.as_tuple()[:2]


def test_a_foreign_mask_is_evaluated_once():
    tensors = qkv()
    stock = create_block_mask(causal, B, None, L, L, device="npu", BLOCK_SIZE=16)
    with npu_patch.scope("attention"), uncompilable():
        counts = Counts()
        assert_close(run(flex(), *tensors, stock), expected(*tensors, seen_by(causal)))
        with trace() as t:
            run(flex(), *tensors, stock)
        assert counts.take("attention") == (2, {})
    assert t.host_syncs == 0


@pytest.mark.parametrize("batch", [1, None])
def test_one_mask_for_all_samples(batch):
    tensors = qkv()
    stock = create_block_mask(prefix, batch, None, L, L, device="npu", BLOCK_SIZE=16)
    positions = packed_positions((9, 31))
    with npu_patch.scope("attention"), uncompilable():
        for masks in (stock, build(prefix, batch), decoder_mask(positions)):
            seen = seen_by(masks.mask_mod, 1)
            assert_close(run(flex(), *tensors, masks), expected(*tensors, seen.expand(B, -1, -1, -1)))


def late_heads(b, h, q, kv):
    return (q >= kv) & ((h < 3) | (q - kv < 4))


def late_samples(b, h, q, kv):
    return (q >= kv) & ((b < 1) | (q - kv < 4))


def late_samples_of_prefix(b, h, q, kv):
    return prefix(b, h, q, kv) & ((b < 1) | (q - kv < 4))


def every_sample(b, h, q, kv):
    return (q >= kv) & (b >= 0)


@pytest.mark.parametrize("batch", [1, None, B])
@pytest.mark.parametrize("mod", [late_heads, late_samples, late_samples_of_prefix, every_sample])
def test_heads_and_samples_beyond_those_of_the_mask(mod, batch):
    tensors = qkv(heads=8, kv_heads=8)
    wanted = expected(*tensors, seen_by(mod, heads=8))
    stock = create_block_mask(mod, batch, None, L, L, device="npu", BLOCK_SIZE=64)
    with npu_patch.scope("attention"), uncompilable():
        for masks in (build(mod, batch), stock):
            counts = Counts()
            for _ in range(2):
                assert_close(run(flex(), *tensors, masks), wanted)
            assert counts.take("attention") == (2, {})


def test_a_mask_that_holds_for_every_sample_stays_compact():
    tensors = qkv()
    with npu_patch.scope("attention"), trace() as t:
        masks = build(every_sample, None)
        run(flex(), *tensors, masks)
        assert not masks.source._dense
    assert "bitwise_and" not in t.launches_by_op


def test_block_lists_that_hide_more_than_the_mod_are_honoured():
    tensors = qkv()
    counts, columns = torch.tensor([[[1, 2, 1]]]), torch.tensor([[[[0, 2, 1], [1, 0, 2], [2, 0, 0]]]])
    masks = BlockMask.from_kv_blocks(
        counts.int().npu(), columns.int().npu(), BLOCK_SIZE=16, mask_mod=causal, seq_lengths=(L, L)
    )
    seen = torch.zeros(1, 1, 48, 48, dtype=torch.bool)
    seen[..., :16, :16] = seen[..., 16:32, :32] = seen[..., 32:, 32:] = True
    seen = seen[..., :L, :L] & torch.ones(L, L).tril().bool()
    with npu_patch.scope("attention"), uncompilable():
        assert_close(run(flex(), *tensors, masks), expected(*tensors, seen.expand(B, -1, -1, -1)))


def test_blocks_that_are_full_show_what_the_mod_hides():
    tensors = qkv()
    none, every = torch.zeros(1, 1, 3).int(), torch.full((1, 1, 3), 3).int()
    columns = torch.arange(3).expand(1, 1, 3, 3).int().contiguous()
    masks = BlockMask.from_kv_blocks(
        *(x.npu() for x in (none, columns, every, columns)), BLOCK_SIZE=16, mask_mod=causal, seq_lengths=(L, L)
    )
    with npu_patch.scope("attention"), uncompilable():
        seen = torch.ones(B, 1, L, L, dtype=torch.bool)
        assert_close(run(flex(), *tensors, masks), expected(*tensors, seen))


def test_future_tokens_change_nothing():
    positions, (q, k, v) = plain_positions(B, L), qkv()
    with npu_patch.scope("attention"), torch.no_grad():
        masks = decoder_mask(positions)
        before = flex()(q, k, v, attention_masks=masks, enable_gqa=True)
        k[:, 20:], v[:, 20:] = 7.0, -3.0
        after = flex()(q, k, v, attention_masks=masks, enable_gqa=True)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


def fallback_reasons(*args, **kwargs):
    """The counted reasons of a call; the original may fail here, where there is no compiler."""
    with npu_patch.scope("attention"), uncompiled():
        masks = kwargs.pop("masks", None) or decoder_mask(plain_positions(B, L))
        counts = Counts()
        with contextlib.suppress(Exception):
            flex()(*args, attention_masks=masks, **kwargs)
        hits, reasons = counts.take("attention")
    assert hits == 0
    return list(reasons)


def test_what_the_operator_cannot_honour_runs_the_original():
    q, k, v = qkv()
    gqa = {"enable_gqa": True}
    assert fallback_reasons(q, k, v, score_mod=lambda s, b, h, i, j: s * 2, **gqa) == ["a score_mod"]
    assert fallback_reasons(q, k, v) == ["fewer key heads than query heads without enable_gqa"]
    longer = [x.repeat(1, 2, 1, 1) for x in (q, k, v)]
    assert fallback_reasons(*longer, **gqa) == ["the block mask is for another shape"]
    wide = qkv(value_size=2 * D)
    assert fallback_reasons(*wide, **gqa) == ["value head size above query head size"]
    # Context parallelism: the queries of one rank in another order, the keys of all, and a mask made for them.
    shard = create_block_mask(lambda b, h, q, kv: 2 * q + 1 >= kv, B, None, L // 2, L, device="npu")
    parallel = fallback_reasons(q[:, ::2], k, v, masks=shard, **gqa)
    assert parallel == ["more keys than queries, as in context parallelism"]
    assert fallback_reasons(q, k, v, masks={"basic_mask": shard}, **gqa) == ["a dict for a block mask"]
    sliced = create_block_mask(causal, B, None, L, L, device="npu")[:, :, :]
    assert fallback_reasons(q, k, v, masks=sliced, **gqa) == ["the mask_mod cannot be evaluated: RuntimeError"]


@pytest.mark.parametrize("packed", [True, False])
def test_the_log_sum_exp_reaches_an_out_transform(packed):
    (q, k, v), got = qkv(), {}

    def transform(out, lse):
        got["lse"] = lse.cpu().double()
        return out

    with npu_patch.scope("attention"), torch.no_grad():
        counts = Counts()
        masks = decoder_mask(packed_positions(*ROWS)) if packed else build(causal)
        flex()(q, k, v, attention_masks=masks, enable_gqa=True, out_transform=transform)
        assert counts.take("attention") == (1, {})
        seen = seen_by(masks.mask_mod).cpu()
    scores = torch.einsum("blnh,bmnh->bnlm", q, k.repeat_interleave(2, 2)).cpu().double() * D**-0.5
    wanted = scores.masked_fill(~seen, -torch.inf).logsumexp(-1).transpose(1, 2)
    torch.testing.assert_close(got["lse"], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [None, 0.7])
def test_the_scale_is_honoured(scale):
    tensors = qkv()
    with npu_patch.scope("attention"):
        result = run(flex(), *tensors, build(causal), scale=scale)
    assert_close(result, expected(*tensors, seen_by(causal), scale))


def test_signatures_are_the_originals():
    from torchtitan.models.common import attention

    names = ("FlexAttention", "ScaledDotProductAttention", "VarlenAttention")
    before = [inspect.signature(getattr(attention, name).forward) for name in names]
    with npu_patch.scope("attention"):
        assert [inspect.signature(getattr(attention, name).forward) for name in names] == before


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kv_len", [L, L - 8, L + 8])
def test_plain_attention(is_causal, kv_len):
    from torchtitan.models.common.attention import ScaledDotProductAttention

    module = ScaledDotProductAttention(ScaledDotProductAttention.Config()).to("npu")
    q = qkv()[0]
    _, k, v = qkv(length=kv_len)
    seen = torch.ones(L, kv_len, dtype=torch.bool)
    with npu_patch.scope("attention"):
        counts = Counts()
        result = run(module, q, k, v, None, is_causal=is_causal)
        assert counts.take("attention") == (1, {})
    assert_close(result, expected(q, k, v, seen.tril() if is_causal else seen))


@pytest.mark.parametrize("packed", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_the_original_does(cast, dtype, packed):
    from torchtitan.models.common.attention import ScaledDotProductAttention

    module = ScaledDotProductAttention(ScaledDotProductAttention.Config()).to("npu") if packed is None else flex()
    tensors, results = qkv(dtype=dtype), []
    for op in ("rope", "attention"):
        with npu_patch.scope(op), uncompiled():
            masks = {
                None: lambda: None,
                True: lambda: decoder_mask(packed_positions(*ROWS)),
                False: lambda: build(causal),
            }
            masks, counts = masks[packed](), Counts()
            with torch.autocast("npu", cast):
                results.append(run(module, *tensors, masks))
            hits = counts.take("attention")[0]
    assert hits == (dtype is not torch.float64)
    for theirs, ours in zip(*results, strict=True):
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2)


def test_plain_attention_refuses_masks_as_before():
    from torchtitan.models.common.attention import ScaledDotProductAttention

    module = ScaledDotProductAttention(ScaledDotProductAttention.Config())
    with npu_patch.scope("attention"), pytest.raises(ValueError, match="does not support attention_masks"):
        module(*qkv(), attention_masks=build(causal))


def test_masks_on_the_cpu_are_the_original_s():
    from torchtitan.models import common

    with npu_patch.scope("attention"), uncompiled():
        mask = common.create_attention_mask(causal, 1, None, 16, 16, device="cpu")
    assert type(mask) is BlockMask


def test_vision_masks_need_no_compiler():
    from torchtitan.models.common import vision_encoder

    patches = torch.tensor([40, 17]).npu()
    mod = vision_encoder.get_vision_block_mask_mod(patches)
    tensors = qkv()
    with npu_patch.scope("attention"):
        masks = vision_encoder.compiled_create_block_mask(mod, B, None, L, L, device="npu")
        assert isinstance(masks, NpuBlockMask)
        result = run(flex(), *tensors, masks)
    assert_close(result, expected(*tensors, seen_by(mod)))


def test_masks_leave_no_memory_behind():
    tensors = qkv()
    with npu_patch.scope("attention"), torch.no_grad():

        def step():
            for masks in (decoder_mask(packed_positions(*ROWS)), build(dilated), rebuilt(build(causal))):
                flex()(*tensors, attention_masks=masks, enable_gqa=True)

        step()
        gc.collect()
        allocated = torch.npu.memory_allocated()
        for _ in range(10):
            step()
        gc.collect()
        assert torch.npu.memory_allocated() == allocated


@pytest.mark.parametrize("size", [D, 256])
@pytest.mark.parametrize("kind", ["document", "block", "causal document"])
def test_packed_documents_of_every_kind(kind, size):
    from torchtitan.models.common import attention

    positions = packed_positions(*ROWS)
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(B, L, n, size, generator=generator).to("npu").requires_grad_() for n in (4, 2, 2))
    with npu_patch.scope("attention"), uncompilable():
        mods = {
            "document": attention.get_document_mask_mod(positions),
            "block": attention.get_fixed_block_mask_mod(8),
            "causal document": and_masks(causal, attention.get_document_mask_mod(positions)),
        }
        counts = Counts()
        masks = build(mods[kind])
        assert masks.source.compact.kind == "documents"
        result = run(flex(), q, k, v, masks)
        assert counts.take("attention") == (1, {})
    assert_close(result, expected(q, k, v, seen_by(masks.mask_mod), size**-0.5))


def test_type_checking_runs_the_originals(monkeypatch):
    import spmd_types

    monkeypatch.setattr(spmd_types, "is_type_checking", lambda: True)
    monkeypatch.setattr("npu_patch.adapters.torchtitan.typecheck._function_modes", lambda: 1)
    assert fallback_reasons(*qkv(), enable_gqa=True) == ["spmd type checking does not know the fused operators"]


def test_names_imported_while_patched_hold_the_originals_afterwards(monkeypatch):
    import sys
    import types

    from torchtitan.models.common import attention

    original, late = attention.create_attention_mask, types.ModuleType("torchtitan.late")
    monkeypatch.setitem(sys.modules, "torchtitan.late", late)
    with npu_patch.scope("attention"):
        late.build = attention.create_attention_mask
        assert late.build is not original
    assert late.build is original


def test_the_builders_are_found_with_and_without_a_compiler(monkeypatch):
    from torchtitan.models.common import attention

    from npu_patch.adapters.torchtitan import masks

    names = {"create_attention_mask", "get_document_mask_mod", "get_efficient_causal_mask_mod_for_packed_document"}
    assert {target.path for target in masks.find(attention)} == names
    monkeypatch.setattr(attention, "_compiled_create_block_mask", create_block_mask)
    assert {target.path for target in masks.find(attention)} == names


def test_a_module_without_the_names_has_no_targets():
    import types

    from npu_patch.adapters.torchtitan import attention, norms, rope

    empty = types.ModuleType("torchtitan.models.common.attention")
    assert [list(adapter.find(empty)) for adapter in (attention, norms, rope)] == [[], [], []]


def test_a_mask_of_padded_pictures_waits_for_nothing():
    """The number of patches lies on the device, as the encoders have it."""
    from torchtitan.models.common import vision_encoder

    mod = vision_encoder.get_vision_block_mask_mod(torch.tensor([40, 17]).npu())
    tensors = qkv()
    with npu_patch.scope("attention"):
        with trace() as t:
            masks = vision_encoder.compiled_create_block_mask(mod, B, None, L, L, device="npu")
            flex()(*tensors, attention_masks=masks, enable_gqa=True)
        assert t.host_syncs == 0
        assert t.launches_by_op["npu.npu_fusion_attention"] == 1
        # Written out for all layers at once.
        with trace() as t:
            out = flex()(*tensors, attention_masks=masks, enable_gqa=True)
        assert t.launches == 1
    assert not out[1, 17:].any()


def test_masks_of_several_models_are_built_by_one_target_each():
    from torchtitan.models.common import attention, decoder, vision_encoder
    from torchtitan.models.kimi_k2_7 import vision_encoder as kimi

    from npu_patch.adapters.torchtitan import masks

    found = {module: [target.path for target in masks.find(module)] for module in (decoder, vision_encoder, kimi)}
    assert found == {decoder: [], vision_encoder: ["compiled_create_block_mask"], kimi: []}
    original = kimi.compiled_create_block_mask
    with npu_patch.scope("attention"):
        assert kimi.compiled_create_block_mask is vision_encoder.compiled_create_block_mask is not original
        assert decoder.create_attention_mask is attention.create_attention_mask
    assert kimi.compiled_create_block_mask is original
