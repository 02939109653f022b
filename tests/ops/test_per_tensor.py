from __future__ import annotations

import pytest
import torch

from npu_patch.ops.per_tensor import Derived, PerTensor

from .tools import random


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the device says that it captures a graph: `capture[0] = True`."""
    state = [False]
    monkeypatch.setattr(torch.npu, "is_current_stream_capturing", lambda: state[0])
    return state


def test_a_graph_that_is_captured_computes_derived_values_itself(capture: list[bool]) -> None:
    double, x = Derived(lambda x: x * 2.0), random(3, grad=False)
    before = double(x)
    assert double(x) is before
    capture[0] = True
    inside = double(x)
    assert inside is not before
    assert double.get(x) is None
    assert double.find(x) is None
    torch.testing.assert_close(inside, before)
    capture[0] = False
    assert double(x) is before  # made before, and not the graph's


def test_what_was_put_while_capturing_is_found_there(capture: list[bool]) -> None:
    facts: PerTensor[str] = PerTensor(anew=True)
    old, new = random(3, grad=False), random(4, grad=False)
    facts.put(old, "old")
    capture[0] = True
    facts.put(new, "new")
    assert (facts.get(old), facts.get(new)) == (None, "new")


def test_facts_of_other_kinds_are_found_while_capturing(capture: list[bool]) -> None:
    facts: PerTensor[str] = PerTensor()
    x = random(3, grad=False)
    facts.put(x, "x")
    capture[0] = True
    assert facts.get(x) == "x"


def test_other_data_are_another_tensor() -> None:
    double, x = Derived(lambda x: x * 2.0), random(3, grad=False)
    double(x)
    x.data = other = random(3, seed=5, grad=False)
    torch.testing.assert_close(double(x), other * 2.0)
