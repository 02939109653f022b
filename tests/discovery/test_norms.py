"""Norm classes are recognised by what they compute, and by nothing else."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from npu_patch.discovery import NotRecognised, is_norm_class, recognise_norm
from npu_patch.discovery.norm_probes import probes
from npu_patch.discovery.standin import ABSENT


class Base(nn.Module):
    """Building an instance is none of a probe's business."""

    def __init__(self, *args: Any) -> None:
        raise AssertionError("a probe built an instance")


def normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class LlamaLike(Base):
    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        return self.weight * normalised(hidden_states.to(torch.float32), self.variance_epsilon).to(dtype)


class T5Like(Base):
    def forward(self, hidden_states):
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class GemmaLike(Base):
    def _norm(self, x):
        return normalised(x, self.eps)

    def forward(self, x):
        return (self._norm(x.float()) * (1.0 + self.weight.float())).type_as(x)


class MultipliedInFloat32(Base):
    def forward(self, x):
        return (normalised(x.float(), self.eps) * self.gain.float()).to(x.dtype)


class DividedByTheRoot(Base):
    def forward(self, x):
        wide = x.float()
        return (self.weight.float() * (wide / (wide.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())).to(x.dtype)


class WithoutWeight(Base):
    def forward(self, x):
        return normalised(x.float(), self.eps).to(x.dtype)


class OptionalScale(Base):
    def forward(self, x):
        y = normalised(x.float(), self.eps)
        if self.with_scale:
            y = y * self.weight.float()
        return y.type_as(x)


class OptionalGroups(Base):
    def forward(self, x):
        wide = x.float()
        if self.group_size is not None:
            wide = wide.unflatten(-1, (-1, self.group_size))
        y = normalised(wide, self.eps)
        y = y if self.group_size is None else y.flatten(-2)
        return (y * (1.0 + self.weight.float())).type_as(x)


class FromTorch(nn.RMSNorm):
    pass


class MakesItsEpsilonATensor(Base):
    def forward(self, x):
        wide = x.float()
        eps = torch.full((1,), self.eps).float()  # of the default dtype
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class FindsItsAttributesItself(LlamaLike):
    def __new__(cls):
        raise AssertionError("a probe built an instance")

    def __getattr__(self, name):
        return super().__getattr__("_" + name)


class WiredThroughAProperty(Base):
    __slots__ = ()

    @property
    def eps(self):
        return self.config.eps

    def forward(self, x):
        return self.weight * normalised(x.float(), self.eps).to(x.dtype)


@pytest.mark.parametrize(
    ("cls", "formula", "weight", "eps"),
    [
        (LlamaLike, "llama", "weight", "variance_epsilon"),
        (T5Like, "llama", "weight", "variance_epsilon"),
        (GemmaLike, "gemma", "weight", "eps"),
        (MultipliedInFloat32, "fp32", "gain", "eps"),
        (DividedByTheRoot, "fp32", "weight", "eps"),
        (WithoutWeight, "none", None, "eps"),
        (MakesItsEpsilonATensor, "llama", "weight", "eps"),
        (WiredThroughAProperty, "llama", "weight", "eps"),
        (FindsItsAttributesItself, "llama", "weight", "variance_epsilon"),
    ],
)
def test_a_norm_is_recognised_with_the_attributes_that_it_reads(cls, formula, weight, eps):
    (meaning,) = recognise_norm(cls)
    assert (meaning.formula, meaning.weight, meaning.eps, meaning.conditions) == (formula, weight, eps, ())


def test_methods_that_a_subclass_could_override_are_part_of_the_meaning():
    (meaning,) = recognise_norm(GemmaLike)
    assert meaning.methods == (("_norm", GemmaLike._norm),)


def test_the_result_dtypes_of_mixed_pairs_are_recorded():
    (llama,), (gemma,) = recognise_norm(LlamaLike), recognise_norm(GemmaLike)
    mixed = torch.bfloat16, torch.float32
    assert llama.results[mixed] is torch.float32
    assert gemma.results[mixed] is torch.bfloat16
    assert recognise_norm(T5Like)[0].results[torch.float32, torch.bfloat16] is torch.bfloat16


def test_one_class_can_have_several_meanings():
    meanings = {meaning.conditions: meaning.formula for meaning in recognise_norm(OptionalScale)}
    assert meanings[(("with_scale", True),)] == "fp32"
    assert meanings[(("with_scale", False),)] == "none"


def test_groups_are_left_out_where_they_can_be():
    (meaning,) = recognise_norm(OptionalGroups)
    assert (meaning.formula, meaning.conditions) == ("gemma", (("group_size", None),))


def test_torchs_own_norm_is_recognised_with_and_without_weight_and_epsilon():
    weighted, bare = recognise_norm(FromTorch)
    assert (weighted.formula, weighted.weight, weighted.widths) == ("fp32", "weight", (("normalized_shape", tuple),))
    assert weighted.default_eps is not None
    assert (bare.formula, bare.conditions) == ("none", (("weight", None),))


# ---- what looks like one of them and is not --------------------------------------------------------------------------

EPS_OF_A_PROBE = probes()[0].eps
calls = 0


def llama(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * normalised(x.float(), eps).to(x.dtype)


class HardCodedEpsilon(Base):
    def forward(self, x):
        return llama(x, self.weight, EPS_OF_A_PROBE)


class LayerNorm(Base):
    def forward(self, x):
        return llama(x - x.mean(-1, keepdim=True), self.weight, self.eps)


class OnlyTheFactor(Base):
    def forward(self, x):
        return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)


class OffsetInLowPrecision(Base):
    def forward(self, x):
        return (normalised(x.float(), self.eps) * (1.0 + self.weight).float()).type_as(x)


class InGroups(Base):
    def forward(self, x):
        groups = max(1, x.shape[-1] // 128)
        wide = x.float().unflatten(-1, (groups, -1))
        return self.weight * normalised(wide, self.eps).flatten(-2).to(x.dtype)


class ClampsLargeValues(Base):
    def forward(self, x):
        return llama(x.clamp(-1e3, 1e3), self.weight, self.eps)


class EpsilonOutsideTheRoot(Base):
    def forward(self, x):
        wide = x.float()
        return self.weight * (wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)).to(x.dtype)


class StopsTheGradientOfTheFactor(Base):
    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps).detach()).to(x.dtype)


class FrozenWeight(Base):
    def forward(self, x):
        return llama(x, self.weight.detach(), self.eps)


class ModifiesItsInput(Base):
    def forward(self, x):
        y = llama(x, self.weight, self.eps)
        x.data.mul_(1.0)
        with torch.no_grad():
            x.add_(0.0)
        return y


class CountsItsCalls(Base):
    def forward(self, x):
        self.calls = 1
        return llama(x, self.weight, self.eps)


class CountsGlobally(Base):
    def forward(self, x):
        global calls
        calls += 1
        return llama(x, self.weight, self.eps)


class Noisy(Base):
    def forward(self, x):
        torch.rand(1)
        return llama(x, self.weight, self.eps)


class Gated(Base):
    def forward(self, x, gate=None):
        return llama(x, self.weight, self.eps)


class Wrapped(Base):
    @torch.no_grad()
    def forward(self, x):
        return llama(x, self.weight, self.eps)


def watched(function):
    @functools.wraps(function)
    def forward(self, x):
        watched_calls.append(x)
        return function(self, x)

    return forward


watched_calls: list[torch.Tensor] = []


class Watched(Base):
    @watched
    def forward(self, x):
        return llama(x, self.weight, self.eps)


class KeptFromTheCompiler(Base):
    @torch._dynamo.disable
    def forward(self, x):
        return llama(x, self.weight, self.eps)


class Scripted(torch.jit.ScriptModule):
    def forward(self, x):
        return llama(x, self.weight, self.eps)


class ReadsItsDict(Base):
    def forward(self, x):
        return llama(x, self.__dict__["weight"], self.eps)


class LlamaRMSNorm(Base):
    """Has the right name."""

    def forward(self, hidden_states):
        return self.weight * hidden_states / (hidden_states.abs().mean(-1, keepdim=True) + self.variance_epsilon)


@pytest.mark.parametrize(
    "cls",
    [
        HardCodedEpsilon,
        LayerNorm,
        OnlyTheFactor,
        OffsetInLowPrecision,
        InGroups,
        ClampsLargeValues,
        EpsilonOutsideTheRoot,
        StopsTheGradientOfTheFactor,
        FrozenWeight,
        ModifiesItsInput,
        CountsItsCalls,
        CountsGlobally,
        Noisy,
        Gated,
        Wrapped,
        Watched,
        KeptFromTheCompiler,
        Scripted,
        ReadsItsDict,
        LlamaRMSNorm,
    ],
)
def test_what_computes_something_else_is_refused_with_a_reason(cls):
    state = torch.random.get_rng_state()
    with pytest.raises(NotRecognised) as error:
        recognise_norm(cls)
    assert str(error.value)
    assert calls == 0
    assert not watched_calls
    assert torch.equal(state, torch.random.get_rng_state())
    recognise_norm(LlamaLike)  # whatever it did to the inputs concerns it alone


class PlusOneIfAsked(Base):
    def forward(self, x):
        weight = self.weight.float()
        if getattr(self, "plus_one", False):
            weight = weight + 1.0
        return (normalised(x.float(), self.eps) * weight).type_as(x)


class NothingWhenEvaluating(Base):
    def forward(self, x):
        return llama(x, self.weight, self.eps) if self.training else x


class TrainingDoesNotMatter(Base):
    def forward(self, x):
        self.training  # noqa: B018
        return llama(x, self.weight, self.eps)


class ScaledByANumber(Base):
    def forward(self, x):
        return llama(x, self.weight, self.eps) * self.factor


def test_a_flag_that_changes_the_formula_becomes_a_condition():
    meanings = {meaning.conditions: meaning.formula for meaning in recognise_norm(PlusOneIfAsked)}
    assert meanings[(("plus_one", True),)] == "gemma"
    assert meanings[(("plus_one", False),)] == "fp32"
    assert meanings[(("plus_one", ABSENT),)] == "fp32"


def test_a_norm_that_is_none_when_evaluating_is_one_for_training_instances_only():
    assert [meaning.conditions for meaning in recognise_norm(NothingWhenEvaluating)] == [(("training", True),)]


def test_a_flag_that_changes_nothing_is_no_condition():
    assert [meaning.conditions for meaning in recognise_norm(TrainingDoesNotMatter)] == [()]


def test_a_number_that_was_never_tried_meets_no_condition():
    with contextlib.suppress(NotRecognised):
        for meaning in recognise_norm(ScaledByANumber):
            ((_, value),) = meaning.conditions
            assert value is True  # an instance's 1.0 or 0.5 is neither


# ---- where modules get imported --------------------------------------------------------------------------------------


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "meta device": lambda: torch.device("meta"),
    "npu device": lambda: torch.device("npu"),
    "fake tensors": FakeTensorMode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no gradient": torch.no_grad,
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "deterministic algorithms": deterministic,
}


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_recognising_works_wherever_an_import_may_happen(surroundings):
    probes.cache_clear()
    with SURROUNDINGS[surroundings]():
        dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
        (meaning,) = recognise_norm(LlamaLike)
        assert meaning.formula == "llama"
        assert recognise_norm(GemmaLike)[0].formula == "gemma"
        assert recognise_norm(MakesItsEpsilonATensor)[0].formula == "llama"
        for cls in (LayerNorm, StopsTheGradientOfTheFactor):
            with pytest.raises(NotRecognised):
                recognise_norm(cls)
        assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (dtype, grad)
    assert recognise_norm(LlamaLike)[0].formula == "llama"  # inputs made there are good for later


def test_recognising_leaves_nothing_behind():
    subclasses = []

    class Registers(LlamaLike):
        def __init_subclass__(cls) -> None:
            subclasses.append(cls)

        def forward(self, x):
            warnings.warn("slow", stacklevel=1)
            return self.weight * normalised(x.float(), self.eps).to(x.dtype)

    state = torch.random.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (meaning,) = recognise_norm(Registers)
    assert meaning.formula == "llama"
    assert not subclasses
    assert torch.equal(state, torch.random.get_rng_state())


def test_candidates_are_norm_classes_of_the_module_itself():
    assert is_norm_class(LlamaRMSNorm, __name__)
    assert is_norm_class(LayerNorm, __name__)
    assert not is_norm_class(LlamaRMSNorm, "elsewhere")
    assert not is_norm_class(nn.LayerNorm, nn.LayerNorm.__module__)
    assert not is_norm_class(llama, __name__)
