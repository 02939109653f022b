from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import npu_patch.simulator
from npu_patch.ops import swiglu
from npu_patch.ops.verdicts import Verdicts

from .tools import Ran, assert_close, assert_no_worse, compiled, random, relative_error, second_order, wide

CASES = [("silu", 0), ("gelu", 0), ("gelu", 1), ("gelu_tanh", 0), ("gelu_tanh", 1)]
OPERATORS = {"silu": "npu_swiglu", "gelu": "npu_geglu", "gelu_tanh": "npu_geglu"}
BACKWARDS = {"npu_swiglu": "npu_swiglu_backward", "npu_geglu": "npu_geglu_grad"}


def activate(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def formula(x: Tensor, activation: str, gate: int = 0) -> Tensor:
    sides = x.chunk(2, -1)
    return activate(sides[gate], activation) * sides[1 - gate]


def fused(x: Tensor, activation: str, gate: int = 0) -> Tensor:
    assert swiglu.unsupported(x, activation, gate) is None
    return swiglu.gated(x, activation, gate)


@pytest.mark.parametrize("shape", [(8,), (5, 64), (2, 3, 26), (2, 3, 4, 6)])
@pytest.mark.parametrize(("activation", "gate"), CASES)
def test_float32_equals_the_formula_forward_and_backward(shape, activation, gate):
    assert_close(lambda x: fused(x, activation, gate), lambda x: formula(x, activation, gate), random(*shape))


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), max_size=4),
    half=st.integers(1, 9),
    scale=st.sampled_from([0.0, 1e-4, 1.0, 30.0, 1e4]),
    case=st.sampled_from(CASES),
)
def test_any_shape_and_scale_equals_the_formula(shape, half, scale, case):
    x = (random(*shape, 2 * half).detach() * scale).requires_grad_()
    ours, theirs = fused(x, *case), formula(x, *case)  # in one precision: far from zero gelu underflows
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("activation", "gate"), CASES)
def test_second_order_gradients_equal_the_formula(activation, gate):
    x, head = random(2, 3, 16), random(2, 3, 8)
    exact = second_order(lambda x: formula(x, activation, gate), wide(x), wide(head))
    for mine, theirs in zip(second_order(lambda x: fused(x, activation, gate), x, head), exact, strict=True):
        assert relative_error(mine, theirs) < 1e-5


@pytest.mark.parametrize(("activation", "gate"), CASES)
def test_bfloat16_error_is_no_worse_than_the_originals(activation, gate):
    assert_no_worse(
        lambda x: fused(x, activation, gate),
        lambda x: formula(x, activation, gate),
        lambda x: formula(x, activation, gate),
        lambda seed: [random(8, 16, 64, dtype=torch.bfloat16, seed=seed)],
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", OPERATORS)
def test_the_fused_operator_runs_and_keeps_the_dtype(dtype, activation):
    x = random(4, 16, dtype=dtype)
    operator = OPERATORS[activation]
    with Ran() as ran:
        y = fused(x, activation)
        y.sum().backward()
    assert (ran[operator], ran[BACKWARDS[operator]]) == (1, 1)
    assert (y.dtype, y.shape, x.grad.dtype) == (dtype, (4, 8), dtype)


def test_halves_that_were_swapped_or_another_gelu_would_be_seen():
    x = random(4, 16, grad=False)
    assert not torch.allclose(swiglu.gated(x, "silu"), formula(x, "silu", 1), atol=1e-3)
    for activation in ("gelu", "gelu_tanh"):
        assert not torch.allclose(swiglu.gated(x, activation, 0), formula(x, activation, 1), atol=1e-3)
    large = torch.full((1, 2), -2.5, device="npu")
    assert not torch.allclose(swiglu.gated(large, "gelu"), swiglu.gated(large, "gelu_tanh"), atol=1e-4)


@pytest.mark.parametrize(("activation", "gate"), CASES)
def test_nothing_more_is_kept_for_backward_and_less_is_moved(activation, gate):
    def count(function):
        weight = random(32, 64, dtype=torch.bfloat16)
        x = random(16, 32, dtype=torch.bfloat16)
        with npu_patch.simulator.trace([weight, x]) as trace:
            function(x @ weight, activation, gate).sum().backward()
        return trace

    ours, theirs = count(fused), count(formula)
    assert ours.saved_bytes <= theirs.saved_bytes
    assert ours.launches < theirs.launches
    assert ours.bytes_read + ours.bytes_written < theirs.bytes_read + theirs.bytes_written
    assert ours.peak_bytes <= theirs.peak_bytes


class Subclass(torch.Tensor):
    pass


GUARDS = {
    "not on an NPU": lambda: torch.ones(2, 8),
    "projections of type float64": lambda: random(2, 8).double(),
    "projections of type int32": lambda: torch.ones(2, 8, dtype=torch.int32, device="npu"),
    "the projections are empty": lambda: random(0, 8),
    "the projections have no two halves": lambda: random(2, 7),
    "the projections are not contiguous": lambda: random(8, 4).t(),
    "the projections have no dimension or more than 8": lambda: random(1, 1, 1, 1, 1, 1, 1, 2, 8),
    "Subclass is not a plain tensor": lambda: random(2, 8).detach().as_subclass(Subclass),
}


@pytest.mark.parametrize("activation", OPERATORS)
@pytest.mark.parametrize("reason", GUARDS)
def test_what_is_not_documented_has_a_reason(reason, activation):
    assert swiglu.unsupported(GUARDS[reason](), activation) == reason


@pytest.mark.parametrize("activation", OPERATORS)
def test_the_ends_of_the_dimensions(activation):
    assert swiglu.unsupported(random(1, 1, 1, 1, 1, 1, 2, 8), activation) is None
    assert swiglu.unsupported(random(8), activation) is None
    reason = "the projections have no dimension or more than 8"
    assert swiglu.unsupported(random(8)[0], activation) == reason


@pytest.mark.parametrize(("activation", "gate"), CASES)
def test_parameters_are_plain_tensors(activation, gate):
    weight = torch.nn.Parameter(random(2, 8))
    assert swiglu.unavailable(weight) is None
    assert_close(lambda x: fused(x, activation, gate), lambda x: formula(x, activation, gate), weight)


def test_what_is_known_before_anything_is_projected():
    assert swiglu.unavailable(random(2, 8)) is None
    for reason in ("not on an NPU", "Subclass is not a plain tensor"):
        assert swiglu.unavailable(GUARDS[reason]()) == reason


def test_nothing_is_remembered_while_compiling():
    swiglu._verdicts.clear()
    compiled(lambda x: fused(x, "silu"))[0](random(2, 8))
    assert not swiglu._verdicts


@pytest.mark.parametrize("reason", list(GUARDS)[:6])
def test_the_operator_refuses_it_without_the_guard(reason):
    with pytest.raises((RuntimeError, NotImplementedError)):
        swiglu.gated(GUARDS[reason](), "silu")


def test_swiglu_has_no_gate_in_the_second_half():
    assert swiglu.unsupported(random(2, 8), "silu", 1) == "npu_swiglu activates the first half"


def test_under_a_function_transform_there_is_a_reason():
    reasons: list[str | None] = []
    x = random(2, 8, grad=False)

    def f(x: Tensor) -> Tensor:
        reasons.append(swiglu.unsupported(x, "silu"))
        reasons.append(swiglu.unavailable(x))
        return formula(x, "silu").sum()

    torch.func.grad(f)(x)
    torch.vmap(f)(x)
    assert reasons == ["a torch.func transform or forward-mode differentiation is active"] * 4


def test_fullgraph_compilation_keeps_swiglu():
    x = random(3, 16)
    traced, operators = compiled(lambda x: fused(x, "silu"))
    plain, again = (torch.autograd.grad(f(x).square().sum(), x) for f in (lambda x: fused(x, "silu"), traced))
    torch.testing.assert_close(plain, again)
    assert operators.count("npu.npu_swiglu.default") == operators.count("npu.npu_swiglu_backward.default") == 1


def test_fullgraph_compilation_leaves_geglu_out():
    x = random(3, 16)

    def f(x: Tensor) -> Tensor:
        if swiglu.unsupported(x, "gelu") is None:
            return swiglu.gated(x, "gelu")
        return formula(x, "gelu")

    traced, operators = compiled(f)
    torch.testing.assert_close(torch.autograd.grad(traced(x).sum(), x), torch.autograd.grad(f(x).sum(), x))
    assert not any("geglu" in name for name in operators)


def test_under_compile_the_derivative_of_geglu_fails_without_the_guard():
    x = random(3, 16)
    traced, _ = compiled(lambda x: torch.ops.npu.npu_geglu.default(x, -1, 1, True)[0])
    with pytest.raises(Exception, match="Unable to cast"):
        traced(x).sum().backward()


def test_no_argument_is_changed():
    for activation in OPERATORS:
        x = random(2, 16)
        before = x.detach().clone()
        y = fused(x, activation)
        head = torch.ones_like(y)
        y.backward(head)
        assert torch.equal(head, torch.ones_like(y))
        assert torch.equal(x.detach(), before)


def test_on_ascend950_only_swiglu_is_documented(monkeypatch):
    monkeypatch.setattr(swiglu, "is_ascend950", lambda: True)
    monkeypatch.setattr(swiglu, "_verdicts", Verdicts(swiglu._judge))  # the chip is one for a process
    assert swiglu.unsupported(random(2, 8), "silu") is None
    assert swiglu.unsupported(random(2, 8), "gelu") == "npu_geglu is not documented for Ascend950"


@pytest.mark.parametrize("dynamic", [True, None])
def test_new_lengths_are_not_compiled_again_and_again(dynamic):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    traced = torch.compile(lambda x: fused(x, "silu"), backend=counter, fullgraph=True, dynamic=dynamic)
    for length in (5, 7, 9, 11):
        x = random(2, length, 8)
        found, exact = (torch.autograd.grad(f(x).square().sum(), x) for f in (traced, lambda x: fused(x, "silu")))
        torch.testing.assert_close(found, exact)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("strict", [True, False])
def test_export_keeps_the_operator(strict):
    class Gate(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fused(x, "silu")

    with torch.no_grad():
        program = torch.export.export(Gate(), (random(3, 8, grad=False),), strict=strict)
    assert [str(n.target) for n in program.graph.nodes if "npu" in str(n.target)] == ["npu.npu_swiglu.default"]
