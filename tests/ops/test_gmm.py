"""The rows of each expert times its matrix, against a loop over the experts."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import npu_patch.simulator
from npu_patch.ops import gmm as op

from .tools import Ran, assert_close, assert_no_worse, compiled, random, results, second_order, wide

FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
COUNTS = [3, 0, 5, 1]


def grouped(counts: list[int], cumulative: bool = False, dtype: torch.dtype = torch.int64) -> Tensor:
    tensor = torch.tensor(counts)
    return (tensor.cumsum(0) if cumulative else tensor).to(dtype).npu()


def by_loop(x: Tensor, weight: Tensor, counts: list[int], bias: Tensor | None = None) -> Tensor:
    """Rows past the last expert are zero."""
    parts, start = [], 0
    for index, count in enumerate(counts):
        part = x[start : start + count] @ weight[index]
        parts.append(part if bias is None else part + bias[index])
        start += count
    return torch.cat([*parts, x.new_zeros(x.shape[0] - start, weight.shape[2])])


def matrices(experts: int, k: int, n: int, dtype: torch.dtype = FLOAT, transposed: bool = False, seed: int = 0):
    """(experts, k, n), or (experts, n, k) to be seen transposed."""
    return random(*((experts, n, k) if transposed else (experts, k, n)), dtype=dtype, seed=seed)


def call(x, leaf, counts, *, transposed=False, cumulative=False, dtype=torch.int64, bias=None, tail=False):
    weight = leaf.transpose(1, 2) if transposed else leaf
    group_list = grouped(counts, cumulative, dtype)
    assert op.unsupported(x, weight, group_list, bias) is None
    return op.grouped_matmul(x, weight, group_list, cumulative=cumulative, bias=bias, tail=tail)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tail", [0, 4])
def test_float32_equals_the_loop_forward_and_backward(transposed, cumulative, dtype, tail):
    x, leaf, bias = random(sum(COUNTS) + tail, 6), matrices(4, 6, 7, transposed=transposed), random(4, 7)
    options = {"transposed": transposed, "cumulative": cumulative, "dtype": dtype, "tail": tail > 0}

    def formula(x: Tensor, leaf: Tensor, bias: Tensor | None = None) -> Tensor:
        return by_loop(x, leaf.transpose(1, 2) if transposed else leaf, COUNTS, bias)

    with Ran() as ran:
        assert_close(lambda x, w: call(x, w, COUNTS, **options), formula, x, leaf)
    assert ran["npu_grouped_matmul"] == 3
    with Ran() as ran:
        assert_close(lambda x, w, b: call(x, w, COUNTS, bias=b, **options), formula, x, leaf, bias)
    assert ran["npu_grouped_matmul"] == 4


SHAPES = [(1, 6, 7), (4, 1, 7), (4, 6, 1), (4, 1, 1), (2, 64, 32)]


@pytest.mark.parametrize(("experts", "k", "n"), SHAPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", ["some", "one", "none"])
@pytest.mark.parametrize("tail", [0, 2])
def test_sizes_of_one_and_no_rows_at_all(experts, k, n, transposed, rows, tail):
    counts = [{"some": 3, "one": int(i == experts - 1), "none": 0}[rows] for i in range(experts)]
    if not tail and not sum(counts) and rows != "none":
        return
    x, leaf, bias = random(sum(counts) + tail, k), matrices(experts, k, n, transposed=transposed), random(experts, n)
    found = results(lambda x, w, b: call(x, w, counts, transposed=transposed, bias=b, tail=tail > 0), [x, leaf, bias])
    exact = results(
        lambda x, w, b: by_loop(x, w.transpose(1, 2) if transposed else w, counts, b), [wide(x), wide(leaf), wide(bias)]
    )
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-5, atol=1e-5)


def test_a_single_row_of_unusual_strides_is_taken():
    leaf = matrices(2, 6, 7)
    x = random(1, 20)[:, :6]
    assert x.is_contiguous()
    assert x.stride(0) == 20
    assert_close(lambda x, w: call(x, w, [0, 1]), lambda x, w: by_loop(x, w, [0, 1]), x.detach().requires_grad_(), leaf)


@st.composite
def skewed(draw: st.DrawFn) -> list[int]:
    experts = draw(st.integers(1, 8))
    kind = draw(st.sampled_from(["any", "one expert", "empty ends"]))
    if kind == "one expert":
        chosen = draw(st.integers(0, experts - 1))
        return [draw(st.integers(1, 9)) if i == chosen else 0 for i in range(experts)]
    counts = [draw(st.integers(0, 5)) for _ in range(experts)]
    return [0, *counts, 0] if kind == "empty ends" else counts


@settings(max_examples=60, deadline=None)
@given(skewed(), st.integers(0, 3), st.booleans(), st.booleans())
def test_any_routing_equals_the_loop(counts, tail, transposed, cumulative):
    x, leaf = random(sum(counts) + tail, 5), matrices(len(counts), 5, 3, transposed=transposed)
    found = results(
        lambda x, w: call(x, w, counts, transposed=transposed, cumulative=cumulative, tail=tail > 0), [x, leaf]
    )
    exact = results(lambda x, w: by_loop(x, w.transpose(1, 2) if transposed else w, counts), [wide(x), wide(leaf)])
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("biased", [False, True])
def test_the_error_is_no_worse_than_that_of_a_loop_in_the_same_type(dtype, biased):
    counts = [9, 0, 17, 4]

    def make(seed: int) -> list[Tensor]:
        inputs = [random(30, 48, dtype=dtype, seed=seed), matrices(4, 48, 33, dtype, seed=seed)]
        return [*inputs, random(4, 33, dtype=dtype, seed=seed)] if biased else inputs

    assert_no_worse(
        lambda x, w, b=None: call(x, w, counts, bias=b),
        lambda x, w, b=None: by_loop(x, w, counts, b),
        lambda x, w, b=None: by_loop(x, w, counts, b),
        make,
    )


def test_the_operator_leaves_the_tail_and_empty_experts_undefined_and_this_op_does_not():
    x, leaf, groups = random(11, 6, grad=False), matrices(4, 6, 7).detach(), grouped(COUNTS)
    options = {"group_list": groups, "split_item": 3, "group_list_type": 1}
    (raw,) = torch.ops.npu.npu_grouped_matmul([x], [leaf], group_type=0, **options)
    assert raw[9:].isnan().all()
    (raw,) = torch.ops.npu.npu_grouped_matmul([x.t()], [random(11, 7, grad=False)], group_type=2, **options)
    assert [bool(one.isnan().any()) for one in raw] == [False, True, False, False]
    x.requires_grad_()
    leaf.requires_grad_()
    y = call(x, leaf, COUNTS, tail=True)
    assert y[9:].count_nonzero() == 0
    y.backward(torch.full_like(y, float("nan")).index_fill_(0, torch.arange(9, device="npu"), 1.0))
    assert x.grad[9:].count_nonzero() == 0
    assert not x.grad.isnan().any()
    assert not leaf.grad.isnan().any()
    assert leaf.grad[1].count_nonzero() == 0


@pytest.mark.parametrize("experts", [1, 4])
def test_a_tail_that_holds_nan_reaches_nothing(experts):
    counts = COUNTS if experts == 4 else [9]
    x, leaf, bias = random(11, 6, grad=False), matrices(experts, 6, 7), random(experts, 7)
    x[9:] = float("nan")
    x.requires_grad_()
    found = results(lambda x, w, b: call(x, w, counts, bias=b, tail=True), [x, leaf, bias])
    assert not any(one.isnan().any() for one in found)
    assert found[0][9:].count_nonzero() == found[1][9:].count_nonzero() == 0


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("experts", [1, 4])
def test_nothing_waits_for_the_device(tail, experts):
    counts = COUNTS if experts == 4 else [9]
    x, leaf, bias, groups = random(9, 6), matrices(experts, 6, 7), random(experts, 7), grouped(counts)
    with npu_patch.simulator.trace() as trace:
        op.grouped_matmul(x, leaf, groups, cumulative=False, bias=bias, tail=tail).sum().backward()
    assert trace.host_syncs == 0


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT, BRAIN])
def test_only_the_rows_and_the_matrices_themselves_are_kept(transposed, dtype):
    x, leaf, groups = random(9, 6, dtype=dtype), matrices(4, 6, 7, dtype, transposed), grouped(COUNTS)
    weight = leaf.transpose(1, 2) if transposed else leaf
    pointers = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype is not torch.bool:
            pointers.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = op.grouped_matmul(x, weight, groups, cumulative=False)
    assert set(pointers) == {x.data_ptr(), leaf.data_ptr(), groups.data_ptr()}  # but for one bool per expert
    y.sum().backward()
    assert leaf.grad.is_contiguous()


@pytest.mark.parametrize(
    ("rows", "weight", "bias", "launches"),
    [
        (True, True, True, 4),
        (True, False, False, 2),
        (False, True, False, 2),
        (False, False, True, 2),
        (False, False, False, 1),
    ],
)
def test_only_the_gradients_that_are_needed_are_computed_and_kept(rows, weight, bias, launches):
    x, leaf, b = random(9, 6, grad=rows), matrices(4, 6, 7).detach().requires_grad_(weight), random(4, 7, grad=bias)
    groups = grouped(COUNTS)
    with Ran() as ran, npu_patch.simulator.trace() as trace:
        y = op.grouped_matmul(x, leaf, groups, cumulative=False, bias=b)
    if y.requires_grad:
        assert trace.saved_bytes == 32 + (9 * 6 * 4 + 4 if weight else 0) + (4 * 6 * 7 * 4 if rows else 0)
        with ran:
            y.backward(torch.ones_like(y))
    assert ran["npu_grouped_matmul"] == launches
    assert [one.grad is not None for one in (x, leaf, b)] == [rows, weight, bias]


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_result_is_the_same_and_nothing_is_kept(guard):
    x, leaf = random(9, 6), matrices(4, 6, 7)
    exact = call(x, leaf, COUNTS).detach()
    with guard(), npu_patch.simulator.trace() as trace:
        assert torch.equal(call(x, leaf, COUNTS), exact)
    assert trace.saved_bytes == 0


@pytest.mark.parametrize("layout", ["expanded", "transposed", "strided"])
def test_incoming_gradients_of_any_layout_are_the_same(layout):
    x, leaf = random(9, 6), matrices(4, 6, 7)
    y = call(x, leaf, COUNTS)
    if layout == "expanded":
        head = torch.ones((), device="npu").expand(y.shape)
    else:
        head = random(7, 9, grad=False).t() if layout == "transposed" else random(9, 14, grad=False)[:, ::2]
    found = torch.autograd.grad(y, [x, leaf], head, retain_graph=True)
    for a, b in zip(found, torch.autograd.grad(y, [x, leaf], head.contiguous()), strict=True):
        assert torch.equal(a, b)


def test_rows_and_matrices_of_any_layout_are_taken():
    x, leaf = random(6, 9), random(4, 6, 14)
    assert_close(
        lambda x, w: op.grouped_matmul(x.t(), w[..., ::2], grouped(COUNTS), cumulative=False),
        lambda x, w: by_loop(x.t(), w[..., ::2], COUNTS),
        x,
        leaf,
    )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tail", [0, 2])
@pytest.mark.parametrize("counts", [COUNTS, [9]])
def test_second_order_gradients_equal_the_formula(transposed, tail, counts):
    x, leaf, head = random(9 + tail, 6), matrices(len(counts), 6, 7, transposed=transposed), random(9 + tail, 7)
    bias = random(len(counts), 7)
    found = second_order(
        lambda x, w, b: call(x, w, counts, transposed=transposed, bias=b, tail=tail > 0).square(), x, leaf, bias, head
    )
    exact = second_order(
        lambda x, w, b: by_loop(x, w.transpose(1, 2) if transposed else w, counts, b).square(),
        *(wide(one) for one in (x, leaf, bias, head)),
    )
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-4, atol=1e-4)


def test_third_order_gradients_exist():
    x, leaf = random(9, 6), matrices(4, 6, 7)

    def third(x: Tensor, leaf: Tensor, function) -> Tensor:
        first = torch.autograd.grad(function(x, leaf).pow(4).sum(), x, create_graph=True)[0]
        second = torch.autograd.grad(first.square().sum(), leaf, create_graph=True)[0]
        return torch.autograd.grad(second.square().sum(), x)[0]

    found = third(x, leaf, lambda x, w: call(x, w, COUNTS))
    exact = third(wide(x), wide(leaf), lambda x, w: by_loop(x, w, COUNTS))
    assert ((found.cpu().double() - exact).norm() / exact.norm()) < 1e-4


@pytest.mark.parametrize("experts", [1, 4])
def test_autocast_changes_nothing(experts):
    counts = COUNTS if experts == 4 else [9]
    x, leaf, bias = random(9, 6), matrices(experts, 6, 7), random(experts, 7)
    exact = call(x, leaf, counts, bias=bias)
    with torch.autocast("npu", dtype=BRAIN):
        found = call(x, leaf, counts, bias=bias)
    assert found.dtype == FLOAT
    assert torch.equal(found, exact)
    pairs = [torch.autograd.grad(y.square().sum(), [x, leaf, bias]) for y in (found, exact)]
    assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("experts", [1, 4])
def test_it_compiles_whole_with_its_gradients(tail, experts):
    counts = COUNTS if experts == 4 else [9]
    x, leaf, groups = random(9, 6), matrices(experts, 6, 7, transposed=True), grouped(counts, dtype=torch.int32)

    def f(x: Tensor, leaf: Tensor, groups: Tensor) -> Tensor:
        weight = leaf.transpose(1, 2)
        assert op.unsupported(x, weight, groups) is None
        return op.grouped_matmul(x, weight, groups, cumulative=False, tail=tail)

    exact = results(lambda x, w: f(x, w, groups), [x, leaf])
    run, operators = compiled(f)
    found = results(lambda x, w: run(x, w, groups), [x, leaf])
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b)
    assert sum("npu_grouped_matmul" in name for name in operators) == (3 if experts == 4 else 0)


def test_counts_are_converted_once_and_are_not_kept_alive():
    x, leaf, groups = random(9, 6, grad=False), matrices(4, 6, 7).detach(), grouped(COUNTS, dtype=torch.int32)
    with Ran() as ran:
        for _ in range(3):
            op.grouped_matmul(x, leaf, groups, cumulative=False)
    assert ran["_to_copy"] == 1
    for dtype in (torch.int32, torch.int64):
        groups = grouped(COUNTS, dtype=dtype)
        op.grouped_matmul(x, leaf, groups, cumulative=False, tail=True)
        alive = weakref.ref(groups)
        del groups
        gc.collect()
        assert alive() is None


def test_counts_that_change_in_place_are_seen():
    x, leaf, groups = random(9, 6), matrices(4, 6, 7), grouped(COUNTS, dtype=torch.int32)
    op.grouped_matmul(x, leaf, groups, cumulative=False).sum().backward()
    groups.copy_(grouped([9, 0, 0, 0]))
    found = op.grouped_matmul(x, leaf, groups, cumulative=False)
    torch.testing.assert_close(found, x @ leaf[0])
