from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import npu_patch.simulator
from npu_patch.ops import router as op
from npu_patch.ops.router import Routing

from ..support.numerics import relative_error
from .tools import Ran, assert_no_worse, compiled, random

F32, BF16 = torch.float32, torch.bfloat16
ROUTINGS = {
    "sigmoid, divided": (Routing("sigmoid", 3, 1e-20, 2.5), False),
    "sigmoid, divided, bias": (Routing("sigmoid", 3, 1e-20, 2.5), True),
    "sigmoid, divided, groups": (Routing("sigmoid", 4, 1e-20, 2.5, 4, 2), True),
    "sigmoid": (Routing("sigmoid", 3, None, 1.5, 2, 1), True),
    "sigmoid, groups": (Routing("sigmoid", 3, None, 1.0, 4, 2), False),
    "softmax": (Routing("softmax", 3), False),
    "softmax, scale": (Routing("softmax", 3, None, 16.0), False),
    "softmax, groups by the best": (Routing("softmax", 3, None, 16.0, 4, 2, "max"), False),
    "softmax, divided": (Routing("softmax", 3, 0.0), False),
    "softmax, divided, scale": (Routing("softmax", 3, 1e-20, 1.5), False),
    "softmax, divided, groups": (Routing("softmax", 3, 1e-20, 1.5, 4, 2), False),
    "softmax, divided by a sum and more": (Routing("softmax", 3, 0.01), False),
    "softmax, bias": (Routing("softmax", 3, None), True),
}
OPERATORS = ("npu_moe_gating_top_k", "npu_moe_gating_top_k_softmax_v2")


def formula(x: Tensor, r: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """As models write it, in the precision of x."""
    scores = x.sigmoid() if r.score == "sigmoid" else x.softmax(-1)
    choice = scores if bias is None else scores + bias.to(x.dtype)
    if r.groups > 1:
        parts = choice.unflatten(-1, (r.groups, -1))
        of_group = parts.amax(-1) if r.of_group == "max" else parts.topk(2, -1).values.sum(-1)
        hidden = torch.ones_like(of_group, dtype=torch.bool).scatter(-1, of_group.topk(r.kept, -1).indices, False)
        choice = parts.masked_fill(hidden.unsqueeze(-1), -torch.inf).flatten(-2)
    experts = choice.topk(r.top_k, -1).indices
    weights = scores.gather(-1, experts)
    if r.eps is not None:
        weights = weights / (weights.sum(-1, keepdim=True) + r.eps)
    return weights * r.scale, experts, scores


def bias_of(wanted: bool) -> Tensor | None:
    return torch.linspace(0.3, -0.3, 16).npu() if wanted else None


def fused(x: Tensor, r: Routing, bias: Tensor | None, **options) -> tuple[Tensor, Tensor, Tensor | None]:
    assert op.unsupported(x, r, bias) is None
    options.setdefault("dtype", F32)
    with Ran() as ran:
        result = op.route(x, r, bias, **options)
    assert sum(ran[name] for name in OPERATORS) == 1
    return result


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_choice_weights_scores_and_gradients_equal_the_formula(name, scores):
    r, with_bias = ROUTINGS[name]
    bias = bias_of(with_bias)
    x = random(40, 16)
    exact = x.detach().cpu().double().requires_grad_()
    weights, experts, found = fused(x, r, bias, scores=scores)
    expected, chosen, everything = formula(exact, r, None if bias is None else bias.cpu())
    assert (experts.dtype, weights.dtype) == (torch.int64, F32)
    assert torch.equal(experts.cpu(), chosen)  # no two scores are equal here, so the order is one
    assert relative_error(weights, expected) <= 1e-6
    heads = random(40, 3 if r.top_k == 3 else 4, grad=False), random(40, 16, seed=1, grad=False)
    loss, wanted = (weights * heads[0]).sum(), (expected * heads[0].cpu()).sum()
    if scores:
        assert found.dtype is F32
        assert relative_error(found, everything) <= 1e-6
        loss, wanted = loss + (found * heads[1]).sum(), wanted + (everything * heads[1].cpu()).sum()
    else:
        assert found is None
    gradients = [torch.autograd.grad(one, leaf)[0] for one, leaf in ((loss, x), (wanted, exact))]
    assert relative_error(*gradients) <= 1e-5


@pytest.mark.parametrize("name", ROUTINGS)
def test_without_a_gradient_the_result_is_the_same(name):
    r, with_bias = ROUTINGS[name]
    x = random(40, 16)
    trained = fused(x, r, bias_of(with_bias))
    with torch.no_grad():
        plain = fused(x, r, bias_of(with_bias))
    with torch.inference_mode():
        inference = fused(x.detach(), r, bias_of(with_bias))
    for weights, experts, _ in (plain, inference):
        assert not weights.requires_grad
        assert torch.equal(experts, trained[1])
        assert relative_error(weights, trained[0]) <= 1e-6


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("name", ["softmax", "softmax, divided", "sigmoid, divided", "sigmoid"])
def test_weights_of_half_logits_round_once(name, dtype):
    """In training as without a gradient; against the formula in float64, whose choice has no ties here."""
    r, _ = ROUTINGS[name]
    x = (torch.rand(40, 16, generator=torch.Generator().manual_seed(3)).argsort(-1) / 4 - 2).to(BF16).npu()
    expected, chosen, _ = formula(x.cpu().double(), r, None)
    for leaf in (x, x.clone().requires_grad_()):
        weights, experts, _ = fused(leaf, r, None, dtype=dtype)
        assert weights.dtype is dtype
        assert torch.equal(experts.cpu(), chosen)
        if dtype is BF16:
            assert torch.equal(weights.cpu().float(), expected.to(BF16).float())
        else:
            assert relative_error(weights, expected) <= 1e-6
    head = torch.tensor([1.0, -0.5, 0.25])  # exact in every type
    gradient = torch.autograd.grad((weights.float() * head.npu()).sum(), leaf)[0]
    exact = x.cpu().double().requires_grad_()
    wanted = torch.autograd.grad((formula(exact, r, None)[0] * head).sum(), exact)[0]
    assert gradient.dtype is BF16
    assert relative_error(gradient, wanted) <= 1e-2


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("softmax", BF16),
        ("softmax, divided", BF16),
        ("softmax, scale", F32),
        ("sigmoid, divided", F32),
        ("sigmoid", F32),
    ],
)
def test_half_logits_are_rounded_no_worse_than_in_the_originals(name, dtype):
    """The types of weights that models have; those of Mixtral, float32 divided by their sum, are judged above."""
    r, _ = ROUTINGS[name]

    def original(x):
        return formula(x.float(), r, None)[0].to(dtype)

    def distinct(seed):
        order = torch.rand(64, 16, generator=torch.Generator().manual_seed(seed)).argsort(-1)
        return [((order + 0.37 * seed) / 4 - 2).to(BF16).npu().requires_grad_()]

    assert_no_worse(lambda x: fused(x, r, None, dtype=dtype)[0], original, lambda x: formula(x, r, None)[0], distinct)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 9),
    experts=st.integers(3, 33),
    part=st.floats(0, 1),
    score=st.sampled_from(["softmax", "sigmoid"]),
    eps=st.sampled_from([None, 0.0, 1e-20]),
    spread=st.sampled_from([0.0, 1.0, 30.0, 200.0]),
    seed=st.integers(0, 99),
)
def test_any_logits_give_finite_weights_of_different_experts(tokens, experts, part, score, eps, spread, seed):
    """Equal scores, all experts, one token, logits whose scores are 0 or 1."""
    k = max(1, round(part * experts))
    if score == "sigmoid" and eps is None:
        eps = 1e-20  # undivided it is left alone
    r = Routing(score, k, eps)
    x = (random(tokens, experts, seed=seed).detach() * spread).requires_grad_()
    weights, chosen, _ = fused(x, r, None)
    assert all(len(set(row)) == k for row in chosen.tolist())
    scores = (x.sigmoid() if score == "sigmoid" else x.softmax(-1)).detach()
    best = scores.topk(k, -1).values.sort(-1).values
    torch.testing.assert_close(scores.gather(-1, chosen).sort(-1).values, best, rtol=1e-6, atol=1e-7)
    if score == "sigmoid" and spread == 200.0 and eps is not None:
        return  # all chosen scores may be 0: 0 / 0 in the original, too
    weights.sum().backward()
    assert weights.isfinite().all()
    assert x.grad.isfinite().all()


def test_of_equal_scores_the_lower_expert_is_chosen():
    for score, eps in (("softmax", None), ("softmax", 1e-20), ("sigmoid", 1e-20)):
        experts = fused(torch.zeros(2, 8).npu(), Routing(score, 3, eps), None)[1]
        assert experts.tolist() == [[0, 1, 2], [0, 1, 2]]


# ---- gradients of gradients, memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_gradient_has_a_gradient(name):
    r, with_bias = ROUTINGS[name]
    bias = bias_of(with_bias)
    x = random(7, 16)
    exact = x.detach().cpu().double().requires_grad_()
    seconds = []
    for leaf, function in ((x, fused), (exact, formula)):
        place = None if bias is None else bias.to(leaf.device)
        weights = function(leaf, r, place)[0]
        head = torch.linspace(-1, 1, weights.numel()).view(weights.shape).to(leaf)
        first = torch.autograd.grad((weights * head).sum(), leaf, create_graph=True)[0]
        seconds.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    assert relative_error(*seconds) <= 1e-4


def test_the_gradient_operator_runs_for_sigmoid_alone():
    for name, count in (("sigmoid, divided, groups", 1), ("softmax", 0), ("softmax, divided", 0), ("sigmoid", 0)):
        r, with_bias = ROUTINGS[name]
        weights, _, _ = fused(random(5, 16), r, bias_of(with_bias))
        with Ran() as ran:
            weights.sum().backward()
        assert ran["npu_moe_gating_top_k_backward"] == count


def test_softmax_of_the_best_keeps_nothing_of_the_other_experts():
    x = random(64, 128, dtype=BF16)
    with npu_patch.simulator.trace(parameters=[x]) as ours:
        fused(x, Routing("softmax", 4, 0.0), None, dtype=BF16)
    with npu_patch.simulator.trace(parameters=[x]) as theirs:
        weights = x.softmax(-1, dtype=F32).topk(4, -1).values
        (weights / weights.sum(-1, keepdim=True)).to(BF16)
    assert ours.saved_bytes < theirs.saved_bytes / 4
    assert ours.launches < theirs.launches


@pytest.mark.parametrize("name", ROUTINGS)
def test_compiled_it_is_the_same(name):
    r, with_bias = ROUTINGS[name]
    bias = bias_of(with_bias)
    x = random(6, 16)
    expected = fused(x, r, bias)
    gradient = torch.autograd.grad(expected[0].square().sum(), x)[0]
    function, operators = compiled(lambda x: op.route(x, r, bias, dtype=F32)[:2])
    weights, experts = function(x)
    assert any("npu_moe_gating" in name for name in operators)
    assert torch.equal(experts, expected[1])
    assert relative_error(weights, expected[0]) <= 1e-6
    assert relative_error(torch.autograd.grad(weights.square().sum(), x)[0], gradient) <= 1e-5


# ---- what it does not take -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "routing", "bias", "words"),
    [
        (torch.zeros(2, 8), Routing("softmax", 2), None, "not on an NPU"),
        (torch.zeros(2, 8).double().npu(), Routing("softmax", 2), None, "logits of type float64"),
        (torch.zeros(1, 2, 8).npu(), Routing("softmax", 2), None, "logits are not (tokens, experts)"),
        (torch.zeros(0, 8).npu(), Routing("softmax", 2), None, "no tokens"),
        (torch.zeros(2, 2).npu(), Routing("softmax", 2), None, "not 3 to 2048 experts"),
        (torch.zeros(2, 2049).npu(), Routing("softmax", 2), None, "not 3 to 2048 experts"),
        (torch.zeros(2, 8).npu(), Routing("softmax", 9), None, "9 of 8 experts"),
        (torch.zeros(2, 8).npu(), Routing("softmax", 2, groups=3), None, "1 of 3 groups of 8 experts"),
        (torch.zeros(2, 8).npu(), Routing("softmax", 2, groups=2, kept=3), None, "3 of 2 groups of 8 experts"),
        (torch.zeros(2, 8).npu(), Routing("softmax", 2, groups=4), None, "groups of 2 of 8 experts"),
        (torch.zeros(2, 198).npu(), Routing("softmax", 2, groups=66), None, "groups of 3 of 198 experts"),
        (torch.zeros(2, 8).npu(), Routing("softmax", 5, groups=2), None, "5 of 4 experts"),
        (torch.zeros(2, 8).npu(), Routing("sigmoid", 2), torch.zeros(7).npu(), "the bias is not (experts,)"),
        (torch.zeros(2, 8).npu(), Routing("sigmoid", 2), torch.zeros(8), "the bias is on another device"),
        (torch.zeros(2, 8).npu(), Routing("sigmoid", 2), torch.zeros(8).double().npu(), "a bias of type float64"),
    ],
)
def test_what_the_operators_cannot_take_has_a_reason(x, routing, bias, words):
    assert op.unsupported(x, routing, bias) == words


def test_undivided_sigmoid_scores_of_all_experts_are_left_alone():
    x = torch.zeros(2, 8).npu()
    assert "launches as much" in str(op.unsupported(x, Routing("sigmoid", 2)))
    assert op.unsupported(x, Routing("sigmoid", 2, groups=2)) is None


def test_under_a_transform_there_is_a_reason():
    x = torch.zeros(3, 2, 8).npu()
    seen = []
    torch.func.vmap(lambda row: seen.append(op.unsupported(row, Routing("softmax", 2))) or row)(x)
    assert "torch.func" in seen[0]


def test_an_operator_that_torch_npu_lacks_is_a_reason(monkeypatch):
    monkeypatch.setattr(op, "schema_has", lambda name: False)
    x = torch.zeros(2, 8).npu()
    assert op.unsupported(x, Routing("softmax", 2)) == "torch_npu has no npu_moe_gating_top_k_softmax_v2"
    assert op.unsupported(x, Routing("sigmoid", 2, 0.0)) == "torch_npu has no npu_moe_gating_top_k"


def test_where_the_gradient_operator_is_not_documented_the_formula_is_used(monkeypatch):
    r, _ = ROUTINGS["sigmoid, divided"]
    x = random(9, 16)
    by_operator = torch.autograd.grad(fused(x, r, None)[0].square().sum(), x)[0]
    monkeypatch.setattr(op, "is_ascend950", lambda: True)
    weights = fused(x, r, None)[0]
    with Ran() as ran:
        by_formula = torch.autograd.grad(weights.square().sum(), x)[0]
    assert ran["npu_moe_gating_top_k_backward"] == 0
    assert relative_error(by_formula, by_operator) <= 1e-5
