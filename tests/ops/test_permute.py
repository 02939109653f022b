"""Sorting tokens by expert and combining what the experts made of them, against formulas that sort nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import npu_patch.simulator
from npu_patch.ops import permute as ops

from .tools import Ran, assert_close, assert_no_worse, compiled, random, results, second_order, wide

FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
#: (dtype of the tokens, of the router weights, whether products are rounded, of the result)
DTYPES = [
    (FLOAT, FLOAT, False, FLOAT),
    (FLOAT, FLOAT, True, FLOAT),
    (FLOAT, BRAIN, False, FLOAT),
    (BRAIN, BRAIN, False, BRAIN),
    (BRAIN, BRAIN, True, BRAIN),
    (BRAIN, FLOAT, False, FLOAT),
    (BRAIN, FLOAT, True, BRAIN),
    (BRAIN, HALF, False, FLOAT),
    (HALF, HALF, False, HALF),
    (HALF, FLOAT, False, FLOAT),
    (HALF, FLOAT, True, HALF),
]
MIXED = [row for row in DTYPES if row[0] != row[3] or (row[2] and row[0] != row[1])]


def routing(tokens: int, experts: int, top_k: int, dtype: torch.dtype = torch.int64, seed: int = 0) -> Tensor:
    """Different experts for each token."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]
    return (torch.stack(rows) if rows else torch.empty(0, top_k)).to(dtype).npu()


def expert(rows: Tensor, ids: Tensor) -> Tensor:
    """What the experts of these ids make of rows; each does something else."""
    return rows * rows.abs().sqrt() * (1.0 + ids.to(rows.device).unsqueeze(-1)).to(rows.dtype)


def by_formula(x: Tensor, weights: Tensor | None, ids: Tensor) -> Tensor:
    ids = ids.to(x.device)
    slots = expert(x.unsqueeze(1).expand(-1, ids.shape[1], -1), ids)
    return (slots if weights is None else slots * weights.unsqueeze(-1)).sum(1)


def fused(x: Tensor, weights: Tensor | None, ids: Tensor, rounded: bool = False) -> Tensor:
    assert ops.unsupported(x, ids) is None
    permuted, sorted_indices = ops.permute(x, ids)
    rows = expert(permuted, ids.flatten().sort().values)
    assert ops.unsupported_combine(rows, sorted_indices, weights) is None
    return ops.combine(rows, sorted_indices, weights, rounded=rounded, top_k=ids.shape[1])


def as_transformers(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The pieces of `grouped_mm_experts_forward`, the final cast left out."""
    sorted_ids, order = torch.sort(ids.reshape(-1))
    rows = expert(x[order // ids.shape[1]], sorted_ids) * weights.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0), device=x.device)
    return rows[inverse].view(*ids.shape, -1).sum(dim=1)


def as_torchtitan(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The pieces of `LocalTokenDispatcher`."""
    order = torch.argsort(ids.view(-1), stable=True)
    scores, tokens = weights.view(-1)[order], order // ids.shape[1]
    rows = expert(x[tokens], ids.view(-1)[order])
    rows = (rows.to(torch.float32) * scores.reshape(-1, 1)).to(rows.dtype)
    return torch.zeros_like(x).scatter_add(0, tokens.reshape(-1, 1).expand(-1, x.shape[1]), rows)


def inputs(tokens: int, size: int, top_k: int, dtype: torch.dtype, weights: torch.dtype, seed: int = 0) -> list[Tensor]:
    x, w = random(tokens, size, dtype=dtype, seed=seed), random(tokens, top_k, grad=False, seed=seed)
    return [x, w.softmax(-1).to(weights).requires_grad_()]


@pytest.mark.parametrize("dtype", [FLOAT, HALF, BRAIN])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_copies_are_sorted_by_expert_and_stay_in_order_within_one(dtype, ids_dtype):
    x, ids = random(7, 5, dtype=dtype, grad=False), routing(7, 4, 3, ids_dtype)
    with Ran() as ran:
        permuted, sorted_indices = ops.permute(x, ids)
    assert ran["npu_moe_token_permute"] == 1
    pairs = sorted((int(e), t, s) for t, row in enumerate(ids.tolist()) for s, e in enumerate(row))
    assert permuted.tolist() == [x.tolist()[t] for _, t, _ in pairs]
    assert (sorted_indices.dtype, permuted.dtype) == (torch.int32, dtype)
    assert [pairs[row][1:] for row in sorted_indices.tolist()] == [(t, s) for t in range(7) for s in range(3)]


SHAPES = [(6, 8, 4, 2), (1, 8, 4, 1), (9, 7, 3, 3), (5, 1, 8, 2), (33, 130, 16, 4), (4, 8, 1, 1)]


@pytest.mark.parametrize(("tokens", "size", "experts", "top_k"), SHAPES)
@pytest.mark.parametrize("rounded", [False, True])
def test_float32_equals_the_formula_forward_and_backward(tokens, size, experts, top_k, rounded):
    ids = routing(tokens, experts, top_k)
    x, w = inputs(tokens, size, top_k, FLOAT, FLOAT)
    assert_close(lambda x, w: fused(x, w, ids, rounded), lambda x, w: by_formula(x, w, ids), x, w)
    assert_close(lambda x: fused(x, None, ids, rounded), lambda x: by_formula(x, None, ids), x)


@st.composite
def routings(draw: st.DrawFn) -> Tensor:
    """Skewed ones: some experts get every token, others none; also the same expert twice for one token."""
    experts = draw(st.integers(1, 9))
    top_k, tokens = draw(st.integers(1, experts)), draw(st.integers(1, 12))
    kind = draw(st.sampled_from(["any", "one expert", "all experts", "distinct"]))
    if kind == "one expert":
        return torch.full((tokens, top_k), draw(st.integers(0, experts - 1)))
    if kind == "all experts":
        return torch.stack([torch.tensor(draw(st.permutations(range(experts)))) for _ in range(tokens)])
    if kind == "distinct":
        rows = [draw(st.permutations(range(experts)))[:top_k] for _ in range(tokens)]
    else:
        rows = [[draw(st.integers(0, experts - 1)) for _ in range(top_k)] for _ in range(tokens)]
    return torch.tensor(rows)


@settings(max_examples=60, deadline=None)
@given(ids=routings(), size=st.integers(1, 9), ids_dtype=st.sampled_from([torch.int32, torch.int64]))
def test_any_routing_equals_the_formula(ids, size, ids_dtype):
    x, w = inputs(ids.shape[0], size, ids.shape[1], FLOAT, FLOAT)
    on_npu = ids.to(ids_dtype).npu()
    assert_close(lambda x, w: fused(x, w, on_npu), lambda x, w: by_formula(x, w, ids), x, w)


@pytest.mark.parametrize(("dtype", "weights", "rounded", "result"), DTYPES)
@pytest.mark.parametrize("top_k", [1, 4])
def test_the_error_is_no_worse_than_the_originals_and_the_types_are_its_types(dtype, weights, rounded, result, top_k):
    ids = routing(40, 8, top_k)
    original = as_torchtitan if rounded else as_transformers
    x, w = inputs(40, 33, top_k, dtype, weights)
    if dtype != FLOAT:
        assert_no_worse(
            lambda x, w: fused(x, w, ids, rounded),
            lambda x, w: original(x, w, ids),
            lambda x, w: by_formula(x, w, ids),
            lambda seed: inputs(40, 33, top_k, dtype, weights, seed),
        )
    y = fused(x, w, ids, rounded)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, w.grad.dtype) == (result, dtype, weights)


@pytest.mark.parametrize("dtype", [BRAIN, HALF])
@pytest.mark.parametrize("rounded", [False, True])
def test_the_gradient_of_float32_weights_is_exact(dtype, rounded):
    weights = FLOAT
    ids = routing(20, 8, 4)
    x, w = inputs(20, 64, 4, dtype, weights)
    permuted, sorted_indices = ops.permute(x.detach(), ids)
    y = ops.combine(permuted, sorted_indices, w, rounded=rounded)
    head = random(20, 64, grad=False, seed=3).to(BRAIN).to(y.dtype)
    (found,) = torch.autograd.grad(y, w, head)
    exact = (x.detach().double().cpu() * head.double().cpu()).sum(-1, keepdim=True).expand(-1, 4)
    torch.testing.assert_close(found.cpu().double(), exact, rtol=1e-5, atol=1e-5)


def test_with_weights_wider_than_the_tokens_the_operator_itself_has_no_gradient():
    rows, order, w = random(6, 8, dtype=BRAIN), torch.arange(6, dtype=torch.int32).npu(), random(3, 2)
    torch.ops.npu.npu_moe_token_unpermute(rows, order, w).sum().backward()
    assert rows.grad.isnan().all()
    assert w.grad.isnan().all()


@pytest.mark.parametrize(("dtype", "weights", "rounded", "_"), DTYPES)
def test_the_fused_operators_run_and_nothing_else_moves_the_rows(dtype, weights, rounded, _):
    ids = routing(6, 4, 2)
    x, w = inputs(6, 8, 2, dtype, weights)
    with Ran() as ran:
        permuted, sorted_indices = ops.permute(x, ids)
        ops.combine(permuted, sorted_indices, w, rounded=rounded).sum().backward()
    assert ran["npu_moe_token_permute"] == ran["npu_moe_token_unpermute_grad_v2"] == 1
    products_are_rounded = rounded and torch.promote_types(dtype, weights) != dtype
    assert ran["_npu_moe_token_unpermute"] == (0 if products_are_rounded else 1)
    assert ran["npu_moe_token_permute_grad_v2"] == (2 if products_are_rounded else 1)
    assert not {"sort", "argsort", "index", "scatter_add", "gather", "sort.stable"} & set(ran.counts)


def traced(function, x: Tensor, w: Tensor, ids: Tensor):
    with npu_patch.simulator.trace() as trace:
        y = function(x, w, ids)
        y.backward(torch.ones_like(y))
    return trace


@pytest.mark.parametrize(("dtype", "weights", "rounded", "_"), DTYPES)
def test_fewer_launches_and_bytes_than_the_original_and_no_more_is_kept(dtype, weights, rounded, _):
    ids = routing(64, 8, 4)
    original = as_torchtitan if rounded else as_transformers
    x, w = inputs(64, 32, 4, dtype, weights)
    ours = traced(lambda x, w, ids: fused(x, w, ids, rounded), x, w, ids)
    theirs = traced(original, *inputs(64, 32, 4, dtype, weights), ids)
    expert_alone = 4 + 7  # launches of `expert` forward and backward, in both
    assert ours.launches - expert_alone <= 0.75 * (theirs.launches - expert_alone)
    assert ours.bytes_read + ours.bytes_written < 0.8 * (theirs.bytes_read + theirs.bytes_written)
    assert ours.saved_bytes <= theirs.saved_bytes
    assert ours.host_syncs == 0


def test_rounding_each_product_keeps_half_of_what_torchtitan_keeps():
    ids = routing(64, 8, 4)
    x, w = inputs(64, 256, 4, BRAIN, FLOAT)
    permuted, sorted_indices = ops.permute(x.detach(), ids)
    rows = permuted.detach().requires_grad_()
    with npu_patch.simulator.trace() as trace:
        y = ops.combine(rows, sorted_indices, w, rounded=True)
    order = ids.numel() * 4
    assert trace.saved_bytes == rows.numel() * 2 + w.numel() * 4 + order
    assert y.dtype == BRAIN


@pytest.mark.parametrize(("dtype", "weights", "rounded", "_"), DTYPES)
def test_where_only_one_side_needs_a_gradient_only_what_it_needs_is_kept(dtype, weights, rounded, _):
    ids = routing(12, 4, 2)
    x, w = inputs(12, 8, 2, dtype, weights)
    _, sorted_indices = ops.permute(x.detach(), ids)
    rows = random(24, 8, dtype=dtype, seed=5)
    both = torch.autograd.grad(ops.combine(rows, sorted_indices, w, rounded=rounded).square().sum(), [rows, w])
    with npu_patch.simulator.trace() as trace:
        y = ops.combine(rows, sorted_indices, w.detach(), rounded=rounded)
    wide_weights = w.numel() * torch.promote_types(dtype, weights).itemsize
    assert trace.saved_bytes == wide_weights + sorted_indices.numel() * 4  # and no row
    (alone,) = torch.autograd.grad(y.square().sum(), rows)
    torch.testing.assert_close(alone, both[0], rtol=0, atol=0)
    y = ops.combine(rows.detach(), sorted_indices, w, rounded=rounded)
    (alone,) = torch.autograd.grad(y.square().sum(), w)
    torch.testing.assert_close(alone, both[1], rtol=0, atol=0)
    y = ops.combine(rows.detach(), sorted_indices, w.detach(), rounded=rounded)
    assert y.grad_fn is None


@pytest.mark.parametrize(("dtype", "weights", "rounded", "_"), DTYPES)
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_result_is_the_same(dtype, weights, rounded, _, guard):
    ids = routing(6, 4, 2)
    x, w = inputs(6, 8, 2, dtype, weights)
    exact = fused(x, w, ids, rounded).detach()
    with guard():
        found = fused(x.detach(), w.detach(), ids, rounded)
    assert torch.equal(found, exact)


@pytest.mark.parametrize("weights", [FLOAT, BRAIN, None])
@pytest.mark.parametrize("rounded", [False, True])
def test_no_tokens_at_all_stay_attached_to_both_inputs(weights, rounded):
    x, ids = random(0, 8, dtype=BRAIN), routing(0, 4, 2)
    w = None if weights is None else random(0, 2, dtype=weights)
    assert ops.unsupported(x, ids) is None
    permuted, sorted_indices = ops.permute(x, ids)
    assert (permuted.shape, sorted_indices.shape, sorted_indices.dtype) == ((0, 8), (0,), torch.int32)
    y = ops.combine(permuted, sorted_indices, w, rounded=rounded, top_k=2)
    assert y.shape == (0, 8)
    assert y.dtype == (FLOAT if weights == FLOAT and not rounded else BRAIN)
    y.sum().backward()
    assert x.grad.shape == (0, 8)
    assert w is None or w.grad.shape == (0, 2)


@pytest.mark.parametrize(("dtype", "weights", "rounded", "_"), DTYPES)
@pytest.mark.parametrize("layout", ["expanded", "transposed", "strided"])
def test_gradients_of_any_layout_are_the_same(dtype, weights, rounded, _, layout):
    ids = routing(6, 4, 2)
    x, w = inputs(6, 8, 2, dtype, weights)
    y = fused(x, w, ids, rounded)
    if layout == "expanded":
        head = torch.ones((), dtype=y.dtype, device="npu").expand(y.shape)
    else:
        head = random(8, 6, grad=False).to(y.dtype).t() if layout == "transposed" else random(6, 16)[:, ::2].to(y.dtype)
        head = head.detach()
    found = torch.autograd.grad(y, [x, w], head, retain_graph=True)
    assert not torch.stack([g.isnan().any() for g in found]).any()
    for a, b in zip(found, torch.autograd.grad(y, [x, w], head.contiguous()), strict=True):
        assert torch.equal(a, b)


def test_a_transposed_input_and_transposed_weights_are_taken():
    ids = routing(6, 4, 2)
    x, w = random(8, 6), random(2, 6)
    assert_close(lambda x, w: fused(x.t(), w.t(), ids), lambda x, w: by_formula(x.t(), w.t(), ids), x, w)
    ids = routing(2, 8, 4).t().contiguous().t()
    assert not ids.is_contiguous()
    x, w = inputs(2, 8, 4, FLOAT, FLOAT)
    assert_close(lambda x, w: fused(x, w, ids), lambda x, w: by_formula(x, w, ids), x, w)


@pytest.mark.parametrize(("weights", "rounded"), [(FLOAT, False), (FLOAT, True), (None, False)])
def test_second_order_gradients_equal_the_formula(weights, rounded):
    ids = routing(5, 4, 2)
    x, w, head = random(5, 6), random(5, 2), random(5, 6, seed=1)
    if weights is None:
        found = second_order(lambda x: fused(x, None, ids), x, head)
        exact = second_order(lambda x: by_formula(x, None, ids), wide(x), wide(head))
    else:
        found = second_order(lambda x, w: fused(x, w, ids, rounded), x, w, head)
        exact = second_order(lambda x, w: by_formula(x, w, ids), wide(x), wide(w), wide(head))
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-4, atol=1e-4)


def test_second_order_gradients_with_weights_that_need_none():
    ids = routing(5, 4, 2)
    x, w, head = random(5, 6), random(5, 2, grad=False), random(5, 6, seed=1)
    found = second_order(lambda x: fused(x, w, ids), x, head)
    exact = second_order(lambda x: by_formula(x, wide(w), ids), wide(x), wide(head))
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-4, atol=1e-4)


def test_first_gradients_under_create_graph_have_the_same_types_in_bfloat16():
    ids = routing(6, 4, 2)
    for rounded in (False, True):
        x, w = inputs(6, 8, 2, BRAIN, FLOAT)
        plain = torch.autograd.grad(fused(x, w, ids, rounded).sum(), [x, w])
        graphed = torch.autograd.grad(fused(x, w, ids, rounded).sum(), [x, w], create_graph=True)
        for a, b in zip(plain, graphed, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(("dtype", "weights", "rounded", "_"), MIXED[:3] + DTYPES[:1])
def test_fullgraph_compilation_keeps_the_operators(dtype, weights, rounded, _):
    ids = routing(6, 4, 2)
    x, w = inputs(6, 8, 2, dtype, weights)
    traced, operators = compiled(lambda x, w: fused(x, w, ids, rounded))
    for function in (traced, lambda x, w: fused(x, w, ids, rounded)):
        found = results(function, [x, w])
        if function is traced:
            first = found
    torch.testing.assert_close(first, found, rtol=0, atol=0)
    assert operators.count("npu.npu_moe_token_permute.default") == 1
    assert operators.count("npu.npu_moe_token_unpermute_grad_v2.default") == 1


@pytest.mark.parametrize("dynamic", [True, None])
def test_new_numbers_of_tokens_are_not_compiled_again_and_again(dynamic):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    traced = torch.compile(fused, backend=counter, fullgraph=True, dynamic=dynamic)
    for tokens in (5, 7, 9, 11):
        ids = routing(tokens, 4, 2)
        x, w = inputs(tokens, 8, 2, BRAIN, FLOAT)
        found, exact = (torch.autograd.grad(f(x, w, ids).square().sum(), [x, w]) for f in (traced, fused))
        torch.testing.assert_close(found, exact, rtol=0, atol=0)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("rounded", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(rounded):
    from torch.utils.checkpoint import checkpoint

    ids = routing(6, 4, 2)
    x, w = inputs(6, 8, 2, BRAIN, FLOAT)
    plain = torch.autograd.grad(fused(x, w, ids, rounded).square().sum(), [x, w])
    again = checkpoint(lambda x, w: fused(x, w, ids, rounded), x, w, use_reentrant=False)
    for a, b in zip(plain, torch.autograd.grad(again.square().sum(), [x, w]), strict=True):
        assert torch.equal(a, b)


def test_no_argument_is_changed():
    ids = routing(6, 4, 2)
    for dtype, weights, rounded, _ in DTYPES:
        x, w = inputs(6, 8, 2, dtype, weights)
        before = [t.detach().clone() for t in (x, w, ids)]
        y = fused(x, w, ids, rounded)
        head = torch.ones_like(y)
        y.backward(head)
        assert torch.equal(head, torch.ones_like(y))
        assert all(torch.equal(a, b.detach()) for a, b in zip(before, (x, w, ids), strict=True))


@pytest.mark.parametrize(("dtype", "weights", "rounded", "_"), DTYPES)
def test_older_torch_npu_without_the_second_gradient_operators_gives_the_same(dtype, weights, rounded, _, monkeypatch):
    ids = routing(12, 4, 2)
    x, w = inputs(12, 8, 2, dtype, weights)
    newer = results(lambda x, w: fused(x, w, ids, rounded), [x, w])
    monkeypatch.setattr(ops, "schema_has", lambda name: not name.endswith("_v2"))
    with Ran() as ran:
        older = results(lambda x, w: fused(x, w, ids, rounded), [x, w])
    assert ran["npu_moe_token_unpermute_grad"] == 1
    assert not any(name.endswith("_v2") for name in ran.counts)
    torch.testing.assert_close(newer, older, rtol=0, atol=0)


def test_a_gradient_that_nobody_asks_for_costs_nothing():
    ids = routing(6, 4, 2)
    x = random(6, 8)
    permuted, _ = ops.permute(x, ids)
    other = random(3)
    ((permuted.detach().sum() + other.sum()) * 1.0).backward()
    assert x.grad is None


def test_adding_the_same_rows_again_gives_the_same_bits():
    ids = routing(64, 8, 4)
    x, w = inputs(64, 32, 4, BRAIN, FLOAT)
    first = results(lambda x, w: fused(x, w, ids, True), [x, w])
    again = results(lambda x, w: fused(x, w, ids, True), [x, w])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
