"""Clones carry the original's face, and a bypassed clone runs the original."""

from __future__ import annotations

import inspect
import pickle
import sys
import types

import pytest

from npu_patch import functions


def original(query, key, cos=None, *, unsqueeze_dim=1, **kwargs):
    """The original's docstring."""
    return ("original", query, key, cos, unsqueeze_dim, kwargs)


def build(original):
    def replacement(q, k, c, *, unsqueeze_dim=1, **kwargs):
        query = "a local with the name of a parameter"
        return (query, original(q, k, c, unsqueeze_dim=unsqueeze_dim, **kwargs))

    return replacement


def test_parameters_take_the_originals_names_and_defaults():
    fresh = functions.clone(build(original), original)
    assert inspect.signature(fresh) == inspect.signature(original)
    assert fresh.__doc__ == original.__doc__
    assert fresh(query=1, key=2, unsqueeze_dim=3, more=4)[1] == ("original", 1, 2, None, 3, {"more": 4})
    assert fresh(1, 2, 3)[0] == "a local with the name of a parameter"
    assert pickle.loads(pickle.dumps(original)) is original


def test_compile_markers_of_the_original_are_not_copied():
    def marked(query, key, cos=None, *, unsqueeze_dim=1, **kwargs):
        return None

    marked._torchdynamo_disable = True
    assert not hasattr(functions.clone(build(marked), marked), "_torchdynamo_disable")


@pytest.mark.parametrize(
    "replacement",
    [
        lambda q, k: None,
        lambda q, k, c, d, *, unsqueeze_dim=1, **kwargs: None,
        lambda q, k, c, *, dim=1, **kwargs: None,
        lambda q, k, c, *, unsqueeze_dim=1: None,
        print,
    ],
    ids=["fewer", "more", "other keyword", "no **kwargs", "builtin"],
)
def test_another_signature_is_refused(replacement):
    with pytest.raises(functions.SignatureError):
        functions.clone(replacement, original)


def test_a_bypassed_clone_runs_the_original_until_it_is_switched_on_again():
    fresh = functions.clone(build(original), original)
    code = fresh.__code__
    functions.bypass(fresh)
    assert fresh(1, 2, unsqueeze_dim=5) == ("original", 1, 2, None, 5, {})
    fresh.__code__ = code
    assert fresh(1, 2)[0].startswith("a local")


def test_a_function_without_its_original_cannot_be_bypassed():
    with pytest.raises(functions.SignatureError, match="does not hold its original"):
        functions.bypass(lambda: None)


def test_many_names_are_rebound_in_one_pass_each_below_its_own_packages(monkeypatch):
    one, other, new = (lambda: 1), (lambda: 2), (lambda: 3)
    near, far = types.ModuleType("near.module"), types.ModuleType("far.module")
    for module in (near, far):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        module.one, module.other = one, other
    batch = functions.Rebinding()
    batch.add(one, new, ("near",))
    batch.add(other, new, ("near", "far"))
    assert near.one is one  # nothing before the pass
    assert sorted(batch.run()) == ["far.module.other", "near.module.one", "near.module.other"]
    assert (near.one, near.other, far.one, far.other) == (new, new, one, new)
    assert batch.run() == []
