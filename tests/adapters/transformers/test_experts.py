"""Single calls of the registry's functions that run experts: every layout, every routing, and when they fall back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import npu_patch
from npu_patch.discovery.experts import Experts, Layout, pristine, run

from ...support.numerics import Call, assert_no_worse, relative_error

moe = pytest.importorskip("transformers.integrations.moe")
OPS = ("gmm", "permute")
LAYOUTS = [
    Layout(),
    Layout(is_transposed=True),
    Layout(is_transposed=True, has_bias=True),
    Layout(has_bias=True),
    Layout(has_gate=False),
    Layout(has_post_expert_norm=True),
]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("npu", dtype).requires_grad_()


def routing(tokens: int = 12, top_k: int = 2, experts: int = 4, seed: int = 5) -> Tensor:
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    return scores.topk(top_k).indices.npu()


def registered(key: str) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = moe.ALL_EXPERTS_FUNCTIONS[key]
    return function


def counts(op: str) -> tuple[int, dict[str, int]]:
    status = npu_patch.status()
    return status.hits(op), status.fallbacks(op)


class Since:
    """Hits and reasons of an op since it was made."""

    def __init__(self, *ops: str) -> None:
        self._before = {op: counts(op) for op in ops or OPS}

    def __call__(self) -> dict[str, tuple[int, dict[str, int]]]:
        found = {}
        for op, (hits, reasons) in self._before.items():
            now, why = counts(op)
            new = {reason: n - reasons.get(reason, 0) for reason, n in why.items()}
            found[op] = (now - hits, {reason: n for reason, n in new.items() if n})
        return found


def results(function: Any, experts: Any, tokens: Tensor, ids: Tensor, weights: Tensor) -> list[Tensor]:
    """Output and gradients, in a fixed direction."""
    output = function(experts, tokens, ids, weights)
    direction = torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.device, output.dtype)
    leaves = (tokens, weights, *experts.parameters())
    return [output, *torch.autograd.grad(output, leaves, direction, allow_unused=True)]


def assert_same(ours: list[Any], stock: list[Any], error: float = 1e-5) -> None:
    for a, b in zip(ours, stock, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert torch.isfinite(a).all()
            assert relative_error(a, b) <= error


@pytest.mark.parametrize("key", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_computes_the_same(layout, key):
    given = (Experts(layout, torch.float32).npu(), random(12, 16), routing(), random(12, 2, seed=1))
    stock = results(registered(key), *given)
    with npu_patch.scope(*OPS):
        since = Since()
        patched = results(registered(key), *given)
        assert since() == {"gmm": (3 if key == "batched_mm" else 2, {}), "permute": (1, {})}
    assert_same(patched, stock)


@pytest.mark.parametrize("ops", [("gmm",), ("permute",)])
@pytest.mark.parametrize("key", ["grouped_mm", "batched_mm"])
def test_each_switch_works_alone(ops, key):
    given = (Experts(Layout(), torch.float32).npu(), random(12, 16), routing(), random(12, 2, seed=1))
    stock = results(registered(key), *given)
    with npu_patch.scope(*ops):
        since = Since(*ops)
        patched = results(registered(key), *given)
        expected = {"gmm": 3 if key == "batched_mm" else 2, "permute": 1 if key == "grouped_mm" else 0}
        assert since() == {op: (expected[op], {}) for op in ops}
    assert_same(patched, stock)
    assert moe._grouped_mm.__globals__ is vars(moe)  # the original is back


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bfloat16_calls_are_no_further_from_float64(layout, weights_dtype):
    experts = Experts(layout, torch.bfloat16).npu()
    calls = []
    for seed in range(3):
        arguments = (
            experts,
            random(48, 16, dtype=torch.bfloat16, seed=seed),
            routing(48, seed=seed),
            random(48, 2, dtype=weights_dtype, seed=seed + 9),
        )
        calls.append(Call(arguments, {}, {0: random(48, 16, dtype=torch.bfloat16, seed=seed + 20).detach()}))
    original = pristine(moe, registered("grouped_mm"))
    with npu_patch.scope(*OPS):
        since = Since()
        # Gradients of biases are sums in bfloat16, in the order of a sort that is not stable: worse as often as better.
        factor = 1.15 if layout.has_bias else 1.05
        assert_no_worse(registered("grouped_mm"), original, run, calls, factor)
        assert since() == {"gmm": (10, {}), "permute": (5, {})}


@st.composite
def routings(draw: Any) -> tuple[int, Tensor]:
    experts = draw(st.integers(1, 6))
    top_k = draw(st.integers(1, experts))
    tokens = draw(st.sampled_from([0, 1, 2, 7]))
    favourites = draw(st.permutations(range(experts)))
    if draw(st.booleans()):  # everything goes to the same few
        rows = [favourites[:top_k]] * tokens
    else:
        rows = [draw(st.permutations(range(experts)))[:top_k] for _ in range(tokens)]
    return experts, torch.tensor(rows, dtype=torch.int64).view(tokens, top_k)


@settings(max_examples=40, deadline=None)
@given(routings())
def test_any_routing_is_finite_and_exact(routing):
    number, ids = routing
    experts = Experts(Layout(), torch.float32)
    experts.num_experts = number
    for parameter in experts.parameters():
        wanted = torch.randn(number, *parameter.shape[1:], generator=torch.Generator().manual_seed(number)) / 4
        parameter.data = wanted
    experts = experts.npu()
    tokens, weights = random(len(ids), 16), random(*ids.shape, seed=1)
    with npu_patch.scope(*OPS):
        since = Since()
        output = registered("grouped_mm")(experts, tokens, ids.npu(), weights)
        output.sum().backward()
        assert since() == {"gmm": (2, {}), "permute": (1, {})}
    found = [output, tokens.grad, weights.grad, *(p.grad for p in experts.parameters())]
    for parameter in experts.parameters():
        for expert in set(range(number)) - set(ids.view(-1).tolist()):
            assert not parameter.grad[expert].any()
    host = Experts(Layout(), torch.float32)
    host.num_experts = number
    for ours, theirs in zip(host.parameters(), experts.parameters(), strict=True):
        ours.data = theirs.detach().cpu()
    if not len(ids):
        assert all(not one.any() for one in found)
        return
    x, w = tokens.detach().cpu().requires_grad_(), weights.detach().cpu().requires_grad_()
    exact = run(host, x, ids, w)
    exact.sum().backward()
    for a, b in zip(found, [exact, x.grad, w.grad, *(p.grad for p in host.parameters())], strict=True):
        assert torch.isfinite(a).all()
        assert relative_error(a, b) <= 1e-5


def test_float32_router_weights_and_bfloat16_tokens_leave_finite_gradients():
    experts = Experts(Layout(), torch.bfloat16).npu()
    given = (experts, random(12, 16, dtype=torch.bfloat16), routing(), random(12, 2, seed=1))
    with npu_patch.scope(*OPS):
        patched = results(registered("grouped_mm"), *given)
    assert all(torch.isfinite(one).all() for one in patched)
    assert patched[0].dtype is torch.bfloat16
    assert patched[2].dtype is torch.float32  # of the router's weights


def test_sizes_that_are_no_multiple_of_anything():
    experts = Experts(Layout(), torch.float32)
    wide, down = torch.randn(4, 2 * 21, 123), torch.randn(4, 123, 21)
    experts.gate_up_proj.data, experts.down_proj.data = wide / 11, down / 5
    given = (experts.npu(), random(9, 123), routing(9), random(9, 2, seed=1))
    exact = run(Experts.cpu(experts), given[1].cpu(), given[2].cpu(), given[3].cpu())
    experts.npu()
    with npu_patch.scope(*OPS):
        since = Since()
        assert relative_error(registered("grouped_mm")(*given), exact) <= 1e-5
        assert since() == {"gmm": (2, {}), "permute": (1, {})}


@pytest.mark.parametrize("key", ["grouped_mm", "batched_mm"])
def test_expert_parallel_runs_the_original_with_its_products(key):
    experts = Experts(Layout(parallel=True), torch.float32).npu()
    ids = routing()
    ids[3, 0] = ids[5, 1] = 4  # no expert's
    weights = random(12, 2, seed=1).detach().masked_fill(ids == 4, 0.0).requires_grad_()
    given = (experts, random(12, 16), ids, weights)
    stock = results(registered(key), *given)
    with npu_patch.scope(*OPS):
        since = Since()
        patched = results(registered(key), *given)
        reason = {"expert parallel: some ids are no expert's": 1}
        grouped = {"gmm": (2, {}), "permute": (0, reason)}
        assert since() == (grouped if key == "grouped_mm" else {"gmm": (0, reason), "permute": (0, {})})
    assert_same(patched, stock)


def test_under_autocast_products_have_the_dtype_of_the_matrices_and_batches_stay_batches():
    experts = Experts(Layout(), torch.bfloat16).npu()
    given = (experts, random(12, 16), routing(), random(12, 2, seed=1))
    with torch.autocast("npu", dtype=torch.bfloat16):
        stock = [results(registered(key), *given) for key in ("grouped_mm", "batched_mm")]
        with npu_patch.scope(*OPS):
            since = Since()
            patched = [results(registered(key), *given) for key in ("grouped_mm", "batched_mm")]
            assert since() == {"gmm": (2, {"autocast": 1}), "permute": (1, {})}
    for ours, theirs in zip(patched, stock, strict=True):
        assert ours[0].dtype is torch.float32
        assert_same(ours, theirs, 0.02)


def test_somebodys_own_function_at_grouped_mm_is_left_alone_and_not_called_for_batches():
    given = (Experts(Layout(), torch.float32).npu(), random(12, 16), routing(), random(12, 2, seed=1))

    def own(*_: Any) -> Tensor:
        raise AssertionError("called")

    stock = registered("batched_mm")(*given)
    with npu_patch.scope("gmm"):
        interface, before = type(moe.ALL_EXPERTS_FUNCTIONS), registered("grouped_mm")
        interface.register("grouped_mm", own)
        try:
            since = Since("gmm")
            assert torch.equal(registered("batched_mm")(*given), stock)
            assert since() == {"gmm": (0, {"another function is registered at grouped_mm": 1})}
        finally:
            interface.register("grouped_mm", before)


def test_float64_runs_the_original():  # which for groups knows no float64
    experts = Experts(Layout(), torch.float32).npu().double()
    given = (experts, random(12, 16).detach().double().requires_grad_(), routing(), random(12, 2, seed=1))
    with npu_patch.scope(*OPS):
        since = Since()
        assert registered("batched_mm")(*given).dtype is torch.float64
        assert since() == {"gmm": (0, {"rows of type float64": 1}), "permute": (0, {})}


# ---- the gate --------------------------------------------------------------------------------------------------------


def gate_of(activation: str) -> tuple[Any, Any]:
    from transformers.activations import ACT2FN
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    return Qwen3MoeExperts, SimpleNamespace(act_fn=ACT2FN[activation])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("activation", "operator"),
    [("silu", "npu_swiglu"), ("gelu", "npu_geglu"), ("gelu_pytorch_tanh", "npu_geglu"), ("relu", None), ("tanh", None)],
)
def test_the_gate_is_the_activation_of_the_instance(activation, operator, dtype):
    cls, experts = gate_of(activation)
    x = random(24, 32, dtype=dtype)
    stock = cls._apply_gate(experts, x)
    wanted = torch.autograd.grad(stock.sum(), x)[0]
    with npu_patch.scope("swiglu"):
        since = Since("swiglu")
        with npu_patch.simulator.trace() as trace:
            gated = cls._apply_gate(experts, x)
        found = torch.autograd.grad(gated.sum(), x)[0]
        hits, reasons = since()["swiglu"]
    names = {name.partition(".")[2] for name in trace.launches_by_op if name.startswith("npu.")}
    assert (hits, names & {"npu_swiglu", "npu_geglu"}) == ((1, {operator}) if operator else (0, set()))
    assert bool(reasons) == (operator is None)
    room = 1e-6 if dtype is torch.float32 else 0.01
    assert relative_error(gated, stock) <= room
    assert relative_error(found, wanted) <= room


def test_clamped_gates_are_left_alone():
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    before = GptOssExperts._apply_gate
    with npu_patch.scope("swiglu"):
        assert GptOssExperts._apply_gate is before
        row = next(one for one in npu_patch.status().rows if one.target.endswith("GptOssExperts._apply_gate"))
        assert row.state == "unrecognised"
        assert "limit" in row.reason


def test_off_means_the_identical_functions_are_back():
    cls, _ = gate_of("silu")
    places = [lambda: registered("grouped_mm"), lambda: registered("batched_mm"), lambda: moe._grouped_mm]
    places.append(lambda: vars(cls)["_apply_gate"])
    before = [place() for place in places]
    for ops in itertools.chain.from_iterable(itertools.combinations((*OPS, "swiglu"), n) for n in (1, 2, 3)):
        with npu_patch.scope(*ops):
            changed = [place() is not one for place, one in zip(places, before, strict=True)]
            assert changed == ["permute" in ops, "gmm" in ops, "gmm" in ops, "swiglu" in ops]
        assert [place() for place in places] == before
