from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import npu_patch.simulator
from npu_patch.ops import cross_entropy as op

from ..support.numerics import relative_error
from .tools import Ran, compiled, random

REDUCTIONS = ("mean", "sum")


def labels(rows: int, classes: int, ignored: float = 0.3, ignore_index: int = -100, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, classes, (rows,), generator=generator)
    return target.masked_fill(torch.rand(rows, generator=generator) < ignored, ignore_index).npu()


def original(x: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    return F.cross_entropy(x, target, ignore_index=ignore_index, reduction=reduction)


def fused(x: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    assert op.unsupported(x, target) is None
    return op.cross_entropy(x, target, ignore_index, reduction)


def both(x: Tensor, target: Tensor, ignore_index: int, reduction: str, scale: float = 1.7):
    """(loss, gradient) of ours and of the float64 formula on the CPU."""
    exact = x.detach().cpu().double().requires_grad_()
    for function, where, labels in ((fused, x, target), (original, exact, target.cpu())):
        loss = function(where, labels, ignore_index, reduction)
        yield loss.detach(), torch.autograd.grad(loss * scale, where)[0]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 3, 11, 12, 255])
def test_loss_and_gradient_equal_the_formula_whatever_is_ignored(reduction, ignore_index):
    x, target = random(20, 11), labels(20, 11, ignore_index=ignore_index)
    (loss, gradient), (exact, exact_gradient) = both(x, target, ignore_index, reduction)
    assert (loss.dtype, loss.shape, gradient.dtype) == (torch.float32, (), torch.float32)
    assert relative_error(loss, exact) <= 1e-6
    assert relative_error(gradient, exact_gradient) <= 1e-6
    ignored = target.cpu() == ignore_index
    assert ignored.any()
    assert not gradient.cpu()[ignored].any()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 17),
    classes=st.integers(1, 23),
    ignored=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 50.0]),
    reduction=st.sampled_from(REDUCTIONS),
    seed=st.integers(0, 99),
)
def test_any_labels_equal_the_original_on_the_same_device(rows, classes, ignored, scale, reduction, seed):
    x = (random(rows, classes, seed=seed).detach() * scale).requires_grad_()
    target = labels(rows, classes, ignored, seed=seed)
    ours, theirs = (f(x, target, -100, reduction) for f in (fused, original))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, equal_nan=True)
    gradients = [torch.autograd.grad(loss, x)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize(("reduction", "value"), [("mean", math.nan), ("sum", 0.0)])
def test_where_every_label_is_ignored_the_result_is_the_originals(reduction, value):
    x, target = random(4, 6), torch.full((4,), -100, device="npu")
    ours, theirs = fused(x, target, -100, reduction), original(x, target, -100, reduction)
    expected = torch.tensor(value)
    for loss in (ours, theirs):
        torch.testing.assert_close(loss.detach().cpu(), expected, equal_nan=True)
        assert not torch.autograd.grad(loss, x)[0].any()


def test_an_ignored_row_whose_first_class_is_impossible_stays_finite():
    x = random(3, 5).detach()
    x[:, 0] = -math.inf  # as masked vocabularies are; ignored rows are pointed at class 0
    x.requires_grad_()
    target = torch.tensor([1, -100, 2]).npu()
    ours, theirs = fused(x, target, -100, "mean"), original(x, target, -100, "mean")
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, x), torch.autograd.grad(theirs, x))


def test_the_operator_alone_would_take_ignored_labels_for_classes():
    x, target = random(3, 5), torch.tensor([1, -100, 2]).npu()
    with pytest.raises(RuntimeError, match="negative ignore_index"):
        torch.ops.npu.npu_cross_entropy_loss(x, target, None, "mean", -100)
    with pytest.raises(RuntimeError, match="has no gradient"):
        torch.ops.npu.npu_cross_entropy_loss(x, target.clamp_min(0), None, "mean", 0)


def test_the_fused_operator_runs_forward_and_backward():
    x, target = random(6, 8), labels(6, 8)
    with Ran() as ran:
        fused(x, target, -100, "mean").backward()
    assert (ran["npu_cross_entropy_loss"], ran["npu_cross_entropy_loss_backward"]) == (1, 1)
    assert not {"_local_scalar_dense", "nonzero", "_log_softmax", "nll_loss_forward"} & set(ran.counts)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_half_the_bytes_are_moved_nothing_more_is_kept_and_the_peak_is_lower(reduction):
    def count(function):
        x, target = random(64, 512), labels(64, 512)
        with npu_patch.simulator.trace() as trace:
            function(x, target, -100, reduction).backward()
        return trace

    ours, theirs = count(fused), count(original)
    assert ours.bytes_read + ours.bytes_written < 0.55 * (theirs.bytes_read + theirs.bytes_written)
    assert ours.saved_bytes <= theirs.saved_bytes
    assert ours.peak_bytes < 0.7 * theirs.peak_bytes
    assert ours.launches <= theirs.launches + 10  # of one number per row
    assert ours.host_syncs == 0


def test_neither_logits_nor_labels_nor_a_gradient_that_is_used_again_are_changed():
    """What lies above saves the same tensors: softmax its result, and the incoming gradient goes to others too."""
    z, target = random(6, 8), labels(6, 8)
    logits = z.softmax(-1)  # its backward reads its own result
    kept, before = logits.detach().clone(), target.clone()
    loss = fused(logits, target, -100, "sum")
    head = torch.ones_like(loss)
    (gradient,) = torch.autograd.grad((loss, loss * 2), z, (head, head), retain_graph=True)
    assert torch.equal(head, torch.ones_like(loss))
    assert torch.equal(logits.detach(), kept)
    assert torch.equal(target, before)
    (again,) = torch.autograd.grad((loss, loss * 2), z, (head, head))  # backward twice over one graph
    torch.testing.assert_close(gradient, again)
    (expected,) = torch.autograd.grad(3 * original(z.softmax(-1), target, -100, "sum"), z)
    torch.testing.assert_close(gradient, expected)


class Subclass(torch.Tensor):
    pass


GUARDS = {
    "not on an NPU": lambda: (torch.ones(3, 5), torch.ones(3, dtype=torch.int64)),
    "logits of type bfloat16": lambda: (random(3, 5, dtype=torch.bfloat16), labels(3, 5, 0)),
    "logits of type float64": lambda: (random(3, 5).double(), labels(3, 5, 0)),
    "labels of type int32": lambda: (random(3, 5), labels(3, 5, 0).int()),
    "labels of type float32": lambda: (random(3, 5), random(3, 5)),
    "the labels are on another device": lambda: (random(3, 5), labels(3, 5, 0).cpu()),
    "logits and labels are not (rows, classes) and (rows,)": lambda: (random(3, 5, 2), torch.zeros(3, 2).long().npu()),
    "the logits are empty": lambda: (random(0, 5), labels(0, 5, 0)),
    "more than 199999 rows": lambda: (torch.zeros(200000, 1, device="npu"), torch.zeros(200000).long().npu()),
    "Subclass is not a plain tensor": lambda: (random(3, 5).detach().as_subclass(Subclass), labels(3, 5, 0)),
}


@pytest.mark.parametrize("reason", GUARDS)
def test_what_the_operator_cannot_take_has_a_reason(reason):
    assert op.unsupported(*GUARDS[reason]()) == reason


@pytest.mark.parametrize("reason", [name for name in GUARDS if "bfloat16" not in name and "Subclass" not in name])
def test_the_operator_refuses_it_without_the_guard(reason):
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        op.cross_entropy(*GUARDS[reason](), -100, "mean")


def test_of_bfloat16_logits_the_operator_would_round_every_row():
    x, target = random(64, 512, dtype=torch.bfloat16), labels(64, 512)
    rows = torch.ops.npu.npu_cross_entropy_loss(x, target.clamp_min(0), None, "none")[0]
    assert rows.dtype == torch.bfloat16


def test_another_reduction_is_refused():
    with pytest.raises(ValueError, match="none"):
        op.cross_entropy(random(3, 5), labels(3, 5), -100, "none")


def test_under_a_function_transform_there_is_a_reason():
    reasons: list[str | None] = []
    x, target = random(3, 5, grad=False), labels(3, 5)

    def f(x: Tensor) -> Tensor:
        reasons.append(op.unsupported(x, target))
        return original(x, target, -100, "mean")

    torch.func.grad(f)(x)
    assert reasons == ["a torch.func transform or forward-mode differentiation is active"]
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: op.cross_entropy(x, target, -100, "mean"))(x)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_fullgraph_compilation_keeps_the_operator(reduction):
    x, target = random(6, 8), labels(6, 8)

    def f(x: Tensor) -> Tensor:
        return fused(x, target, -100, reduction)

    traced, operators = compiled(f)
    plain, again = (torch.autograd.grad(g(x) * 3, x) for g in (f, traced))
    torch.testing.assert_close(plain, again)
    assert operators.count("npu.npu_cross_entropy_loss.default") == 1
    assert operators.count("npu.npu_cross_entropy_loss_backward.default") == 1


def test_without_a_gradient_nothing_is_kept():
    x, target = random(6, 8, grad=False), labels(6, 8)
    with npu_patch.simulator.trace() as trace:
        loss = fused(x, target, -100, "mean")
    assert not loss.requires_grad
    assert trace.saved_bytes == 0


def test_on_ascend950_the_operator_is_not_documented(monkeypatch):
    monkeypatch.setattr(op, "is_ascend950", lambda: True)
    reason = "npu_cross_entropy_loss is not documented for Ascend950"
    assert op.unsupported(random(3, 5), labels(3, 5)) == reason


@pytest.mark.parametrize("dynamic", [True, None])
def test_new_numbers_of_rows_are_not_compiled_again_and_again(dynamic):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    traced = torch.compile(
        lambda x, target: fused(x, target, -100, "mean"), backend=counter, fullgraph=True, dynamic=dynamic
    )
    for rows in (5, 7, 9, 11):
        x, target = random(rows, 8), labels(rows, 8)
        found, exact = (torch.autograd.grad(f, x) for f in (traced(x, target), fused(x, target, -100, "mean")))
        torch.testing.assert_close(found, exact)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("contiguous", [True, False])
def test_second_order_gradients_equal_the_formula(reduction, contiguous):
    target, weight = labels(20, 11), random(11, seed=3)
    x = random(20, 11) if contiguous else random(11, 20)

    def second(function, x: Tensor, weight: Tensor, target: Tensor) -> list[Tensor]:
        rows = (x if contiguous else x.t()) * weight
        loss = function(rows, target, -100, reduction).square()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        return list(torch.autograd.grad(first.square().sum(), (x, weight)))

    exact = second(
        original,
        x.detach().cpu().double().requires_grad_(),
        weight.detach().cpu().double().requires_grad_(),
        target.cpu(),
    )
    for mine, theirs in zip(second(fused, x, weight, target), exact, strict=True):
        assert relative_error(mine, theirs) <= 1e-5


def test_third_order_gradients_equal_the_formula():
    def third(function, x: Tensor, target: Tensor) -> Tensor:
        loss = function(x, target, -100, "mean")
        for _ in range(3):
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = gradient.pow(3).sum() * 1e3
        return gradient

    x, target = random(6, 5), labels(6, 5)
    exact = third(original, x.detach().cpu().double().requires_grad_(), target.cpu())
    assert relative_error(third(fused, x, target), exact) <= 1e-4


@pytest.mark.parametrize("label", [-1, -5, 11, 255])
def test_a_label_that_is_no_class_and_not_ignored_is_refused(label):
    x, target = random(4, 11), torch.tensor([1, label, -100, 3], device="npu")
    with pytest.raises((RuntimeError, IndexError)):
        fused(x, target, -100, "mean").item()


@pytest.mark.parametrize(
    ("logits", "target"), [((3, 5, 2), (3,)), ((15,), (15,)), ((3, 5), (3, 1)), ((3, 5), (4,)), ((3, 5), ())], ids=str
)
def test_each_shape_is_asked_for(logits, target):
    reason = "logits and labels are not (rows, classes) and (rows,)"
    assert op.unsupported(random(*logits), torch.zeros(target, dtype=torch.int64, device="npu")) == reason


def test_as_many_rows_as_the_operator_takes():
    assert op.unsupported(torch.zeros(199999, 1, device="npu"), torch.zeros(199999).long().npu()) is None


def test_labels_are_plain_tensors_and_parameters_are():
    x, target = random(3, 5), labels(3, 5)
    assert op.unsupported(x, target.as_subclass(Subclass)) == "Subclass is not a plain tensor"
    assert op.unsupported(torch.nn.Parameter(x.detach()), target) is None
