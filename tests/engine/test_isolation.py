"""What one target, module or finder lacks is its own business; and nobody hears of what they do not use."""

from __future__ import annotations

import dataclasses
import logging
import sys

import pytest

from npu_patch import registry
from npu_patch.registry import Library

from . import fakes


def test_a_listed_module_that_this_version_of_the_library_does_not_have_stops_nothing(fake):
    names = [f"{fake.name}.{m}" for m in ("models.gone.modeling_gone", "norms", "functions")]
    fake.adapters.modules = lambda: names
    patcher = fake.patcher()
    patcher.set({"rms_norm": True, "rope": True})
    assert fake.load("norms").Own().forward(1)[0] == "patched"
    assert fake.load("functions").rotate(1, 2)[0] == "patched"
    assert f"{fake.name}.models" not in sys.modules


def test_an_op_whose_finder_cannot_be_imported_leaves_the_others_alone(fake, caplog):
    finders = dict(fake.library.finders, rope="npu_patch_test_adapters_that_are_not_there:find")
    fake.library = Library(fake.name, fake.library.modules, finders)
    patcher = fake.patcher()
    norms = fake.load("norms")
    with caplog.at_level(logging.ERROR, "npu_patch"):
        patcher.set({"rms_norm": True, "rope": True})
    assert norms.Own().forward(1)[0] == "patched"
    assert norms.Own.apply(1, 2)[0] == "original"
    assert "npu_patch_test_adapters_that_are_not_there" in caplog.text


def test_switching_on_imports_no_module_of_the_library(fake):
    fake.load("norms")
    patcher = fake.patcher()
    patcher.set({"rms_norm": True, "rope": True, "attention": True})
    with patcher.scope({"rope": False}, exact=False):
        patcher.status()
    assert [name for name in sys.modules if name.startswith(f"{fake.name}.")] == [f"{fake.name}.norms"]


def test_what_nobody_asked_about_is_said_in_the_table_and_not_in_warnings(fake, caplog):
    """Unrecognised and missing places of models that somebody else uses, and targets that are never called."""
    fake.extra = [fake.target("rms_norm", "norms", "Gone.forward", fakes.patched)]
    patcher = fake.patcher()
    with caplog.at_level(logging.WARNING, "npu_patch"):
        patcher.set({"rms_norm": True, "rope": True, "attention": True})
        for module in ("norms", "functions", "user", "late"):
            fake.load(module)
        patcher.clear()
        patcher.set({"rms_norm": True})
    assert {"unrecognised", "missing", "active"} <= {row.state for row in patcher.status()}
    assert caplog.records == []


def test_a_place_that_the_library_names_otherwise_is_missing_and_never_silently_active(fake):
    """As with a class spelt `…Version` for `…Vision`: the row says so, and the op counts as never reached."""
    fake.extra = [fake.target("rms_norm", "norms", "Ovn.forward", fakes.patched)]
    fake.find_norms = lambda module: iter(fake.extra)
    fake.adapters.find_norms = fake.find_norms
    norms = fake.load("norms")
    patcher = fake.patcher()
    patcher.set({"rms_norm": True})
    norms.Own().forward(1)
    (row,) = [row for row in patcher.status() if row.op == "rms_norm"]
    assert (row.state, row.hits) == ("missing", 0)
    assert "Ovn" in row.reason
    assert not patcher.reached("rms_norm")


@pytest.mark.parametrize("op", ["rms_norm", "rope", "attention"])
def test_on_runs_the_replacement_and_off_the_original_for_this_op_alone(fake, op):
    calls = {
        "rms_norm": lambda: fake.load("norms").Own().forward(1)[0],
        "rope": lambda: fake.load("functions").rotate(1, 2)[0],
        "attention": lambda: fake.load("functions").REGISTRY["sdpa"](1)[0],
    }
    patcher = fake.patcher()
    for on in (True, False, True):
        patcher.set({op: on})
        assert {name: call() for name, call in calls.items()} == {
            name: "patched" if on and name == op else "original" for name in calls
        }


def test_compiled_code_follows_an_option(fake, monkeypatch):
    import torch

    option = registry.Option("factor", 2, "for the test")
    monkeypatch.setitem(registry.__dict__, "OPS", (dataclasses.replace(registry.OPS[0], options=(option,)),))

    def adapter(original, site):
        options = site.options

        def forward(self, hidden_states, scale=1):
            if hidden_states is None:
                return original(self, hidden_states, scale)
            return hidden_states * options["factor"]

        return forward

    fake.extra = [fake.target("rms_norm", "norms", "Base.forward", adapter)]
    norms = fake.load("norms")
    patcher = fake.patcher()
    patcher.set({"rms_norm": True})
    base = norms.Base()
    compiled = torch.compile(lambda x: base.forward(x), backend="eager", fullgraph=True)
    x = torch.ones(1)
    assert compiled(x).item() == 2
    patcher.configure("rms_norm", {"factor": 3})
    assert compiled(x).item() == 3


@pytest.mark.parametrize("first", ["functions", "user"])
def test_a_function_found_under_two_names_is_replaced_once_and_comes_back_under_both(fake, first):
    """One finder sees it where it is defined, and again where it was imported by name."""
    second = {"functions": "user", "user": "functions"}[first]
    fake.adapters.modules = lambda: [f"{fake.name}.{m}" for m in (first, second)]

    def find(module):
        place = module.__name__.split(".")[1]
        yield fake.target("rope", place, "rotate", fakes.patched_function, rebind=(fake.name,))

    fake.adapters.find_functions = find
    functions, user = fake.load("functions"), fake.load("user")
    original = functions.rotate
    patcher = fake.patcher()
    for _ in range(2):
        patcher.set({"rope": True})
        assert functions.rotate is user.rotate is user.alias
        assert functions.rotate.__wrapped__ is original
        assert user.rotate(1, 2) == ("patched", 1, 2, 1)
        patcher.set({"rope": False})
        assert functions.rotate is user.rotate is user.alias is original
    assert [row.hits for row in patcher.status() if row.target.endswith(":rotate")] == [2]
