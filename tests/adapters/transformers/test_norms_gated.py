"""Single calls of patched norms with a gate."""

from __future__ import annotations

import inspect

import pytest
import torch

from npu_patch.adapters.transformers import norms
from npu_patch.registry import Unrecognised

from ...discovery import gated as classes
from ...support.numerics import relative_error
from .call import found, patched

FULL, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
CLASSES = (
    classes.GatedRMSNorm,
    classes.ActivatedGateRMSNorm,
    classes.GateFirstRMSNorm,
    classes.GateFirstGroupedRMSNorm,
    classes.EitherOrderRMSNorm,
)


def values(shape, dtype, seed):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2
    x.view(-1, shape[-1])[0] *= 1e-3
    return x.to(dtype).to("npu").requires_grad_()


def run(forward, module, x, gate):
    y = forward(module, x, gate)
    leaves = (x, gate, module.weight)
    return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y) * 0.5)]


@pytest.mark.parametrize("dtypes", [(FULL, FULL), (BRAIN, BRAIN), (HALF, HALF), (BRAIN, FULL), (FULL, BRAIN)], ids=str)
@pytest.mark.parametrize("shape", [(6, 16), (2, 1, 16), (2, 3, 16)], ids=str)
@pytest.mark.parametrize("cls", CLASSES)
def test_result_and_gradients_are_the_originals(cls, shape, dtypes):
    forward, site, original = patched(norms.find, "MineRMSNormGated", cls)
    module = cls(16, dtypes[1])
    for change in ({}, {"activation": "sigmoid", "norm_before_gate": False}):
        vars(module).update(change)
        x, gate = values(shape, dtypes[0], 1), values(shape, dtypes[0], 2)
        for ours, theirs in zip(run(forward, module, x, gate), run(original, module, x, gate), strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            assert relative_error(ours, theirs) < (1e-6 if dtypes == (FULL, FULL) else 1e-2)
    assert (site.hits, site.fallbacks) == (2, {})


@pytest.mark.parametrize("cls", CLASSES)
def test_bf16_is_no_further_from_exact_than_the_original(cls):
    forward, _, original = patched(norms.find, "MineRMSNormGated", cls)
    errors = [0.0, 0.0]
    for seed in range(4):
        module = cls(16, BRAIN)
        x, gate = values((64, 16), BRAIN, 2 * seed + 1), values((64, 16), BRAIN, 2 * seed + 2)
        exact_module = cls(16, BRAIN).float()
        wide = x.detach().float().requires_grad_(), gate.detach().float().requires_grad_()
        exact = run(original, exact_module, *wide)
        for i, one in enumerate((forward, original)):
            results = run(one, module, x, gate)
            errors[i] += sum(
                float((a.float() - b).square().sum() / b.square().sum()) for a, b in zip(results, exact, strict=True)
            )
    assert errors[0] <= 1.05**2 * errors[1]


@pytest.mark.parametrize(
    ("cls", "change", "reason"),
    [
        (classes.ActivatedGateRMSNorm, {"activation": "relu"}, "its attributes are none"),
        (classes.GateFirstGroupedRMSNorm, {"group_size": 5}, "the width cannot be divided"),
        (classes.GateFirstGroupedRMSNorm, {"group_size": 0}, "the width cannot be divided"),
        (classes.GatedRMSNorm, {"variance_epsilon": torch.tensor(1e-5)}, "epsilon is not a number"),
    ],
)
def test_an_instance_that_was_not_recognised_runs_the_original(cls, change, reason):
    forward, site, original = patched(norms.find, "MineRMSNormGated", cls)
    module = cls(16)
    vars(module).update(change)
    x, gate = values((3, 16), FULL, 1), values((3, 16), FULL, 2)
    outcomes = []
    for one in (forward, original):
        try:
            outcomes.append(one(module, x, gate))
        except (RuntimeError, ZeroDivisionError) as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1] if isinstance(outcomes[1], str) else torch.equal(*outcomes)
    (text,) = site.fallbacks
    assert text.startswith(reason)


def test_without_a_gate_on_the_cpu_and_with_a_broadcast_gate_the_original_runs():
    forward, site, original = patched(norms.find, "MineRMSNormGated", classes.GateFirstRMSNorm)
    module, x = classes.GateFirstRMSNorm(16), values((2, 3, 16), FULL, 1)
    for gate in (None, values((2, 1, 16), FULL, 2)):
        assert torch.equal(forward(module, x, gate), original(module, x, gate))
    module, x, gate = module.cpu(), x.detach().cpu(), x.detach().cpu() + 1
    assert torch.equal(forward(module, x, gate), original(module, x, gate))
    assert site.hits == 0
    assert sorted(site.fallbacks) == ["no gate", "not on an NPU", "the gate's shape is not the input's"]


def test_an_empty_weight_runs_the_original():
    forward, site, original = patched(norms.find, "MineRMSNormGated", classes.GatedRMSNorm)
    module, x = classes.GatedRMSNorm(16), values((3, 16), FULL, 1)
    module.weight = torch.nn.Parameter(torch.empty(0).npu())
    for one in (forward, original):
        with pytest.raises(RuntimeError, match="must match"):
            one(module, x, x)
    assert site.fallbacks == {"the weight is empty": 1}


def test_what_is_no_gated_norm_is_reported_with_a_reason():
    (target,) = found(norms.find, MineRMSNormGated=classes.GeluGateRMSNorm).values()
    assert isinstance(target, Unrecognised)


def test_the_signature_is_the_originals():
    forward, _, original = patched(norms.find, "MineRMSNormGated", classes.ActivatedGateRMSNorm)
    assert inspect.signature(forward) == inspect.signature(original)
