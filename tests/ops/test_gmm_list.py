"""The rows of each expert times its matrix, where each matrix is a tensor of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import npu_patch.simulator
from npu_patch.ops.gmm_list import grouped_matmul_list, unsupported_list

from .test_gmm import by_loop, grouped
from .tools import Ran, assert_close, assert_no_worse, compiled, random, results, second_order, wide

FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
COUNTS = [3, 0, 5, 1]


def leaves(experts: int, k: int, n: int, dtype: torch.dtype = FLOAT, layout: str = "transposed", seed: int = 0):
    def shape(index: int) -> tuple[int, int]:
        return (n, k) if layout == "transposed" or (layout == "mixed" and index % 2) else (k, n)

    return [random(*shape(i), dtype=dtype, seed=seed + 100 * i) for i in range(experts)]


def seen(weights, k: int):
    """(k, n) each."""
    return [one if one.shape[0] == k else one.t() for one in weights]


def call(x: Tensor, *weights: Tensor, counts=COUNTS, cumulative=False, tail=False) -> Tensor:
    views, groups = seen(weights, x.shape[1]), grouped(counts, cumulative)
    assert unsupported_list(x, views, groups) is None
    return grouped_matmul_list(x, views, groups, cumulative=cumulative, tail=tail)


def formula(x: Tensor, *weights: Tensor, counts=COUNTS) -> Tensor:
    return by_loop(x, torch.stack(seen(weights, x.shape[1])), counts)


@pytest.mark.parametrize("layout", ["transposed", "plain", "mixed"])
@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize("tail", [0, 2])
def test_float32_equals_the_loop_and_is_stacked(layout, cumulative, tail):
    inputs = [random(9 + tail, 6), *leaves(4, 6, 7, layout=layout)]
    with Ran() as ran:
        assert_close(lambda *given: call(*given, cumulative=cumulative, tail=tail > 0), formula, *inputs)
    assert ran["npu_grouped_matmul"] == 3
    assert ran["stack"] + ran["cat"] >= 2


@pytest.mark.parametrize("counts", [[9], [0, 0], [0, 0, 1], [0]])
def test_one_expert_or_hardly_any_rows(counts):
    inputs = [random(sum(counts), 6), *leaves(len(counts), 6, 7)]
    found = results(lambda *given: call(*given, counts=counts), inputs)
    exact = results(lambda *given: formula(*given, counts=counts), [wide(one) for one in inputs])
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("layout", ["transposed", "plain", "mixed"])
@pytest.mark.parametrize("experts", [4, 130])
def test_the_error_is_no_worse_than_that_of_a_loop_in_the_same_type(dtype, layout, experts):
    counts = (COUNTS * 40)[:experts]
    assert_no_worse(
        lambda *given: call(*given, counts=counts),
        lambda *given: formula(*given, counts=counts),
        lambda *given: formula(*given, counts=counts),
        lambda seed: [
            random(sum(counts), 24, dtype=dtype, seed=seed),
            *leaves(experts, 24, 17, dtype, layout, seed),
        ],
        samples=2,
    )


@pytest.mark.parametrize("layout", ["transposed", "plain"])
def test_16_bit_matrices_are_neither_stacked_nor_copied_nor_kept(layout):
    x, weights = random(9, 6, dtype=BRAIN), leaves(4, 6, 7, BRAIN, layout)
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    views, groups = seen(weights, 6), grouped(COUNTS)
    with Ran() as ran, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = grouped_matmul_list(x, views, groups, cumulative=False)
    y.backward(torch.ones_like(y))
    assert not {"stack", "cat", "clone", "copy_", "_to_copy"} & set(ran.counts)
    assert set(kept) == {one.data_ptr() for one in (x, groups, *weights)}
    for one in weights:
        one.grad.mul_(2)  # as clipping does
        one.grad.zero_()


def test_stacked_copies_are_not_kept():
    x, weights = random(9, 6), leaves(4, 6, 7)
    with npu_patch.simulator.trace() as trace:
        call(x, *weights)
    assert trace.saved_bytes == 9 * 6 * 4 + 4 * 6 * 7 * 4 + 4 * 8


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN])
def test_frozen_matrices_get_no_gradient_and_cost_nothing(dtype):
    x, weights = random(9, 6, dtype=dtype), leaves(4, 6, 7, dtype)
    for one in weights:
        one.requires_grad_(False)
    with Ran() as ran:
        call(x, *weights).sum().backward()
    assert ran["npu_grouped_matmul"] == 2
    weights[2].requires_grad_(True)
    with Ran() as ran:
        call(x.detach(), *weights).sum().backward()
    assert ran["npu_grouped_matmul"] == 2
    assert [one.grad is None for one in weights] == [True, True, False, True]


def test_an_expert_without_rows_gets_zeros():
    x, weights = random(9, 6, dtype=BRAIN), leaves(4, 6, 7, BRAIN)
    call(x, *weights).sum().backward()
    assert weights[1].grad.count_nonzero() == 0
    assert all(one.grad.count_nonzero() for one in (weights[0], weights[2], weights[3]))


@pytest.mark.parametrize("layout", ["transposed", "plain"])
@pytest.mark.parametrize("tail", [0, 2])
def test_second_order_gradients_equal_the_formula(layout, tail):
    inputs = [random(9 + tail, 6), *leaves(4, 6, 7, layout=layout), random(9 + tail, 7)]
    found = second_order(lambda *given: call(*given, tail=tail > 0), *inputs)
    exact = second_order(formula, *(wide(one) for one in inputs))
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN])
def test_it_compiles_whole_with_its_gradients(dtype):
    inputs, groups = [random(9, 6, dtype=dtype), *leaves(4, 6, 7, dtype)], grouped(COUNTS)

    def f(x: Tensor, *weights: Tensor) -> Tensor:
        views = [one.t() for one in weights]
        assert unsupported_list(x, views, groups) is None
        return grouped_matmul_list(x, views, groups, cumulative=False)

    exact = results(f, inputs)
    run, operators = compiled(f)
    for a, b in zip(results(run, inputs), exact, strict=True):
        torch.testing.assert_close(a, b)
    assert sum("npu_grouped_matmul" in name for name in operators) == 3
    assert all(one.grad is None for one in inputs)


def test_nothing_waits_for_the_device():
    x, weights, groups = random(9, 6, dtype=BRAIN), leaves(4, 6, 7, BRAIN), grouped(COUNTS)
    with npu_patch.simulator.trace() as trace:
        grouped_matmul_list(x, seen(weights, 6), groups, cumulative=False).sum().backward()
    assert trace.host_syncs == 0
