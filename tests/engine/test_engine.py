"""Switching on and off, in any order, leaves exactly what was there before."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import random
import sys
import threading
import types
from unittest import mock

import pytest

from npu_patch import functions, installing, registry
from npu_patch.ops.availability import Unavailable
from npu_patch.registry import Target
from npu_patch.sites import StrictError

from . import fakes


def rows(patcher, op=None):
    return {row.target.split(":")[-1]: row for row in patcher.status() if op in (None, row.op)}


def snapshot(fake):
    norms, functions, user = fake.load("norms"), fake.load("functions"), fake.load("user")
    return {
        "own": vars(norms.Own).get("forward"),
        "inherited": vars(norms.Norm).get("forward", "no slot"),
        "base": vars(norms.Base).get("forward"),
        "static": vars(norms.Own).get("apply"),
        "function": functions.rotate,
        "imported": user.rotate,
        "alias": user.alias,
        "entry": functions.REGISTRY["sdpa"],
    }


def same(left, right):
    return {name: left[name] is right[name] for name in left} == dict.fromkeys(left, True)


def test_modules_imported_before_are_patched_at_once_and_later_ones_when_they_come(fake):
    norms = fake.load("norms")
    patcher = fake.patcher()
    patcher.set({"rms_norm": True, "rope": True})
    assert norms.Own().forward(1) == ("patched", 1, 1)
    assert f"{fake.name}.functions" not in sys.modules
    assert fake.load("functions").rotate(1, 2) == ("patched", 1, 2, 1)


def test_a_patched_class_keeps_its_interface_and_does_not_touch_its_base(fake):
    norms = fake.load("norms")
    fake.patcher().set({"rms_norm": True})
    forward = norms.Norm.forward
    assert type(forward) is types.FunctionType
    assert inspect.signature(forward) == inspect.signature(norms.Base.forward)
    assert forward.__code__.co_varnames[:3] == ("self", "hidden_states", "scale")
    assert norms.Norm().forward(hidden_states=1, scale=3) == ("patched", 1, 3)
    assert norms.Base().forward(1) == ("original", 1, 1)


def test_off_puts_the_identical_objects_back_and_removes_the_inherited_slot(fake):
    before = snapshot(fake)
    patcher = fake.patcher()
    patcher.set({"rms_norm": True, "rope": True, "attention": True})
    changed = snapshot(fake)
    assert [name for name in before if before[name] is changed[name]] == ["base"]
    patcher.clear()
    assert same(before, snapshot(fake))


def test_a_static_method_stays_one_while_patched(fake):
    norms = fake.load("norms")
    fake.patcher().set({"rope": True})
    assert norms.Own.apply(1, 2) == norms.Own().apply(1, 2) == ("patched", 1, 2)


def test_names_imported_while_patched_get_the_original_back(fake):
    patcher = fake.patcher()
    functions = fake.load("functions")
    original = functions.rotate
    patcher.set({"rope": True})
    late = fake.load("late")
    assert late.rotate is functions.rotate is not original
    patcher.set({"rope": False})
    assert late.rotate is functions.rotate is original


def test_a_users_own_override_of_an_imported_name_survives(fake):
    patcher = fake.patcher()
    user = fake.load("user")
    mine = lambda *args: "mine"  # noqa: E731
    user.alias = mine
    patcher.set({"rope": True})
    patcher.set({"rope": False})
    assert user.alias is mine


def test_an_exception_inside_a_scope_leaves_nothing_behind(fake):
    before = snapshot(fake)
    patcher = fake.patcher()
    norms = fake.load("norms")
    inside = []

    def block():
        with patcher.scope({"rms_norm": True}, exact=True):
            inside.append(norms.Own().forward(1)[0])
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        block()
    assert inside == ["patched"]
    assert same(before, snapshot(fake))


def test_a_scope_can_be_entered_again_and_decorate_a_function(fake):
    norms = fake.load("norms")
    patcher = fake.patcher()
    scope = patcher.scope({"rms_norm": True}, exact=True)
    for _ in range(2):
        with scope, scope:
            assert norms.Own().forward(1)[0] == "patched"
        assert norms.Own().forward(1)[0] == "original"
    assert scope(lambda: norms.Own().forward(1)[0])() == "patched"


def test_a_target_that_needs_an_option_is_off_without_it_and_says_so(fake, monkeypatch):
    option = registry.Option("separate", False, "for the test")
    monkeypatch.setitem(registry.__dict__, "OPS", (dataclasses.replace(registry.OPS[0], options=(option,)),))
    fake.extra = [fake.target("rms_norm", "norms", "Base.forward", fakes.patched, only_if="separate")]
    norms = fake.load("norms")
    patcher = fake.patcher()
    patcher.set({"rms_norm": True})
    row = rows(patcher)["Base.forward"]
    assert (row.state, row.reason) == ("off", "needs the option separate: rms_norm:separate=1")
    assert norms.Base().forward(1)[0] == "original"
    patcher.configure("rms_norm", {"separate": True})
    assert norms.Base().forward(1)[0] == "patched"
    patcher.configure("rms_norm", {"separate": False})
    assert norms.Base().forward(1)[0] == "original"


@pytest.mark.parametrize("seed", range(8))
def test_scopes_close_in_any_order(fake, seed):
    before = snapshot(fake)
    patcher, shuffled = fake.patcher(), random.Random(seed)
    ops = ("rms_norm", "rope", "attention")
    scopes = [patcher.scope({shuffled.choice(ops): shuffled.random() < 0.7}, shuffled.random() < 0.5) for _ in range(5)]
    for scope in scopes:
        scope.__enter__()
    shuffled.shuffle(scopes)
    for scope in scopes:
        scope.__exit__(None, None, None)
    assert same(before, snapshot(fake))


def test_an_inner_scope_wins_and_an_exact_scope_hides_the_table(fake):
    norms, functions = fake.load("norms"), fake.load("functions")
    patcher = fake.patcher()
    patcher.set({"rms_norm": True})
    with patcher.scope({"rope": True}, exact=True):
        assert norms.Own().forward(1)[0] == "original"
        assert functions.rotate(1, 2)[0] == "patched"
        with patcher.scope({"rms_norm": True}, exact=False):
            assert norms.Own().forward(1)[0] == functions.rotate(1, 2)[0] == "patched"
    assert norms.Own().forward(1)[0] == "patched"


def test_eight_threads_opening_scopes_end_clean(fake):
    before = snapshot(fake)
    patcher, errors = fake.patcher(), []

    def work(seed):
        shuffled = random.Random(seed)
        try:
            for _ in range(30):
                with patcher.scope({shuffled.choice(("rms_norm", "rope", "attention")): True}, shuffled.random() < 0.5):
                    fake.load("norms").Own().forward(1)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert same(before, snapshot(fake))


def test_switching_everything_off_inside_a_scope_holds_after_it(fake):
    before = snapshot(fake)
    patcher = fake.patcher()
    with patcher.scope({"rms_norm": True}, exact=True):
        patcher.clear()
        assert same(before, snapshot(fake))
        patcher.set({"rope": True})
        assert fake.load("functions").rotate(1, 2)[0] == "patched"
    assert fake.load("functions").rotate(1, 2)[0] == "patched"


def test_hits_and_fallbacks_are_counted_with_their_reason(fake):
    norms = fake.load("norms")
    patcher = fake.patcher()
    patcher.set({"rms_norm": True})
    norms.Own().forward(1)
    norms.Own().forward(2)
    assert norms.Own().forward(None) == ("original", None, 1)
    row = rows(patcher)["Own.forward"]
    assert (row.state, row.meaning, row.hits, row.fallbacks) == ("active", "fake", 2, {"x is None": 1})


def test_an_unrecognised_class_is_left_alone_and_says_why(fake):
    norms = fake.load("norms")
    patcher = fake.patcher()
    patcher.set({"rms_norm": True})
    row = rows(patcher)["Strange.forward"]
    assert (row.state, row.reason) == ("unrecognised", "computes something else")
    assert norms.Strange().forward(1) == ("strange", 1)


def test_strict_raises_on_a_fallback_and_on_an_unrecognised_target(fake):
    norms = fake.load("norms")
    patcher = fake.patcher()
    patcher.strict = True
    patcher.set({"rms_norm": True})
    assert norms.Own().forward(1) == ("patched", 1, 1)
    with pytest.raises(StrictError, match="x is None"):
        norms.Own().forward(None)
    with pytest.raises(StrictError, match="computes something else"):
        norms.Strange().forward(1)
    patcher.clear()
    assert norms.Strange().forward(1) == ("strange", 1)


def test_a_missing_target_is_reported_and_the_others_are_patched(fake):
    fake.extra = [fake.target("rms_norm", "norms", "Gone.forward", fakes.patched)]
    norms = fake.load("norms")
    patcher = fake.patcher()
    patcher.set({"rms_norm": True, "attention": True})
    assert rows(patcher)["Gone.forward"].state == "missing"
    assert norms.Own().forward(1)[0] == "patched"
    fake.load("functions")
    assert rows(patcher)["REGISTRY[flash]"].state == "missing"
    assert rows(patcher)["REGISTRY[sdpa]"].state == "active"


def test_an_adapter_with_another_signature_is_refused_and_the_others_are_patched(fake, caplog):
    def adapter(original, site):
        return lambda self: None

    fake.extra = [Target("rms_norm", fake.name, f"{fake.name}.norms", "Base.forward", adapter)]
    norms = fake.load("norms")
    patcher = fake.patcher()
    patcher.set({"rms_norm": True})
    assert "cannot replace" in rows(patcher)["Base.forward"].reason
    assert norms.Base().forward(1)[0] == "original"
    assert norms.Own().forward(1)[0] == "patched"


def test_a_finder_that_fails_does_not_fail_the_users_import(fake, caplog):
    def broken(module):
        raise RuntimeError("broken finder")

    fake.adapters.find_norms = broken
    patcher = fake.patcher()
    patcher.set({"rms_norm": True, "rope": True})
    with caplog.at_level(logging.ERROR, "npu_patch"):
        norms = fake.load("norms")
    assert "could not be examined" in caplog.text
    assert norms.Own().forward(1)[0] == "original"
    assert norms.Own.apply(1, 2)[0] == "patched"


def test_without_an_npu_everything_stays_the_original_with_one_warning(fake, caplog):
    before = snapshot(fake)
    asked = []

    def unavailable():
        asked.append(1)
        return Unavailable("torch_npu is not installed", final=True)

    patcher = fake.patcher(unavailable=unavailable)
    with caplog.at_level(logging.WARNING, "npu_patch"):
        patcher.set({"rms_norm": True})
        patcher.set({"rope": True})
    assert same(before, snapshot(fake))
    assert len(asked) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "npu_patch: nothing is patched: torch_npu is not installed (see npu-patch doctor)"
    ]
    status = patcher.status()
    assert {row.state for row in status} == {"waiting"}
    assert status.notes == ("nothing is patched: torch_npu is not installed",)


def test_nobody_asks_for_an_npu_while_nothing_is_on(fake):
    def unavailable():
        raise AssertionError("asked")

    patcher = fake.patcher(unavailable=unavailable)
    snapshot(fake)
    patcher.set({"rms_norm": False})
    assert len(patcher.status()) == 0


def test_a_half_imported_module_is_patched_later(fake, monkeypatch):
    hooks = types.ModuleType("npu_patch_test_hooks")
    patcher = fake.patcher()
    hooks.during_import = lambda: patcher.set({"rms_norm": True})
    monkeypatch.setitem(sys.modules, "npu_patch_test_hooks", hooks)
    module = fake.load("circular")
    assert rows(patcher)["Own.forward"].state == "active"
    assert module.Own().forward(1) == ("patched", 1, 1)


def test_a_wrapper_on_top_is_kept_and_ours_below_it_goes_quiet(fake):
    norms = fake.load("norms")
    patcher = fake.patcher()
    original = vars(norms.Own)["forward"]
    patcher.set({"rms_norm": True})
    ours = norms.Own.forward

    @functools.wraps(ours)
    def foreign(self, x, factor=1):
        return ("foreign", *ours(self, x, factor))

    norms.Own.forward = foreign
    assert rows(patcher)["Own.forward"].state == "overridden"
    assert norms.Own().forward(1) == ("foreign", "patched", 1, 1)
    patcher.set({"rms_norm": False})
    assert norms.Own.forward is foreign
    assert norms.Own().forward(1) == ("foreign", "original", 1, 1)
    patcher.set({"rms_norm": True})
    assert norms.Own().forward(1) == ("foreign", "patched", 1, 1)
    norms.Own.forward = ours
    patcher.clear()
    assert vars(norms.Own)["forward"] is original


def test_a_replacement_by_somebody_else_is_reported_and_survives(fake):
    norms = fake.load("norms")
    patcher = fake.patcher()
    patcher.set({"rms_norm": True})
    foreign = lambda self, x: "foreign"  # noqa: E731
    norms.Own.forward = foreign
    row = rows(patcher)["Own.forward"]
    assert row.state == "overridden"
    assert "replaced by" in row.reason
    patcher.clear()
    assert norms.Own.forward is foreign


def test_a_bound_method_taken_while_patched_runs_the_original_after_off(fake):
    norms = fake.load("norms")
    patcher = fake.patcher()
    patcher.set({"rms_norm": True})
    bound = norms.Own().forward
    assert bound(1)[0] == "patched"
    patcher.clear()
    assert bound(1) == ("original", 1, 1)


def test_on_twice_is_on_once(fake):
    norms = fake.load("norms")
    patcher = fake.patcher()
    original = vars(norms.Own)["forward"]
    patcher.set({"rms_norm": True})
    first = norms.Own.forward
    patcher.set({"rms_norm": True})
    patcher.sync()
    assert norms.Own.forward is first
    assert first.__wrapped__ is original


def test_status_of_a_model_names_instances_with_a_forward_of_their_own(fake):
    import torch

    norms = fake.load("norms")
    norms.Own = type("Own", (torch.nn.Module,), {"forward": norms.Own.forward, "apply": norms.Own.__dict__["apply"]})
    patcher = fake.patcher()
    patcher.set({"rms_norm": True})
    model = torch.nn.Sequential(norms.Own(), norms.Own())
    model[1].forward = lambda x, factor=1: x
    own = [row for row in patcher.status(model) if "forward of its own" in row.reason]
    assert [(row.state, row.reason.split()[0]) for row in own] == [("overridden", "1")]


def test_compiled_code_is_forgotten_after_every_change(fake):
    import torch

    norms = fake.load("norms")
    patcher = fake.patcher()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norms.Own()

        def forward(self, x):
            return x + (1 if self.norm.forward(2)[0] == "patched" else 0)

    model = torch.compile(Model(), backend="eager", fullgraph=True)
    x = torch.zeros(1)
    seen = [model(x).item()]
    with patcher.scope({"rms_norm": True}, exact=True):
        seen.append(model(x).item())
    seen.append(model(x).item())
    assert seen == [0, 1, 0]
    assert rows(patcher)["Own.forward"].hits == 0


def test_a_users_function_that_took_our_place_is_not_overwritten_when_the_op_comes_on_again(fake):
    norms = fake.load("norms")
    patcher = fake.patcher()
    patcher.set({"rms_norm": True})

    def mine(self, hidden_states, scale=1):
        return ("mine", hidden_states, scale)

    norms.Own.forward = mine
    finder = fake.find_norms

    def judging(module):  # a finder that runs what it finds, as the real ones do
        return [t for t in finder(module) if getattr(getattr(module, t.path[:-8], None), "forward", None) is not mine]

    fake.adapters.find_norms = judging
    with patcher.scope({"rope": True}, exact=True):
        pass
    assert norms.Own().forward(1) == ("mine", 1, 1)
    patcher.clear()
    patcher.set({"rms_norm": True})
    assert norms.Own().forward(1) == ("mine", 1, 1)
    assert norms.Norm().forward(1) == ("patched", 1, 1)
    del norms.Own.forward


@pytest.mark.parametrize("where", ["put", "rebind"])
def test_an_interrupt_while_a_scope_opens_leaves_nothing_behind(fake, monkeypatch, where):
    before = snapshot(fake)
    patcher = fake.patcher()

    def interrupted(*args):
        monkeypatch.undo()
        raise KeyboardInterrupt

    if where == "rebind":
        monkeypatch.setattr(functions.Rebinding, "run", interrupted)
    else:
        monkeypatch.setattr(installing.Slot, "put", interrupted)
    scope = patcher.scope({"rope": True}, exact=True)
    with pytest.raises(KeyboardInterrupt):
        scope.__enter__()
    assert same(before, snapshot(fake))
    with patcher.scope({"rope": True}, exact=True):
        assert fake.load("functions").rotate(1, 2)[0] == "patched"
    assert same(before, snapshot(fake))


def test_a_module_table_with_odd_entries_does_not_matter(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, 123, types.ModuleType("odd"))
    before = snapshot(fake)
    patcher = fake.patcher()
    with patcher.scope({"rope": True}, exact=True):
        assert fake.load("user").alias(1, 2)[0] == "patched"
    assert same(before, snapshot(fake))


def test_a_temporary_patch_that_outlives_a_scope_breaks_nothing(fake):
    norms = fake.load("norms")
    original = vars(norms.Own)["forward"]
    patcher = fake.patcher()
    with patcher.scope({"rms_norm": True}, exact=True):
        temporary = mock.patch.object(norms.Own, "forward", return_value="temporary")
        temporary.start()
    temporary.stop()  # puts our replacement back, which is off by now
    assert norms.Own().forward(1) == ("original", 1, 1)
    patcher.sync()
    assert vars(norms.Own)["forward"] is original
    patcher.set({"rms_norm": True})
    assert norms.Own().forward(1) == ("patched", 1, 1)
    patcher.clear()
    assert vars(norms.Own)["forward"] is original


def test_what_was_taken_while_patched_follows_every_change(fake):
    functions_module, norms = fake.load("functions"), fake.load("norms")
    patcher = fake.patcher()
    patcher.set({"rope": True, "rms_norm": True})
    taken, bound = functions_module.rotate, norms.Own().forward
    for op_on in (False, True, False, True):
        patcher.set({"rope": op_on, "rms_norm": op_on})
        assert taken(1, 2)[0] == bound(1)[0] == ("patched" if op_on else "original")
    assert functions_module.rotate is taken


def test_a_module_that_is_imported_anew_is_patched_at_the_next_change(fake):
    old = fake.load("norms")
    original = vars(old.Own)["forward"]
    patcher = fake.patcher()
    patcher.set({"rms_norm": True})
    del sys.modules[old.__name__]
    new = fake.load("norms")
    assert new.Own().forward(1)[0] == "original"
    assert rows(patcher)["Own.forward"].state == "overridden"
    patcher.sync()
    assert new.Own().forward(1)[0] == "patched"
    assert vars(old.Own)["forward"] is original


def test_a_library_that_is_a_stand_in_does_no_harm(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, fake.name, mock.MagicMock())

    def modules():
        raise ValueError(f"{fake.name}.__spec__ is None")

    fake.adapters.modules = modules
    patcher = fake.patcher()
    patcher.set({"rms_norm": True})
    assert {row.state for row in patcher.status()} == {"waiting"}
