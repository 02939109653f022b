"""Token dispatchers of torchtitan 0.3.0: the same order and the same sums, whatever happens in between."""

from __future__ import annotations

import copy
import dataclasses
import types

import pytest
import torch
import torch.distributed._functional_collectives as functional
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import npu_patch
from npu_patch.simulator import trace
from tests.support.numerics import assert_no_worse, recording, relative_error

from .models import Counts

code = pytest.importorskip("torchtitan.models.common.token_dispatcher", reason="torchtitan 0.3.0")

EXPERTS, SIZE = 6, 16
ON = npu_patch.scope


def dispatcher(top_k=2, kind="Local"):
    cls = getattr(code, f"{kind}TokenDispatcher")
    return cls(cls.Config(num_experts=EXPERTS, top_k=top_k))


def inputs(tokens=9, top_k=2, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, SIZE, generator=generator).to("npu", dtype).requires_grad_()
    scores = torch.rand(tokens, top_k, generator=generator).npu().requires_grad_()
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(top_k).indices.npu()
    return x, scores, ids, counts_of(ids)


def counts_of(ids):
    return torch.bincount(ids.flatten().cpu(), minlength=EXPERTS).npu()


def around(subject, x, scores, ids, counts, experts=torch.sin):
    """Dispatch, something in the experts' place, combine."""
    routed, per_expert, metadata = subject.dispatch(x, scores, ids, counts)
    assert per_expert is counts
    return subject.combine(experts(routed), metadata, x)


def gradients(out, x, scores):
    direction = torch.linspace(-1, 2, out.numel()).view(out.shape).to(out)
    return torch.autograd.grad(out, (x, scores), direction)


def both(subject, x, scores, ids, counts, experts=torch.sin):
    """Result and gradients as they are, and patched; the operators ran."""
    stock = around(subject, x, scores, ids, counts, experts)
    expected = [stock, *gradients(stock, x, scores)]
    with ON("permute"):
        seen = Counts()
        with trace() as t:
            out = around(subject, x, scores, ids, counts, experts)
            found = [out, *gradients(out, x, scores)]
        assert seen.take("permute") == (2, {})
    if x.shape[0]:
        assert t.launches_by_op["npu.npu_moe_token_permute"] == 1
    assert t.host_syncs == 0
    return expected, found


@pytest.mark.parametrize("kind", ["Local", "AllToAll"])
@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_float32(kind, top_k):
    expected, found = both(dispatcher(top_k, kind), *inputs(top_k=top_k))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype
        assert relative_error(one, other) < 1e-6


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_routing(data):
    """All tokens to one expert, experts without tokens, one token, none at all."""
    top_k = data.draw(st.integers(1, EXPERTS))
    rows = data.draw(st.lists(st.permutations(range(EXPERTS)), max_size=12))
    ids = torch.tensor([row[:top_k] for row in rows], dtype=torch.int64).view(-1, top_k).npu()
    x, scores, _, _ = inputs(len(rows), top_k)
    expected, found = both(dispatcher(top_k), x, scores, ids, counts_of(ids))
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert relative_error(one, other) < 1e-6


@pytest.mark.parametrize("top_k", [1, 3])
def test_bfloat16_is_no_further_from_exact(top_k):
    subject, given_ = dispatcher(top_k), inputs(64, top_k, torch.bfloat16)
    stock = code.LocalTokenDispatcher
    with recording(stock, "combine") as calls:
        out = around(subject, *given_)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out))

    def flat(function):
        """Of tensors alone, with the weights and their order among them."""

        def call(outputs, scores, ids, x):
            _, _, metadata = subject.dispatch(x, scores, ids, given_[3])
            return function(subject, outputs, metadata, x)

        return call

    (call,) = calls
    call.args = (call.args[1], given_[1].detach().requires_grad_(), given_[2], call.args[3].detach())
    original = stock.combine

    def fused(*args):
        with ON("permute"):
            return flat(stock.combine)(*args)

    def exact(outputs, scores, ids, x):
        order = torch.argsort(ids.flatten().cpu(), stable=True)
        weighted = outputs * scores.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // top_k, weighted)

    assert_no_worse(fused, flat(original), exact, calls)


# ---- the order on its way from dispatch to combine -------------------------------------------------------------------


def test_metadata_are_torchtitans_own_for_whoever_reads_them():
    subject, given_ = dispatcher(), inputs()
    _, _, stock = subject.dispatch(*given_)
    with ON("permute"):
        _, _, ours = subject.dispatch(*given_)
    assert isinstance(ours, code.LocalDispatchMetadata)
    for field in dataclasses.fields(stock):
        mine, wanted = getattr(ours, field.name), getattr(stock, field.name)
        assert mine.dtype is wanted.dtype
        assert torch.equal(mine, wanted)
        assert getattr(ours, field.name) is mine
    scores = ours.topk_scores_experts_sorted_N
    assert torch.equal(torch.autograd.grad(scores.square().sum(), given_[1])[0], 2 * given_[1])
    with pytest.raises(AttributeError):
        ours.something_else  # noqa: B018
    with pytest.raises(dataclasses.FrozenInstanceError):
        ours.token_indices_experts_sorted_N = None
    assert "LocalDispatchMetadata" in repr(ours)


def test_metadata_that_were_read_or_copied_still_have_the_order():
    subject, given_ = dispatcher(), inputs()
    stock = around(subject, *given_)
    with ON("permute"):
        routed, _, metadata = subject.dispatch(*given_)
        twin = copy.copy(metadata)
        metadata.token_indices_experts_sorted_N  # noqa: B018
        seen = Counts()
        for one in (metadata, twin):
            assert relative_error(subject.combine(routed.sin(), one, given_[0]), stock) < 1e-6
        assert seen.take("permute") == (2, {})


def test_other_weights_in_the_metadata_are_the_ones_that_count():
    subject, given_ = dispatcher(), inputs()
    with ON("permute"):
        routed, _, metadata = subject.dispatch(*given_)
        doubled = dataclasses.replace(metadata, topk_scores_experts_sorted_N=2 * metadata.topk_scores_experts_sorted_N)
        seen = Counts()
        out = subject.combine(routed.sin(), doubled, given_[0])
        assert seen.take("permute") == (0, {"the tokens were not sorted by npu_patch": 1})
        with torch.no_grad():
            metadata.topk_scores_experts_sorted_N.mul_(2)
        again = subject.combine(routed.sin(), metadata, given_[0])
        assert seen.take("permute") == (0, {"the tokens were not sorted by npu_patch": 2})
    stock = around(subject, *given_)
    assert relative_error(out, 2 * stock) < 1e-6
    assert relative_error(again, 2 * stock) < 1e-6


def test_weights_changed_in_place_are_refused():
    subject, (x, scores, ids, counts) = dispatcher(), inputs()
    scores = scores.detach()
    with ON("permute"):
        routed, _, metadata = subject.dispatch(x, scores, ids, counts)
        scores.mul_(2)
        with pytest.raises(RuntimeError, match="changed in place between dispatch and combine"):
            subject.combine(routed, metadata, x)


def test_microbatches_in_flight_keep_their_own_order():
    """As pipelining has them: several forwards before the first of their backwards."""
    subject, batches = dispatcher(), [inputs(seed=seed) for seed in range(3)]
    expected = []
    for x, scores, ids, counts in batches:
        out = around(subject, x, scores, ids, counts)
        expected.append([out, *gradients(out, x, scores)])
    with ON("permute"):
        sent = [subject.dispatch(*batch) for batch in batches]
        outs = {i: subject.combine(sent[i][0].sin(), sent[i][2], batches[i][0]) for i in (1, 0, 2)}
        for i in (2, 0, 1):
            x, scores, *_ = batches[i]
            for one, other in zip([outs[i], *gradients(outs[i], x, scores)], expected[i], strict=True):
                assert relative_error(one, other) < 1e-6


@pytest.mark.parametrize("kind", ["Local", "AllToAll"])
def test_a_forward_that_runs_again_gives_identical_gradients(kind):
    subject, (x, scores, ids, counts) = dispatcher(2, kind), inputs()
    with ON("permute"):
        plain = around(subject, x, scores, ids, counts)
        again = checkpoint(lambda *given: around(subject, *given), x, scores, ids, counts, use_reentrant=False)
        pairs = zip([plain, *gradients(plain, x, scores)], [again, *gradients(again, x, scores)], strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_without_gradients_and_in_inference_mode():
    subject, (x, scores, ids, counts) = dispatcher(), inputs()
    stock = around(subject, x, scores, ids, counts)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), ON("permute"):
            seen = Counts()
            assert relative_error(around(subject, x, scores, ids, counts), stock) < 1e-6
            assert seen.take("permute") == (2, {})


def test_switched_off_in_between_the_original_combines():
    subject, given_ = dispatcher(), inputs()
    with ON("permute"):
        routed, _, metadata = subject.dispatch(*given_)
    assert relative_error(subject.combine(routed.sin(), metadata, given_[0]), around(subject, *given_)) < 1e-6


# ---- what runs the original ------------------------------------------------------------------------------------------


def test_a_dispatcher_that_sorts_in_its_own_way_keeps_it():
    class Backwards(code.LocalTokenDispatcher):
        def _local_reorder(self, x_TD, topk_scores_TK, topk_expert_ids_TK):
            order = torch.argsort(topk_expert_ids_TK.view(-1), stable=True).flip(0)
            return x_TD[order // self.top_k], order // self.top_k, topk_scores_TK.view(-1)[order]

    subject = Backwards(Backwards.Config(num_experts=EXPERTS, top_k=2))
    x, scores, ids, counts = inputs()
    stock, _, _ = subject.dispatch(x, scores, ids, counts)
    with ON("permute"):
        routed, _, metadata = subject.dispatch(x, scores, ids, counts)
        seen = Counts()
        out = subject.combine(routed.sin(), metadata, x)
        assert seen.take("permute") == (0, {"the tokens were not sorted by npu_patch": 1})
    assert torch.equal(routed, stock)
    assert relative_error(out, around(dispatcher(), x, scores, ids, counts)) < 1e-6


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, scores, ids: (x.double(), scores, ids), "tokens of type float64"),
        (lambda x, scores, ids: (x, scores, ids.to(torch.int16)), "expert ids of type int16"),
    ],
)
def test_what_the_operator_does_not_take(change, reason):
    subject, (x, scores, ids, counts) = dispatcher(), inputs()
    x, scores, ids = change(x, scores, ids)
    stock = around(subject, x, scores, ids, counts)
    with ON("permute"):
        seen = Counts()
        out = around(subject, x, scores, ids, counts)
        hits, reasons = seen.take("permute")
    assert relative_error(out, stock) < 1e-6
    assert (hits, reasons[reason]) == (0, 2)  # dispatch, and the reorder below it


def test_outputs_of_another_type_than_the_tokens_fail_as_they_do_in_the_original():
    subject, given_ = dispatcher(), inputs()
    with pytest.raises(RuntimeError):
        around(subject, *given_, experts=torch.Tensor.bfloat16)
    with ON("permute"), pytest.raises(RuntimeError):
        around(subject, *given_, experts=torch.Tensor.bfloat16)


# ---- between ranks, without any --------------------------------------------------------------------------------------


def across(ranks, top_k=2):
    """A dispatcher for so many ranks, whose exchange hands back what it is given."""
    subject = dispatcher(top_k, "AllToAll")
    subject.ep_mesh = types.SimpleNamespace(size=lambda: ranks, get_group=lambda: None)
    subject._combine_token_exchange = lambda rows, group, inputs, outputs: later(rows)
    return subject


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return functional.AsyncCollectiveTensor(x.view_as(x))

    @staticmethod
    def backward(ctx, grad):
        return grad


def later(x):
    """What a collective hands over: a tensor that may still be on its way."""
    return _Late.apply(x)


TABLES = [[[2, 0, 1], [1, 3, 0]], [[0, 0], [0, 0]], [[4], [0], [2]], [[0, 5], [0, 0], [1, 0], [2, 2]]]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("wait", [False, True])
def test_rows_of_all_ranks_by_expert_and_back(table, wait):
    counts = torch.tensor(table).npu()
    subject = across(len(table))
    total = int(counts.sum())
    rows = torch.randn(total, SIZE, generator=torch.Generator().manual_seed(1)).npu().requires_grad_()
    results = []
    for on in (False, True):
        with ON(permute=on):
            seen = Counts()
            given_ = later(rows) if wait else rows
            shape, routed, indices, sizes = subject._permute(given_, counts.flatten())
            back = subject._unpermute(routed.sin(), shape, indices)
            gradient = torch.autograd.grad(back, rows, torch.ones_like(back))[0]
            results.append([torch.tensor(shape), routed, indices, sizes, back, gradient])
            assert seen.take("permute") == ((2, {}) if on else (0, {}))
            assert type(routed) is torch.Tensor
    for stock, ours in zip(*results, strict=True):
        assert stock.dtype is ours.dtype
        assert torch.equal(stock, ours)


@pytest.mark.parametrize("backend", ["partial_dtensor", "spmd_types"])
def test_combine_between_ranks(backend, monkeypatch):
    subject, (x, scores, ids, _) = across(2), inputs()
    monkeypatch.setattr(code, "get_spmd_backend", lambda: backend)
    if backend == "spmd_types":
        mesh = types.SimpleNamespace(get_group=lambda name: None)
        monkeypatch.setattr(code, "current_spmd_mesh", lambda: mesh)
        monkeypatch.setattr(code.spmd, "is_type_checking", lambda: False)
    per_rank = torch.tensor([[3, 0, 2], [4, 5, 4]]).npu()  # what came in for the experts of this rank
    assert int(per_rank.sum()) == ids.numel()

    def run():
        routed, indices, sorted_scores = subject._local_reorder(x, scores, ids)
        shape, rows, permuted, _ = subject._permute(later(routed), per_rank.flatten())
        metadata = code.AllToAllDispatchMetadata(
            token_indices_experts_sorted_N=indices,
            topk_scores_experts_sorted_N=sorted_scores,
            input_shape=shape,
            permuted_indices=permuted,
            input_splits=[],
            output_splits=[],
        )
        out = subject.combine(rows.sin(), metadata, x)
        return [routed, indices, sorted_scores, out, *gradients(out, x, scores)]

    expected = run()
    with ON("permute"):
        seen = Counts()
        found = run()
        taken = seen.take("permute")
    reasons = {} if backend == "partial_dtensor" else {"the spmd_types backend": 1}
    assert taken == (4 - len(reasons), reasons)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype
        assert relative_error(one, other) < 1e-6


def test_indices_of_somebody_else_go_back_the_original_way():
    subject = across(2)
    rows = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(1)).npu()
    indices = torch.tensor([3, 1, 0, 4, 2]).npu()
    with ON("permute"):
        seen = Counts()
        back = subject._unpermute(rows, rows.shape, indices)
        assert seen.take("permute") == (0, {"the tokens were not sorted by npu_patch": 1})
    assert torch.equal(back[indices], rows)


# ---- recognising -----------------------------------------------------------------------------------------------------


def test_every_target_is_recognised():
    with ON("permute"):
        rows = [row for row in npu_patch.status().rows if row.target.startswith(f"{code.__name__}:")]
    states = {row.target.partition(":")[2]: row.state for row in rows if row.op == "permute"}
    assert {name for name, state in states.items() if state == "active"} == {
        "LocalTokenDispatcher._local_reorder",
        "LocalTokenDispatcher.dispatch",
        "LocalTokenDispatcher.combine",
        "AllToAllTokenDispatcher._permute",
        "AllToAllTokenDispatcher._unpermute",
        "AllToAllTokenDispatcher.combine",
    }
