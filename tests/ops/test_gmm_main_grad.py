"""Gradients of the matrices that are summed in float32, in a tensor that the parameter has for them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from npu_patch.ops import gmm as op

from .test_gmm import by_loop, grouped
from .tools import Ran, compiled, random

BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
COUNTS = [3, 0, 5, 1]


def parameter(dtype: torch.dtype = BRAIN, transposed: bool = False, experts: int = 4) -> nn.Parameter:
    weight = nn.Parameter(random(*((experts, 7, 6) if transposed else (experts, 6, 7)), dtype=dtype, grad=False))
    weight.main_grad = torch.zeros_like(weight, dtype=FLOAT)
    return weight


@pytest.mark.parametrize("dtype", [BRAIN, HALF])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize("tail", [0, 2])
def test_two_steps_are_summed_without_rounding(dtype, transposed, cumulative, tail):
    weight, exact = parameter(dtype, transposed), 0.0
    for seed in range(2):
        x, head = random(9 + tail, 6, dtype=dtype, seed=seed), random(9 + tail, 7, dtype=dtype, seed=seed, grad=False)
        with Ran() as ran:
            groups = grouped(COUNTS, cumulative)
            view = weight.transpose(1, 2) if transposed else weight
            y = op.grouped_matmul(x, view, groups, cumulative=cumulative, tail=tail > 0, main_grad=True)
            y.backward(head)
        assert ran["npu_grouped_matmul_add_"] == 1
        assert ran["npu_grouped_matmul"] == 2
        assert x.grad is not None
        wide = weight.detach().cpu().double().requires_grad_()
        seen = wide.transpose(1, 2) if transposed else wide
        by_loop(x.detach().cpu().double(), seen, COUNTS).backward(head.cpu().double())
        exact = exact + wide.grad
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad.cpu().double(), exact, rtol=1e-5, atol=1e-5)


def step(x: Tensor, view: Tensor, main_grad: bool = True) -> Ran:
    with Ran() as ran:
        groups = grouped(COUNTS)
        op.grouped_matmul(x, view, groups, cumulative=False, main_grad=main_grad).sum().backward()
    return ran


def test_it_is_off_unless_asked_for():
    weight = parameter()
    assert step(random(9, 6, dtype=BRAIN), weight, main_grad=False)["npu_grouped_matmul_add_"] == 0
    assert weight.grad is not None
    assert weight.main_grad.count_nonzero() == 0


@pytest.mark.parametrize("kind", ["none", "bfloat16", "shape", "strides", "float32 weight", "slice", "computed"])
def test_what_does_not_fit_gets_the_usual_gradient(kind):
    weight = parameter(FLOAT if kind == "float32 weight" else BRAIN)
    view: Tensor = weight
    if kind == "none":
        del weight.main_grad
    elif kind == "bfloat16":
        weight.main_grad = torch.zeros_like(weight)
    elif kind == "shape":
        weight.main_grad = torch.zeros(weight.numel(), device="npu")
    elif kind == "strides":
        weight.main_grad = torch.zeros(4, 7, 6, device="npu").transpose(1, 2)
    elif kind == "slice":
        weight = nn.Parameter(random(4, 6, 14, dtype=BRAIN, grad=False))
        weight.main_grad = torch.zeros_like(weight, dtype=FLOAT)
        view = weight[..., :7]
    elif kind == "computed":
        view = weight * 2
    assert step(random(9, 6, dtype=weight.dtype), view)["npu_grouped_matmul_add_"] == 0
    assert weight.grad is not None
    assert not weight.grad.isnan().any()


def test_one_expert_and_no_rows_get_the_usual_gradient():
    for rows, experts, counts in ((9, 1, [9]), (0, 4, [0, 0, 0, 0])):
        weight = parameter(experts=experts)
        y = op.grouped_matmul(random(rows, 6, dtype=BRAIN), weight, grouped(counts), cumulative=False, main_grad=True)
        y.sum().backward()
        assert weight.grad is not None


def test_create_graph_and_compiled_code_get_the_usual_gradient():
    weight, x, groups = parameter(), random(9, 6, dtype=BRAIN), grouped(COUNTS)
    y = op.grouped_matmul(x, weight, groups, cumulative=False, main_grad=True)
    (grad,) = torch.autograd.grad(y.sum(), weight, create_graph=True)
    assert grad is not None

    f, operators = compiled(lambda x, w: op.grouped_matmul(x, w, groups, cumulative=False, main_grad=True))
    f(x, weight).sum().backward()
    assert weight.grad is not None
    assert not any("add_" in name and "grouped" in name for name in operators)


def test_the_operator_ignores_that_a_list_holds_counts():
    total, x, head = torch.zeros(2, 6, 7, device="npu"), random(9, 6, dtype=BRAIN), random(9, 7, dtype=BRAIN)
    counts = torch.tensor([2, 7]).npu()
    torch.ops.npu.npu_grouped_matmul_add_(total, x.detach(), head.detach(), counts, group_list_type=1)
    as_counts = x.detach()[2:].float().t() @ head.detach()[2:].float()
    as_sums = x.detach()[2:7].float().t() @ head.detach()[2:7].float()
    torch.testing.assert_close(total[1], as_sums, rtol=1e-4, atol=1e-4)
    assert (total[1] - as_counts).abs().max() > 1e-2
