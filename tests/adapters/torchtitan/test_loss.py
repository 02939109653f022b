"""`components.loss.cross_entropy_loss`, in both generations."""

from __future__ import annotations

import inspect
import types

import pytest
import torch

import npu_patch
from npu_patch.adapters.torchtitan import loss as adapter
from npu_patch.registry import Target, Unrecognised
from npu_patch.simulator import trace

from .generation import current
from .models import Counts

B, L, V = 2, 9, 50


def module():
    from torchtitan.components import loss

    return loss


def inputs(dtype=torch.float32, ignored=4):
    generator = torch.Generator().manual_seed(1)
    pred = (torch.randn(B, L, V, generator=generator) * 4).to("npu", dtype).requires_grad_()
    labels = torch.randint(0, V, (B, L), generator=generator)
    labels.view(-1)[:ignored] = -100
    return pred, labels.to("npu")


def step(function, pred, labels, **keywords):
    value = function(pred, labels, **keywords)
    return value.detach(), torch.autograd.grad(value * 0.25, pred)[0]


@pytest.mark.parametrize("ignored", [0, 4, B * L])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_and_gradient(dtype, ignored):
    pred, labels = inputs(dtype, ignored)
    stock = step(module().cross_entropy_loss, pred, labels)
    with npu_patch.scope("cross_entropy"):
        counts = Counts()
        with trace() as t:
            fused = step(module().cross_entropy_loss, pred, labels)
        assert counts.take("cross_entropy") == (1, {})
    assert t.launches_by_op["npu.npu_cross_entropy_loss"] == 1
    assert t.launches_by_op["npu.npu_cross_entropy_loss_backward"] == 1
    assert t.host_syncs == 0
    for ours, theirs in zip(fused, stock, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-6 if dtype is torch.float32 else 8e-3, atol=1e-6)


def test_a_compiled_loss():
    torch._dynamo.reset()
    pred, labels = inputs(torch.bfloat16)
    expected, graphs = step(module().cross_entropy_loss, pred, labels), []

    def count(graph, example):
        graphs.append(graph)
        return torch._dynamo.backends.registry.lookup_backend("aot_eager")(graph, example)

    with npu_patch.scope("cross_entropy"):
        compiled = torch.compile(module().cross_entropy_loss, backend=count, fullgraph=True)
        result = step(compiled, pred, labels)
    (graph,) = graphs
    assert "npu_cross_entropy_loss" in graph.print_readable(print_output=False) or any(
        "npu_cross_entropy_loss" in inner.print_readable(print_output=False) for inner in graph.children()
    )
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=8e-3, atol=1e-6)


def test_signature_and_undo():
    original = module().cross_entropy_loss
    with npu_patch.scope("cross_entropy"):
        assert module().cross_entropy_loss is not original
        assert inspect.signature(module().cross_entropy_loss) == inspect.signature(original)
    assert module().cross_entropy_loss is original


@current
def test_both_bindings_follow():
    from torchtitan.models.deepseek_v3 import mtp

    original = module().cross_entropy_loss
    assert mtp.cross_entropy_loss is original
    with npu_patch.scope("cross_entropy"):
        assert mtp.cross_entropy_loss is module().cross_entropy_loss is not original
    assert mtp.cross_entropy_loss is original


@current
def test_the_loss_object_calls_it():
    pred, labels = inputs()
    tokens = torch.tensor(14.0, device="npu")
    stock = module().CrossEntropyLoss(module().CrossEntropyLoss.Config())
    expected, _ = stock(pred, labels, tokens)
    with npu_patch.scope("cross_entropy"):
        counts = Counts()
        built = module().CrossEntropyLoss(module().CrossEntropyLoss.Config(global_vocab_size=V))
        result, _ = built(pred, labels, tokens)
        assert counts.take("cross_entropy") == (1, {})
    torch.testing.assert_close(result, expected)


@current
def test_a_vocabulary_that_is_spread_over_ranks_is_left_alone(monkeypatch):
    pred, labels = inputs()
    called = []
    monkeypatch.setattr(module(), "spmd_mesh_size", lambda axis: 2 if axis == "tp" else 1)
    with npu_patch.scope("cross_entropy"):
        counts = Counts()
        monkeypatch.setattr(module(), "get_spmd_backend", lambda: "spmd_types")
        monkeypatch.setattr(
            module(),
            "_LossParallelCrossEntropy",
            types.SimpleNamespace(apply=lambda *a: called.append(a) or a[0].sum()),
        )
        monkeypatch.setattr(module(), "current_spmd_mesh", lambda: types.SimpleNamespace(get_group=lambda axis: axis))
        module().cross_entropy_loss(pred, labels, global_vocab_size=2 * V)
        assert counts.take("cross_entropy") == (0, {adapter.SPREAD: 1})
    ((_, _, group, size),) = called
    assert (group, size) == ("tp", 2 * V)


def test_calls_that_the_operator_cannot_take_run_the_original():
    pred, labels = inputs()
    cases = {
        "not on an NPU": (pred.detach().cpu(), labels.cpu()),
        "labels of type int32": (pred.detach(), labels.clamp(min=0).to(torch.int32)),
    }
    for reason, arguments in cases.items():
        outcomes = []
        for op in ("rope", "cross_entropy"):
            with npu_patch.scope(op):
                counts = Counts()
                try:
                    outcomes.append(float(module().cross_entropy_loss(*arguments)))
                except (RuntimeError, IndexError) as error:
                    outcomes.append(str(error))
        assert counts.take("cross_entropy") == (0, {reason: 1})
        assert outcomes[0] == outcomes[1]


def found(function):
    own = types.ModuleType("some_module")
    function.__module__ = "some_module"
    own.cross_entropy_loss = function
    return list(adapter.find(own))


def test_other_losses_are_not_recognised():
    F = torch.nn.functional

    def mean(pred, labels):
        return F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1), ignore_index=-100)

    def in_half_precision(pred, labels):
        return F.cross_entropy(pred.flatten(0, 1), labels.flatten(0, 1), reduction="sum")

    def other_label(pred, labels):
        return F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1).clamp(min=0), reduction="sum")

    def smooth(pred, labels):
        flat = pred.flatten(0, 1).float()
        return F.cross_entropy(flat, labels.flatten(0, 1), reduction="sum", label_smoothing=0.1)

    def weighted(pred, labels, *, weight=None):
        return F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1), weight, reduction="sum")

    for function in (mean, in_half_precision, other_label, smooth, weighted):
        (one,) = found(function)
        assert isinstance(one, Unrecognised), function

    def same(pred, labels):
        return F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum", ignore_index=-100)

    (one,) = found(same)
    assert isinstance(one, Target)
