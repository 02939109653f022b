"""Attention over packed documents."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch

import npu_patch
from npu_patch.adapters.torchtitan import document_ends
from npu_patch.simulator import trace
from tests.support.numerics import assert_no_worse, recording, training_step

from .models import Counts, packed_positions, plain_positions
from .stand_ins import documents_seen, varlen_attn, written_out

attention = pytest.importorskip("torchtitan.models.common.attention", reason="torchtitan 0.3.0")

B, L, D = 2, 40, 16
ROWS = ((40,), (7, 1, 32))


def varlen(window=(-1, 0)):
    return attention.VarlenAttention(attention.VarlenAttention.Config(window_size=window)).to("npu")


def qkv(heads=4, kv_heads=2, batch=B, length=L, dtype=torch.bfloat16, size=D, value_size=D, seed=9):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((heads, size), (kv_heads, size), (kv_heads, value_size))
    return [torch.randn(batch, length, n, d, generator=generator).to("npu", dtype).requires_grad_() for n, d in sizes]


def metadata(positions, **kwargs):
    return attention.create_varlen_metadata_for_document(positions, **kwargs)


def given(q_ends, k_ends=None):
    """Metadata that torchtitan did not make."""
    q_ends = torch.tensor(q_ends, dtype=torch.int32, device="npu")
    k_ends = q_ends if k_ends is None else torch.tensor(k_ends, dtype=torch.int32, device="npu")
    return attention.VarlenMetadata(q_ends, k_ends, L, L)


def formula(module, q, k, v, *, attention_masks, scale=None, out_transform=None, **kwargs):
    """In whatever type comes in, as the forward does it."""
    ends = attention_masks.cu_seq_q, attention_masks.cu_seq_k, 0, 0
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    out, lse = varlen_attn(*packed, *ends, scale=scale, window_size=module.window_size, return_aux=True)
    out, lse = out.unflatten(0, q.shape[:2]), lse.transpose(0, 1).unflatten(0, q.shape[:2])
    return out if out_transform is None else out_transform(out, lse)


def fused(*args, **kwargs):
    with npu_patch.scope("attention"):
        counts = Counts()
        out = type(args[0]).forward(*args, **kwargs)
        assert counts.take("attention") == (1, {})
    return out


def stock(*args, **kwargs):
    with written_out():
        return type(args[0]).forward(*args, **kwargs)


def record(call):
    """Calls of the stock forward with the gradients that came back to them."""
    with written_out(), recording(attention.VarlenAttention, "forward") as calls:
        call().float().sin().sum().backward()
    return calls


def with_lse(out, lse):
    return out * torch.sigmoid(lse - 0.3).unsqueeze(-1).to(out.dtype)


@pytest.mark.parametrize("transform", [None, with_lse])
@pytest.mark.parametrize("window", [(-1, 0), (0, 0), (4, 0), (L, 0), (-1, -1)])
@pytest.mark.parametrize("rows", [((40,), (40,)), ROWS, ((13, 27),)])
def test_a_call_is_no_worse_than_the_original(rows, window, transform):
    module, calls = varlen(window), []
    for seed in range(4):
        tensors = qkv(batch=len(rows), seed=seed)
        options = {"attention_masks": metadata(packed_positions(*rows)), "enable_gqa": True, "out_transform": transform}
        calls += record(lambda t=tensors, o=options: module(*t, **o))
    assert_no_worse(fused, stock, formula, calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_computes_in_bfloat16_and_gives_back_the_type_of_the_query(dtype):
    module, tensors = varlen(), qkv(dtype=dtype)
    options = {"attention_masks": metadata(packed_positions(*ROWS)), "enable_gqa": True}
    ours, theirs = fused(module, *tensors, **options), stock(module, *tensors, **options)
    assert ours.dtype is theirs.dtype is dtype
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    assert torch.equal(ours, ours.bfloat16().to(dtype))


def test_heads_of_mla():
    module, tensors = varlen(), qkv(heads=2, kv_heads=2, size=24, value_size=16)
    options = {"attention_masks": metadata(packed_positions(*ROWS)), "scale": 0.114, "out_transform": with_lse}
    assert_no_worse(fused, stock, formula, record(lambda: module(*tensors, **options)))


def test_documents_with_other_keys_than_queries():
    module, tensors = varlen((-1, -1)), qkv(batch=1)
    options = {"attention_masks": given([0, 10, 40], [0, 25, 40]), "enable_gqa": True}
    assert_no_worse(fused, stock, formula, record(lambda: module(*tensors, **options)))
    assert reasons(varlen(), *tensors, **options) == ["a query without a visible key in packed documents"]


def test_empty_documents():
    module, tensors = varlen(), qkv(batch=1)
    options = {"attention_masks": given([0, 0, 10, 10, 40, 40]), "enable_gqa": True}
    assert_no_worse(fused, stock, formula, record(lambda: module(*tensors, **options)))


@pytest.mark.parametrize("transform", [None, with_lse])
def test_more_documents_than_one_operator_takes(transform, monkeypatch):
    monkeypatch.setattr(document_ends, "_MAX_DOCUMENTS", 3)
    module, tensors = varlen(), qkv()
    positions = packed_positions((7, 1, 20, 12), (3, 3, 34))
    options = {"attention_masks": metadata(positions), "enable_gqa": True, "out_transform": transform}
    calls = record(lambda: module(*tensors, **options))
    with trace() as t:
        fused(module, *tensors, **options)
    assert t.launches_by_op["npu.npu_fusion_attention"] == 3
    assert_no_worse(fused, stock, formula, calls)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("rows", [((40,), (40,)), ROWS, ((13, 27),)])
def test_metadata_are_the_original_s(rows, host):
    positions = packed_positions(*rows)
    theirs = metadata(positions, include_host_offsets=host)
    with npu_patch.scope("attention"):
        counts = Counts()
        with trace() as t:
            ours = metadata(positions, include_host_offsets=host)
        assert counts.take("attention") == (0, {})
    assert type(ours) is type(theirs)
    assert ours[2:] == theirs[2:]
    assert ours.cu_seq_k is ours.cu_seq_q
    assert ours.cu_seq_q.device.type == "npu"
    assert ours.cu_seq_q.dtype is theirs.cu_seq_q.dtype
    assert torch.equal(ours.cu_seq_q, theirs.cu_seq_q)
    assert t.host_syncs == 1


def test_metadata_on_the_host_are_left_alone():
    with npu_patch.scope("attention"):
        assert metadata(packed_positions(*ROWS).cpu()).cu_seq_q.device.type == "cpu"


def test_positions_that_begin_nowhere():
    """A row that does not begin at 0 goes on with the document of the row before, and the first one belongs to none."""
    positions = packed_positions(*ROWS)
    positions[1, :7] += 3
    module, tensors = varlen(), qkv()
    options = {"attention_masks": metadata(positions), "enable_gqa": True}
    assert_no_worse(fused, stock, formula, record(lambda: module(*tensors, **options)))
    positions[0] += 1
    assert reasons(module, *tensors, attention_masks=metadata(positions), enable_gqa=True) == [
        "documents that do not cover all tokens"
    ]


def reasons(module, *args, **kwargs):
    """The counted reasons of one call; the original may fail on this device."""
    with npu_patch.scope("attention"):
        counts = Counts()
        with contextlib.suppress(Exception):
            module(*args, **kwargs)
        hits, found = counts.take("attention")
    assert hits == 0
    return list(found)


def test_what_the_operator_cannot_honour_runs_the_original(monkeypatch):
    tensors, meta = qkv(), metadata(packed_positions(*ROWS))
    options = {"attention_masks": meta, "enable_gqa": True}
    assert reasons(varlen(), *tensors, attention_masks=meta) == ["fewer key heads than query heads without enable_gqa"]
    assert reasons(varlen(), *(x.cpu() for x in tensors), **options) == ["not on an NPU"]
    assert reasons(varlen((3, 2)), *tensors, **options) == ["a window of 3 tokens before and 2 after the query"]
    assert reasons(varlen(), *(x[0] for x in tensors), **options) == ["query, key and value are not BLNH"]
    assert reasons(varlen(), *qkv(value_size=2 * D), **options) == ["value head size above query head size"]
    assert reasons(varlen(), *(x[:, 1:] for x in tensors), **options) == ["documents that do not cover all tokens"]
    shorter = [tensors[0], tensors[1][:, 1:], tensors[2][:, 1:]]
    assert reasons(varlen(), *shorter, **options) == ["key and value do not have the query's length"]
    unequal = given([0, 40, 80], [0, 80])
    assert reasons(varlen(), *tensors, attention_masks=unequal, enable_gqa=True) == [
        "as many documents of keys as of queries are needed"
    ]
    import spmd_types

    monkeypatch.setattr(spmd_types, "is_type_checking", lambda: True)
    monkeypatch.setattr("npu_patch.adapters.torchtitan.typecheck._function_modes", lambda: 1)
    assert reasons(varlen(), *tensors, **options) == ["spmd type checking does not know the fused operators"]


def test_lengths_that_nobody_knows_are_read_once():
    module, tensors, meta = varlen(), qkv(), given([0, 40, 47, 48, 80])
    with npu_patch.scope("attention"), trace() as t:
        for _ in range(3):
            module(*tensors, attention_masks=meta, enable_gqa=True)
    assert t.host_syncs == 1


def test_lengths_that_change_in_place_are_read_again():
    module, tensors, meta = varlen(), qkv(), given([0, 40, 47, 48, 80])
    options = {"attention_masks": meta, "enable_gqa": True}
    fused(module, *tensors, **options)
    meta.cu_seq_q[1] = 20
    torch.testing.assert_close(
        fused(module, *tensors, **options), stock(module, *tensors, **options), rtol=2e-2, atol=1e-2
    )


def test_inference_mode():
    module, tensors, positions = varlen(), [x.detach() for x in qkv()], packed_positions(*ROWS)
    wanted = stock(module, *tensors, attention_masks=metadata(positions), enable_gqa=True)
    with torch.inference_mode():
        foreign = given([0, 40, 47, 48, 80])
        for meta in (metadata(positions), foreign):
            out = fused(module, *tensors, attention_masks=meta, enable_gqa=True)
            torch.testing.assert_close(out, wanted, rtol=2e-2, atol=1e-2)


def test_undo_leaves_the_identical_originals():
    from torchtitan.models import common
    from torchtitan.models.common import decoder

    def places():
        name = "create_varlen_metadata_for_document"
        modules = (attention, common, decoder)
        return (vars(attention.VarlenAttention)["forward"], *(getattr(module, name) for module in modules))

    before = places()
    with npu_patch.scope("attention"):
        assert all(a is not b for a, b in zip(places(), before, strict=True))
        assert len(set(places()[1:])) == 1
    assert all(a is b for a, b in zip(places(), before, strict=True))


# ---- a model ---------------------------------------------------------------------------------------------------------


@functools.cache
def model():
    from .models import build

    return build("llama3", layers=2, backend="varlen")


def loss_of(subject, positions):
    from .models import loss_of

    return loss_of(subject, positions)


@pytest.mark.parametrize("positions", [plain_positions(), packed_positions((48,), (7, 1, 40))], ids=["plain", "packed"])
def test_a_model_of_documents(positions):
    """In bfloat16 inside whatever the model's type, so that calls are judged; and the loss is close."""
    subject = model()
    with written_out(), recording(attention.VarlenAttention, "forward") as calls:
        expected = training_step(subject, loss_of(subject, positions))
    with npu_patch.scope("rms_norm", "rope", "attention"):
        counts = Counts()
        patched = training_step(subject, loss_of(subject, positions))
        assert counts.take("attention") == (2, {})
        assert counts.take("rms_norm") == (5, {})
        assert counts.take("rope") == (2, {})
        with trace(list(subject.parameters())) as t:
            loss_of(subject, positions)().backward()
    assert t.host_syncs == 1
    assert t.launches_by_op["npu.npu_fusion_attention"] == 2
    assert patched.loss == pytest.approx(expected.loss, rel=1e-3)
    assert len(calls) == 2
    assert_no_worse(fused, stock, formula, calls)


def test_the_stand_in_counts_distances_from_the_ends_of_documents():
    seen = documents_seen(torch.tensor([0, 2, 3]), torch.tensor([0, 3, 5]), (1, 0)).int()
    assert seen.tolist() == [[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 1]]
