"""What the operators of `permute` cannot take, by reason."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from npu_patch.ops import permute as ops

from .test_permute import routing
from .tools import random

ORDER = torch.int32


class Subclass(torch.Tensor):
    pass


def order(count: int, dtype: torch.dtype = ORDER, device: str = "npu") -> Tensor:
    return torch.arange(count, dtype=dtype, device=device)


PERMUTE = {
    "not on an NPU": lambda: (torch.ones(4, 8), torch.zeros(4, 2, dtype=torch.int64)),
    "the expert ids are on another device": lambda: (random(4, 8), torch.zeros(4, 2, dtype=torch.int64)),
    "tokens of type float64": lambda: (random(4, 8).double(), routing(4, 4, 2)),
    "tokens of type int32": lambda: (torch.ones(4, 8, dtype=torch.int32, device="npu"), routing(4, 4, 2)),
    "expert ids of type float32": lambda: (random(4, 8), routing(4, 4, 2, torch.float32)),
    "expert ids of type int16": lambda: (random(4, 8), routing(4, 4, 2, torch.int16)),
    "tokens and expert ids are not (tokens, size) and (tokens, top_k)": lambda: (random(4, 2, 8), routing(4, 4, 2)),
    "the tokens have no size": lambda: (random(4, 0), routing(4, 4, 2)),
    "each token has no expert or more than 512": lambda: (random(4, 8), routing(4, 513, 513)),
    "Subclass is not a plain tensor": lambda: (random(4, 8).detach().as_subclass(Subclass), routing(4, 4, 2)),
}


@pytest.mark.parametrize("reason", PERMUTE)
def test_what_cannot_be_permuted_has_a_reason(reason):
    assert ops.unsupported(*PERMUTE[reason]()) == reason


REFUSED = set(PERMUTE) - {"Subclass is not a plain tensor"}  # which the operator takes, and loses the class


@pytest.mark.parametrize("reason", sorted(REFUSED))
def test_the_operator_refuses_it_without_the_guard(reason):
    with pytest.raises((RuntimeError, NotImplementedError)):
        ops.permute(*PERMUTE[reason]())


def test_shapes_that_do_not_fit_have_a_reason():
    reason = "tokens and expert ids are not (tokens, size) and (tokens, top_k)"
    for tokens, ids in ((random(4, 8), routing(3, 4, 2)), (random(4, 8), routing(4, 4, 1)[:, 0])):
        assert ops.unsupported(tokens, ids) == reason
    with pytest.raises((RuntimeError, IndexError)):
        ops.permute(random(4, 8), routing(4, 4, 1)[:, 0])


def test_no_expert_at_all_has_a_reason():
    ids = torch.empty(4, 0, dtype=torch.int64, device="npu")
    assert ops.unsupported(random(4, 8), ids) == "each token has no expert or more than 512"
    with pytest.raises(RuntimeError):
        ops.permute(random(4, 8), ids)


def test_too_many_ids_have_a_reason_and_the_last_number_that_fits_has_none():
    def reason(tokens: int, top_k: int) -> str | None:
        facts = torch.Size((tokens, 8)), torch.float32, torch.device("npu", 0), torch.Size((tokens, top_k)), torch.int64
        return ops._judge(*facts)

    assert reason((1 << 24) - 2, 1) is None
    assert reason((1 << 24) - 1, 1) == reason(1 << 15, 512) == "16777215 expert ids or more"


def test_the_first_and_last_experts_of_the_limits_are_taken():
    ids = routing(2, 512, 512)
    assert ops.unsupported(random(2, 8), ids) is None
    permuted, _ = ops.permute(random(2, 8, grad=False), ids)
    assert permuted.shape == (1024, 8)


COMBINE = {
    "not on an NPU": lambda: (torch.ones(4, 8), order(4, device="cpu"), torch.ones(2, 2)),
    "the weights or the order are on another device": lambda: (random(4, 8), order(4), torch.ones(2, 2)),
    "expert outputs of type float64": lambda: (random(4, 8).double(), order(4), random(2, 2)),
    "the order is not that of npu_moe_token_permute": lambda: (random(4, 8), order(4, torch.int64), random(2, 2)),
    "the expert outputs are not one row for each copy of a token": lambda: (random(3, 8), order(4), random(2, 2)),
    "router weights of type float64": lambda: (random(4, 8), order(4), random(2, 2).double()),
    "the router weights are not (tokens, top_k)": lambda: (random(4, 8), order(4), random(4)),
    "Subclass is not a plain tensor": lambda: (random(4, 8), order(4), random(2, 2).detach().as_subclass(Subclass)),
}


@pytest.mark.parametrize("reason", COMBINE)
def test_what_cannot_be_combined_has_a_reason(reason):
    assert ops.unsupported_combine(*COMBINE[reason]()) == reason


#: Taken by the operator or by PyTorch, with another meaning or none.
UNSEEN = {"Subclass is not a plain tensor", "the expert outputs are not one row for each copy of a token"}


@pytest.mark.parametrize("reason", sorted(set(COMBINE) - UNSEEN))
def test_the_operators_refuse_it_without_the_guard(reason):
    with pytest.raises((RuntimeError, NotImplementedError, IndexError)):
        ops.combine(*COMBINE[reason](), rounded=False)


def test_rows_that_are_missing_would_be_other_memory():
    assert (
        ops.combine(*COMBINE["the expert outputs are not one row for each copy of a token"](), rounded=False)[1]
        .isnan()
        .any()
    )


@pytest.mark.parametrize("weights", [(3, 2), (2, 3), (1, 2, 2)])
def test_weights_of_another_shape_have_a_reason(weights):
    assert ops.unsupported_combine(random(4, 8), order(4), random(*weights)) == (
        "the router weights are not (tokens, top_k)"
    )


def test_a_plain_sum_needs_no_weights():
    assert ops.unsupported_combine(random(4, 8), order(4), None) is None
    assert ops.unsupported_combine(random(4, 8), order(4)[None], None) == (
        "the order is not that of npu_moe_token_permute"
    )


def test_under_a_function_transform_there_is_a_reason():
    reasons: list[str | None] = []
    x, ids = random(4, 8, grad=False), routing(4, 4, 2)

    def f(x: Tensor) -> Tensor:
        reasons.append(ops.unsupported(x, ids))
        reasons.append(ops.unsupported_combine(x, order(4), None))
        return x.sum()

    torch.func.grad(f)(x)
    torch.vmap(f)(x.expand(2, 4, 8))
    with torch.autograd.forward_ad.dual_level():
        f(x)
    assert reasons == ["a torch.func transform or forward-mode differentiation is active"] * 6


def test_under_a_function_transform_the_operators_fail_without_the_guard():
    x, ids = random(4, 8, grad=False), routing(4, 4, 2)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: ops.permute(x, ids)[0].sum())(x)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: ops.combine(x, order(4), random(2, 2), rounded=False).sum())(x)


def test_ids_that_no_expert_can_have_are_refused_by_the_simulated_device():
    for bad in (-1, (1 << 24) - 1):
        ids = routing(4, 4, 2)
        ids[1, 0] = bad
        assert ops.unsupported(random(4, 8), ids) is None  # a look would wait for the device
        with pytest.raises(RuntimeError, match="ids must be in"):
            ops.permute(random(4, 8), ids)
