"""What computes something else where no probe goes is refused, and what only looks like it is not."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import types
from typing import Any

import pytest
import torch.nn.functional as F
from torch import nn

from npu_patch.adapters.transformers import mlp, norms, rope
from npu_patch.discovery import NotRecognised, recognise_gated_norm, recognise_norm, recognise_rotary
from npu_patch.discovery.eager import recognise_eager
from npu_patch.discovery.mlp import recognise_gated_mlp
from npu_patch.discovery.watch import Watch

from . import impostors, variants
from .impostors import Base
from .test_rotary import half, rotate_half


@pytest.mark.parametrize("cls", impostors.NORMS, ids=lambda cls: cls.__name__)
def test_a_norm_that_may_compute_something_else_is_refused_with_a_reason(cls):
    with pytest.raises(NotRecognised) as error:
        recognise_norm(cls)
    assert str(error.value)


@pytest.mark.parametrize("make", [lambda: impostors.scaled(1.0), impostors.counted], ids=["scaled", "counted"])
def test_a_norm_that_depends_on_a_variable_of_a_closure_is_refused(make):
    with pytest.raises(NotRecognised):
        recognise_norm(make())


@pytest.mark.parametrize("function", impostors.ROPES, ids=lambda f: f.__name__)
def test_a_rope_that_may_compute_something_else_is_refused_with_a_reason(function):
    with pytest.raises(NotRecognised) as error:
        recognise_rotary(function)
    assert str(error.value)


def test_a_parameter_that_was_replaced_is_none_of_the_callers():
    with pytest.raises(NotRecognised, match="goes one way"):
        recognise_gated_norm(impostors.AnArgumentThatWasReplaced)


def test_the_reason_quotes_the_line():
    line = impostors.OnAnNPU.forward.__code__.co_firstlineno + 1
    with pytest.raises(NotRecognised) as error:
        recognise_norm(impostors.OnAnNPU)
    assert str(error.value) == f'line {line} of forward (if x.device.type == "npu":) goes one way in every probe'


def test_probing_changes_nothing_outside():
    before = list(impostors.CALLS), impostors.Config.calls, impostors.SCALE
    for cls in (impostors.CountsInAHelper, impostors.MarksItsInput):
        with pytest.raises(NotRecognised):
            recognise_norm(cls)
    assert (before[1], before[2]) == (impostors.Config.calls, impostors.SCALE)


class GatedOfManyTokens(nn.Module):
    def forward(self, x):
        if x.shape[-2] > 4096:
            return x
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class GatedByAFlag(nn.Module):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * impostors.SCALES[0])


@pytest.mark.parametrize("cls", [GatedOfManyTokens, GatedByAFlag])
def test_a_gated_mlp_that_may_compute_something_else_is_refused(cls):
    with pytest.raises(NotRecognised):
        recognise_gated_mlp(cls)


@pytest.mark.parametrize("function", impostors.EAGER, ids=lambda f: f.__name__)
def test_an_eager_attention_that_may_compute_something_else_is_refused(function):
    with pytest.raises(NotRecognised):
        recognise_eager(function, ("cache_position",))
    assert recognise_eager(impostors.eager, ("cache_position",)).groups


# ---- errors that are meant to end the process ------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [impostors.Leaves, impostors.RaisesABaseException, impostors.RaisesWhatCannotBePrinted])
def test_a_probe_that_raises_whatever_it_likes_is_a_reason(cls):
    with pytest.raises(NotRecognised, match="fails on a small input"):
        recognise_norm(cls)


def test_an_interrupt_is_nobodys_reason():
    class Interrupted(Base):
        def forward(self, x):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recognise_norm(Interrupted)
    assert sys.gettrace() is None or "npu_patch" not in str(sys.gettrace())


# ---- and what is all right -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", variants.NORMS, ids=lambda cls: cls.__name__)
def test_a_norm_whose_branches_are_known_or_harmless_is_recognised(cls):
    assert recognise_norm(cls)


def test_a_gate_that_may_be_missing_is_recognised_and_so_is_a_table_of_functions():
    (meaning,) = recognise_gated_norm(variants.GateThatMayBeMissing)
    assert meaning.conditions == (("activation", "silu"),)
    (table,) = (part for part in meaning.parts if part.name == "ACTIVATIONS")
    variants.ACTIVATIONS["relu"] = F.relu
    assert not table.changed()
    variants.ACTIVATIONS["silu"] = F.relu
    assert table.changed()
    variants.ACTIVATIONS["silu"] = F.silu
    assert not table.changed()


def test_a_table_that_makes_what_is_looked_up_is_one_too():
    (meaning,) = recognise_gated_norm(variants.GateOfASharedTable)
    (table,) = (part for part in meaning.parts if part.name == "SHARED")
    assert not table.changed()
    assert meaning.formula == "llama, silu gate"


def test_parameters_that_are_none_or_not_are_no_branches():
    meaning = recognise_rotary(variants.parameters_may_be_missing)
    assert meaning.form == "unused positions, dim"
    assert {part.value for part in meaning.parts} == {half, rotate_half}


def test_methods_and_functions_that_take_part_are_known():
    (meaning,) = recognise_norm(variants.ByDimensions)
    assert [part.value for part in meaning.parts] == [impostors.llama]
    (meaning,) = recognise_norm(variants.WithoutAutocast)
    assert {part.value for part in meaning.parts} == {Base.norm, impostors.llama}


# ---- what is watched -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("home", "near", "far"),
    [
        (
            "library.models.llama.modeling_llama",
            ("library.models.llama.modeling_llama", "library.models.qwen.helpers", "other.helpers", "torch_npu.ops"),
            ("library.utils.generic", "library.activations", "torch.nn.functional", "contextlib", "npu_patch.sites"),
        ),
        (
            "remote.owner.repository.revision.modeling_new",
            ("remote.owner.repository.revision.helpers", "remote.other.repository.revision.helpers"),
            ("torch",),
        ),
        ("single", ("single", "single.helpers"), ("os.path",)),
    ],
)
def test_what_serves_every_model_is_trusted_and_other_code_of_models_is_not(home, near, far):
    watch = Watch(home)
    assert [name for name in (*near, *far) if watch.near(name)] == [*near]


def test_what_imports_and_the_collector_run_is_not_watched(monkeypatch):
    class Finder:
        looked = 0

        @classmethod
        def find_spec(cls, name: str, path: Any = None, target: Any = None) -> None:
            cls.looked += name == "a_module_that_is_not_there"

    def function() -> bool:
        with contextlib.suppress(ImportError):
            importlib.import_module("a_module_that_is_not_there")
        return gc.isenabled()

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    watch = Watch(__name__)
    with pytest.raises(NotRecognised, match="catches an error"):
        watch.run(function)
    assert Finder.looked == 1
    assert set(watch.entered) == {function.__code__}
    assert gc.isenabled()
    assert Watch(__name__).run(gc.isenabled) is False
    assert gc.isenabled()


@pytest.mark.parametrize("cls", [variants.ByDimensions, impostors.Leaves, impostors.OnAnNPU])
def test_a_tracer_that_was_set_is_set_again(cls):
    def tracer(frame: types.FrameType, event: str, argument: Any) -> Any:
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        with contextlib.suppress(NotRecognised):
            recognise_norm(cls)
        after = sys.gettrace()
    finally:
        sys.settrace(before)
    assert after is tracer


def _copy(function: types.FunctionType) -> types.FunctionType:
    return types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)


# ---- what finders make of it -----------------------------------------------------------------------------------------


def test_a_module_with_odd_classes_is_looked_at_all_the_same():
    """The class that misbehaves is unrecognised, the others are targets."""
    module = types.ModuleType("transformers_modules.odd")

    class OddRMSNorm(Base, metaclass=impostors.OddMeta):
        def forward(self, x):
            return self.norm(x)

    for name, value in (
        ("OddRMSNorm", OddRMSNorm),
        ("LeavesRMSNorm", type("LeavesRMSNorm", (impostors.Leaves,), {"forward": impostors.Leaves.forward})),
        ("GoodRMSNorm", type("GoodRMSNorm", (Base,), {"forward": variants.ByWidth.forward})),
        ("apply_rotary_odd", impostors.OddCallable()),
        ("apply_rotary_leaves", _copy(impostors.leaves)),
    ):
        vars(module)[name] = value
    for name in ("LeavesRMSNorm", "GoodRMSNorm", "apply_rotary_leaves"):
        vars(module)[name].__module__ = module.__name__
    type.__setattr__(OddRMSNorm, "__module__", module.__name__)
    found = [*norms.find(module), *rope.find(module), *mlp.find(module)]
    states = {one.path: type(one).__name__ for one in found}
    assert states == {
        "OddRMSNorm.forward": "Unrecognised",
        "LeavesRMSNorm.forward": "Unrecognised",
        "GoodRMSNorm.forward": "Target",
        "apply_rotary_odd": "Unrecognised",
        "apply_rotary_leaves": "Unrecognised",
    }
