"""torchtitan's feed-forwards with the option `swiglu:separate=1`."""

from __future__ import annotations

import importlib
import types

import pytest
import torch
from torch import nn

import npu_patch
from npu_patch.adapters.torchtitan import mlp
from npu_patch.simulator import trace

from .generation import CURRENT, PREVIOUS, current
from .models import Counts

PLACES = (
    ["torchtitan.models.common.feed_forward"]
    if CURRENT
    else [
        f"torchtitan.models.{name}"
        for name in ("llama3.model.model", "llama4.model.model", "qwen3.model.model", "moe.moe")
    ]
    if PREVIOUS
    else []
)
DIM, HIDDEN = 32, 64


@pytest.fixture(autouse=True)
def separate():
    npu_patch.configure("swiglu", separate=True)
    yield
    npu_patch.configure("swiglu", separate=False)


def feed_forward(place, dtype=torch.float32, cls="FeedForward", **more):
    module = importlib.import_module(place)
    own = getattr(module, cls)
    if CURRENT:
        from torchtitan.models.common.linear import Linear

        def linear(a, b):
            return Linear.Config(in_features=a, out_features=b)

        more = {name: linear(DIM, size) for name, size in more.items()}
        built = own(own.Config(w1=linear(DIM, HIDDEN), w2=linear(HIDDEN, DIM), w3=linear(DIM, HIDDEN), **more))
    elif place.endswith("moe.moe"):
        built = own(DIM, HIDDEN)
    else:
        arguments = {"dim": DIM, "hidden_dim": HIDDEN}
        if not place.endswith("qwen3.model.model"):
            arguments.update(multiple_of=8, ffn_dim_multiplier=None)
        built = own(**arguments)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return built.to("npu", dtype)


def x_of(dtype, size=4096):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, size // 2, DIM, generator=generator).to("npu", dtype).requires_grad_()


def step(module, x):
    y = module(x)
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to("npu", y.dtype)
    return [y.detach(), *torch.autograd.grad(y, (x, *module.parameters()), gradient)]


def exact(module, x):
    leaves = [
        t.detach().cpu().double().requires_grad_() for t in (x, module.w1.weight, module.w2.weight, module.w3.weight)
    ]
    y = (nn.functional.silu(leaves[0] @ leaves[1].T) * (leaves[0] @ leaves[3].T)) @ leaves[2].T
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(x.dtype).double()
    return [y, *torch.autograd.grad(y, leaves, gradient)]


def error(values, reference):
    return [
        float((a.cpu().double() - b.detach()).norm() / b.detach().norm())
        for a, b in zip(values, reference, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", PLACES)
def test_no_further_from_exact_than_the_original(place, dtype):
    module, x = feed_forward(place, dtype), x_of(dtype, 64)
    names = [name for name, _ in module.named_parameters()]
    assert names == ["w1.weight", "w2.weight", "w3.weight"]
    stock = step(module, x)
    with npu_patch.scope("swiglu"):
        counts = Counts()
        with trace() as t:
            fused = step(module, x)
        assert counts.take("swiglu") == (1, {})
    assert t.launches_by_op["npu.npu_swiglu"] == t.launches_by_op["npu.npu_swiglu_backward"] == 1
    assert t.host_syncs == 0
    reference = exact(module, x)
    floor = 1e-6 if dtype is torch.float32 else 0.0
    for ours, theirs in zip(error(fused, reference), error(stock, reference), strict=True):
        assert ours <= max(1.05 * theirs, floor)


@pytest.mark.parametrize("place", PLACES[:1])
def test_a_training_step_moves_and_keeps_less(place):
    """What the option is for: in a step it saves bytes; without a gradient it would cost some, so the original runs."""
    module, x = feed_forward(place, torch.bfloat16), x_of(torch.bfloat16)
    seen = []
    for ops in ("rope", "swiglu"):
        with npu_patch.scope(ops), trace(list(module.parameters())) as t:
            step(module, x)
        seen.append((t.launches, t.bytes_read + t.bytes_written, t.saved_bytes))
    assert all(ours < theirs for theirs, ours in zip(*seen, strict=True)), seen


@pytest.mark.parametrize("place", PLACES[:1])
def test_without_a_gradient_the_original_runs(place):
    module, x = feed_forward(place), x_of(torch.float32, 8)
    with npu_patch.scope("swiglu"), torch.no_grad():
        counts = Counts()
        module(x)
        assert counts.take("swiglu") == (0, {"joining gate and up moves more bytes without a gradient": 1})


@pytest.mark.parametrize("place", PLACES)
def test_without_the_option_nothing_is_replaced(place):
    npu_patch.configure("swiglu", separate=False)
    cls = importlib.import_module(place).FeedForward
    original = cls.forward
    with npu_patch.scope("swiglu"):
        assert cls.forward is original
        (row,) = [row for row in npu_patch.status() if row.target == f"{place}:FeedForward.forward"]
        assert (row.state, row.reason) == ("off", "needs the option separate: swiglu:separate=1")


@pytest.mark.parametrize("place", PLACES[:1])
def test_projections_in_two_types_are_finished_without_the_operator(place):
    module, x = feed_forward(place), x_of(torch.float32, 8)
    with torch.no_grad():
        module.w3.register_forward_hook(lambda module, inputs, output: output.double())
        module.w2.to(torch.float64)
    expected = module(x)
    with npu_patch.scope("swiglu"):
        counts = Counts()
        result = module(x)
        assert counts.take("swiglu") == (0, {"gate and up differ in type, shape or device": 1})
    torch.testing.assert_close(result, expected)


@current
def test_a_gate_on_the_result_goes_through_its_parent_s_forward():
    place = PLACES[0]
    module, x = feed_forward(place, cls="SigmoidGatedFeedForward", gate=1), x_of(torch.float32, 8)
    expected = module(x)
    with npu_patch.scope("swiglu"):
        counts = Counts()
        result = module(x)
        assert counts.take("swiglu") == (1, {})
    torch.testing.assert_close(result, expected)


@current
def test_a_variant_is_not_taken_for_a_gated_activation():
    from torchtitan.models.gpt_oss import moe

    assert [found.path for found in mlp.find(moe)] == []

    class ClampedFeedForward(nn.Module):
        def forward(self, x):
            return self.w2(nn.functional.silu(self.w1(x)).clamp(max=7.0) * (self.w3(x) + 1))

    module = types.ModuleType("some_module")
    module.ClampedFeedForward, ClampedFeedForward.__module__ = ClampedFeedForward, "some_module"
    (found,) = mlp.find(module)
    assert not hasattr(found, "adapter")
