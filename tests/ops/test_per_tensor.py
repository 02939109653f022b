from __future__ import annotations

import pytest
import torch

from npu_patch.ops.masks import Mask
from npu_patch.ops.per_tensor import Derived, DerivedPair, PerTensor

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


def test_an_entry_is_of_one_tensor_object() -> None:
    """Should the id of a dead tensor be given away before its entry is gone, the entry is not the new tensor's."""
    facts: PerTensor[str] = PerTensor()
    double, pair = Derived(lambda x: x * 2.0), sums()
    x, y, other = random(3, grad=False), random(3, seed=1, grad=False), random(3, seed=2, grad=False)
    facts.put(x, "x")
    double(x), pair(y, x)
    for memory in (facts, double, pair):
        memory._entries[id(other)] = memory._entries[id(x)]  # type: ignore[attr-defined]
    assert facts.get(other) is None
    torch.testing.assert_close(double(other), other * 2.0)
    torch.testing.assert_close(pair(y, other), y + other)


def test_another_object_over_the_same_memory_finds_what_is_known() -> None:
    facts: PerTensor[str] = PerTensor()
    x, other = random(3, grad=False), random(3, seed=1, grad=False)
    assert facts.find(x) is None
    facts.put(other, "other")
    facts.put(x, "x")
    assert facts.find(x) == "x"
    assert facts.find(x.detach()) == "x"
    assert facts.find(x[:2]) is None
    assert facts.find(x._neg_view()) is None
    x.mul_(2.0)
    assert facts.find(x) is None
    assert facts.find(x.detach()) is None
    with torch.inference_mode():
        assert facts.find(torch.ones(3, device=x.device)) is None


def test_find_takes_no_other_entry_under_the_id_of_a_tensor() -> None:
    facts: PerTensor[str] = PerTensor()
    x, y = random(3, grad=False), random(3, seed=1, grad=False)
    facts.put(x, "x")
    facts._entries[id(y)] = facts._entries[id(x)]
    assert facts.find(y) is None
    assert facts.find(x.detach()) == "x"


def test_nothing_is_remembered_for_subclasses_and_in_inference_mode() -> None:
    facts: PerTensor[str] = PerTensor()
    double = Derived(lambda x: x * 2.0)
    parameter = torch.nn.Parameter(random(3), requires_grad=False)
    facts.put(parameter, "parameter")
    double(parameter)
    with torch.inference_mode():
        x = torch.ones(3, device=parameter.device)
        facts.put(x, "x")
        torch.testing.assert_close(double(x), x * 2.0)
    assert (len(facts), len(double)) == (0, 0)


def test_what_is_derived_of_a_tensor_in_inference_mode_serves_outside() -> None:
    double, x = Derived(lambda x: x * 2.0), random(3, grad=False)
    with torch.inference_mode():
        value = double(x)
    assert double(x) is value
    assert not value.is_inference()


def test_tensors_on_the_host_belong_to_no_graph(capture: list[bool]) -> None:
    facts: PerTensor[str] = PerTensor(anew=True)
    x = torch.ones(3)
    facts.put(x, "x")
    capture[0] = True
    assert facts.get(x) == "x"


def test_without_graphs_everything_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.npu, "is_current_stream_capturing")
    double, pair, x = Derived(lambda x: x * 2.0), sums(), random(3, grad=False)
    assert double(x) is double(x)
    assert double.get(x) is double(x)
    assert pair(x, x) is pair(x, x)


def test_a_value_that_holds_a_tensor_is_kept_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random(2, 2, grad=False) > 0
    dense = Derived(Mask.dense, lambda mask: mask.hidden)
    assert dense(x) is dense(x)
    dense = Derived(Mask.dense, lambda mask: None)
    assert dense(x) is not dense(x)


# ---- of two tensors --------------------------------------------------------------------------------------------------


def sums() -> DerivedPair[torch.Tensor]:
    return DerivedPair(torch.add, lambda value: (value,))


@pytest.fixture
def two() -> tuple[torch.Tensor, torch.Tensor]:
    return random(3, grad=False), random(3, seed=1, grad=False)


def test_a_pair_is_made_once(two: tuple[torch.Tensor, torch.Tensor]) -> None:
    pair = sums()
    assert pair.kept(*two) is None
    value = pair(*two)
    assert pair(*two) is value
    assert pair.kept(*two) is value
    assert not value.requires_grad


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("how", ["in place", "other data", "another tensor"])
def test_a_pair_is_made_again_for_another_content(two: tuple[torch.Tensor, torch.Tensor], which: int, how: str) -> None:
    pair, tensors = sums(), list(two)
    pair(*tensors)
    if how == "in place":
        tensors[which].mul_(2.0)
    elif how == "other data":
        tensors[which].data = random(3, seed=5, grad=False)
    else:
        tensors[which] = random(3, seed=5, grad=False)
    assert pair.kept(*tensors) is None
    torch.testing.assert_close(pair(*tensors), tensors[0] + tensors[1])


@pytest.mark.parametrize("which", [0, 1])
def test_a_pair_with_a_gradient_is_made_every_time(two: tuple[torch.Tensor, torch.Tensor], which: int) -> None:
    pair = sums()
    pair(*two)
    two[which].requires_grad_()
    assert pair(*two).requires_grad


@pytest.mark.parametrize("which", [0, 1])
def test_a_pair_with_a_subclass_or_an_inference_tensor_is_made_every_time(
    two: tuple[torch.Tensor, torch.Tensor], which: int
) -> None:
    pair, tensors = sums(), list(two)
    tensors[which] = torch.nn.Parameter(two[which], requires_grad=False)
    assert pair(*tensors) is not pair(*tensors)
    with torch.inference_mode():
        tensors[which] = two[which].clone()
        assert pair(*tensors) is not pair(*tensors)
    assert len(pair) == 0


def test_a_pair_is_not_kept_while_a_graph_is_captured(
    capture: list[bool], two: tuple[torch.Tensor, torch.Tensor]
) -> None:
    pair = sums()
    before = pair(*two)
    capture[0] = True
    assert pair.kept(*two) is None
    assert pair(*two) is not pair(*two)
    capture[0] = False
    assert pair(*two) is before


def test_a_pair_is_gone_with_its_tensors(two: tuple[torch.Tensor, torch.Tensor]) -> None:
    pair = sums()
    pair(two[0], two[1].clone())
    assert len(pair) == 0
