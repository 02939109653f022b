from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from npu_patch.ops import rms_norm

from .formulas import gemma_norm, llama_norm
from .tools import Ran, assert_close, assert_no_worse, compiled, random, relative_error, second_order, wide

EPS = 1e-6


def fused(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    assert rms_norm.unsupported(x, weight) is None
    return rms_norm.rms_norm(x, weight, EPS)


def fused_gemma(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return fused(x, 1.0 + weight.float())


@pytest.mark.parametrize("shape", [(7,), (5, 64), (2, 3, 96), (2, 3, 4, 33)])
def test_float32_equals_the_formula_forward_and_backward(shape: tuple[int, ...]) -> None:
    x, weight = random(*shape), random(shape[-1], seed=1)
    assert_close(fused, lambda x, w: llama_norm(x, w, EPS), x, weight)
    assert_close(fused_gemma, lambda x, w: gemma_norm(x, w, EPS), x, weight)


def test_rows_of_zero_tiny_and_huge_values_equal_the_formula() -> None:
    rows = torch.stack((torch.zeros(64), torch.full((64,), 1e-4), torch.linspace(-1e4, 1e4, 64)))
    for row in rows:
        x = row[None].npu().requires_grad_()
        assert_close(fused, lambda x, w: llama_norm(x, w, EPS), x, random(64))


def test_a_hidden_size_of_53248_equals_the_formula() -> None:
    assert_close(fused, lambda x, w: llama_norm(x, w, EPS), random(2, 53248), random(53248, seed=1))


@pytest.mark.parametrize(
    ("name", "ours", "original"), [("llama", fused, llama_norm), ("gemma", fused_gemma, gemma_norm)]
)
def test_bfloat16_error_is_no_worse_than_the_originals(name: str, ours: object, original: object) -> None:
    def make(seed: int) -> list[torch.Tensor]:
        return [random(4, 16, 64, dtype=torch.bfloat16, seed=seed), random(64, dtype=torch.bfloat16, seed=seed + 100)]

    assert_no_worse(ours, lambda x, w: original(x, w, EPS), lambda x, w: original(x, w, EPS), make)


def test_a_small_bfloat16_gemma_weight_is_not_lost() -> None:
    x = random(4, 64, dtype=torch.bfloat16)
    weight = torch.full((64,), 2.0**-9, dtype=torch.bfloat16, device="npu")
    wide = gemma_norm(x.detach().cpu().double(), weight.cpu().double(), EPS)
    narrow = rms_norm.rms_norm(x, 1.0 + weight, EPS).detach().cpu().double()
    ours = fused_gemma(x, weight).detach().cpu().double()
    assert (ours - wide).norm() < 0.8 * (narrow - wide).norm()


def test_the_fused_operator_runs_forward_and_backward() -> None:
    x, weight = random(2, 64), random(64)
    with Ran() as ran:
        fused(x, weight).sum().backward()
    assert (ran["npu_rms_norm"], ran["npu_rms_norm_backward"]) == (1, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_the_result_has_the_type_of_the_input(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    x, weight = random(2, 64, dtype=dtype), random(64, dtype=weight_dtype or dtype)
    y = fused(x, weight)
    y.sum().backward()
    assert y.dtype == dtype
    assert (x.grad.dtype, weight.grad.dtype) == (dtype, weight_dtype or dtype)


def test_without_a_weight_nothing_is_scaled_and_the_ones_are_made_once() -> None:
    x = random(3, 48)
    rms_norm._ones.clear()
    with torch.inference_mode():  # ones made in here must still serve a later training step
        fused(x, None)
    with Ran() as ran:
        fused(x, None).sum().backward()
    assert ran["ones"] == 0
    assert_close(lambda x: fused(x, None), lambda x: llama_norm(x, torch.ones(48, dtype=x.dtype), EPS), x)


def test_ones_made_for_a_trace_are_not_kept() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    rms_norm._ones.clear()
    with FakeTensorMode(), torch.device("npu:0"):
        fused(torch.empty(2, 24), None)
    assert not rms_norm._ones


def refused(x: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """The operator itself does not take it, or gives nothing that can be differentiated."""
    try:
        rms_norm.rms_norm(x, weight, EPS).sum()
    except (RuntimeError, IndexError, TypeError):
        return True
    return False


GUARDS = {
    "not on an NPU": lambda: (torch.ones(2, 8), torch.ones(8)),
    "the weight is on another device": lambda: (random(2, 8), torch.ones(8)),
    "input of type float64": lambda: (random(2, 8).double(), None),
    "input of type float64 with a weight of type float64": lambda: (random(2, 8).double(), random(8).double()),
    "input of type float32 with a weight of type bfloat16": lambda: (random(2, 8), random(8, dtype=torch.bfloat16)),
    "input of type bfloat16 with a weight of type float16": lambda: (
        random(2, 8, dtype=torch.bfloat16),
        random(8, dtype=torch.float16),
    ),
    "the weight is empty": lambda: (random(2, 8), Parameter(torch.empty(0, device="npu"))),
    "the weight's size is not the input's last size": lambda: (random(2, 8), random(4)),
    "the input has no dimension or more than 8": lambda: (random(1, 1, 1, 1, 1, 1, 1, 2, 8), random(8)),
}


@pytest.mark.parametrize("reason", GUARDS)
def test_what_the_operator_refuses_has_a_reason(reason: str) -> None:
    x, weight = GUARDS[reason]()
    assert rms_norm.unsupported(x, weight) == reason
    assert refused(x, weight)


def test_a_two_dimensional_weight_would_normalise_over_two_dimensions() -> None:
    x, weight = random(2, 8), torch.ones(2, 8, device="npu")
    assert rms_norm.unsupported(x, weight) == "the weight is not one-dimensional"
    whole = x / (x.square().mean() + EPS).sqrt()
    torch.testing.assert_close(rms_norm.rms_norm(x, weight, EPS), whole)


def test_an_empty_input_has_a_reason() -> None:
    assert rms_norm.unsupported(random(0, 8), random(8)) == "the input is empty"
    assert rms_norm.unsupported(torch.ones((), device="npu"), None) == "the input has no dimension or more than 8"


class Subclass(torch.Tensor):
    pass


def test_a_tensor_subclass_has_a_reason() -> None:
    x, weight = random(2, 8), random(8)
    assert rms_norm.unsupported(x.detach().as_subclass(Subclass), weight) == "Subclass is not a plain tensor"
    assert rms_norm.unsupported(x, weight.detach().as_subclass(Subclass)) == "Subclass is not a plain tensor"


def test_under_a_function_transform_there_is_a_reason() -> None:
    reasons: list[str | None] = []
    x, weight = random(2, 8, grad=False), random(8, grad=False)

    def f(x: torch.Tensor) -> torch.Tensor:
        reasons.append(rms_norm.unsupported(x, weight))
        return llama_norm(x, weight, EPS).sum()

    torch.func.grad(f)(x)
    torch.vmap(f)(x)
    with torch.autograd.forward_ad.dual_level():
        f(torch.autograd.forward_ad.make_dual(x, x))
    assert reasons == ["a torch.func transform or forward-mode differentiation is active"] * 3


def test_in_forward_mode_the_operator_would_lose_the_derivative() -> None:
    from torch.autograd import forward_ad

    x, weight = random(2, 8, grad=False), random(8, grad=False)
    with forward_ad.dual_level():
        fused_dual = rms_norm.rms_norm(forward_ad.make_dual(x, x), weight, EPS)
        assert forward_ad.unpack_dual(fused_dual).tangent is None


def test_fullgraph_compilation_keeps_the_operator() -> None:
    x, weight = random(2, 16, 64), random(64, seed=1)

    def f(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return fused(x, weight) + fused(x, None)

    traced, operators = compiled(f)
    plain, again = (torch.autograd.grad(g(x, weight).square().sum(), (x, weight)) for g in (f, traced))
    torch.testing.assert_close(plain, again)
    assert operators.count("npu.npu_rms_norm.default") == 2
    assert operators.count("npu.npu_rms_norm_backward.default") == 2


def test_fullgraph_compilation_of_a_transposed_view_knows_the_results_strides() -> None:
    x, weight = random(2, 5, 3, 8, grad=False).transpose(1, 2), random(8, grad=False)

    def f(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return fused(x, weight).transpose(1, 2).reshape(2, 5, 24)  # a view or a copy, as the strides say

    torch.testing.assert_close(compiled(f)[0](x, weight), f(x, weight))


def test_non_reentrant_checkpointing_gives_the_same_gradients() -> None:
    from torch.utils.checkpoint import checkpoint

    x, weight = random(2, 64), random(64)
    plain = torch.autograd.grad(fused(x, weight).square().sum(), (x, weight))
    again = torch.autograd.grad(checkpoint(fused, x, weight, use_reentrant=False).square().sum(), (x, weight))
    torch.testing.assert_close(plain, again)


def test_no_argument_is_changed() -> None:
    x, weight = random(2, 64), random(64)
    before = [t.detach().clone() for t in (x, weight)]
    y = fused(x, weight)
    head = torch.ones_like(y)
    y.backward(head)
    assert torch.equal(head, torch.ones_like(y))
    assert all(torch.equal(a, b) for a, b in zip(before, (x, weight), strict=True))


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_second_order_gradients_equal_the_formula(leading: tuple[int, ...]) -> None:
    x, weight, head = random(*leading, 16), random(16, seed=1), random(*leading, 16, seed=2)
    exact = second_order(lambda x, w: llama_norm(x, w, EPS), *(wide(t) for t in (x, weight, head)))
    for mine, theirs in zip(second_order(fused, x, weight, head), exact, strict=True):
        assert relative_error(mine, theirs) < 1e-5


def test_second_order_gradients_of_a_weight_that_made_the_input() -> None:
    weight, head = random(16, seed=1), random(3, 16, seed=2)

    def deep(norm: object, weight: torch.Tensor, head: torch.Tensor) -> list[torch.Tensor]:
        return second_order(lambda w, h: norm(norm(w * w.new_ones(3, 1), w), w) * h, weight, head, head.detach())

    exact = deep(lambda x, w: llama_norm(x, w, EPS), wide(weight), wide(head))
    for mine, theirs in zip(deep(fused, weight, head), exact, strict=True):
        assert relative_error(mine, theirs) < 1e-5


def test_second_order_gradients_without_a_weight_and_in_bfloat16() -> None:
    x, head = random(3, 16, dtype=torch.bfloat16), random(3, 16, seed=2, dtype=torch.bfloat16)
    exact = second_order(lambda x: llama_norm(x, 1.0, EPS), wide(x), wide(head))
    found = second_order(lambda x: fused(x, None), x, head)
    assert [t.dtype for t in found] == [torch.bfloat16] * 2
    for mine, theirs in zip(found, exact, strict=True):
        assert relative_error(mine, theirs) < 2e-2


def test_second_order_gradients_through_a_checkpoint_are_refused_in_words() -> None:
    from torch.utils.checkpoint import checkpoint

    x, weight = random(3, 16), random(16, seed=1)
    with pytest.raises(RuntimeError, match=r"npu_patch\.disable\('rms_norm'\)"):
        second_order(lambda x, w: checkpoint(fused, x, w, use_reentrant=False), x, weight, random(3, 16, seed=2))
