"""Answers remembered by facts, and things remembered per tensor."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from npu_patch.ops import attention, rms_norm, rope, verdicts
from npu_patch.ops.per_tensor import Derived, PerTensor
from npu_patch.ops.verdicts import Verdicts

from .tools import compiled, random


@pytest.fixture(autouse=True)
def device() -> torch.Tensor:
    """The chip is known from the first tensor on."""
    return torch.ones(1, device="npu")


def counted() -> tuple[Verdicts[int], list[int]]:
    asked: list[int] = []

    def judge(x: int) -> int:
        asked.append(x)
        return -x

    return Verdicts(judge), asked


class TestVerdicts:
    def test_facts_are_judged_once(self) -> None:
        answers, asked = counted()
        assert [answers[x,] for x in (1, 2, 1, 1)] == [-1, -2, -1, -1]
        assert asked == [1, 2]

    def test_nothing_is_remembered_before_the_chip_is_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answers, asked = counted()
        monkeypatch.setattr(verdicts, "soc_name", lambda: "")
        assert (answers[1,], answers[1,]) == (-1, -1)
        assert asked == [1, 1]
        assert not answers

    def test_lengths_that_never_come_again_do_not_pile_up(self) -> None:
        answers, _ = counted()
        for x in range(3 * verdicts.MOST):
            assert answers[x,] == -x
        assert len(answers) <= verdicts.MOST

    def test_threads_get_the_answers_of_their_facts(self) -> None:
        answers, wrong = counted()[0], []

        def work(first: int) -> None:
            wrong.extend(x for x in range(first, first + 5000) if answers[x % 6000,] != -(x % 6000))

        threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_a_change_of_a_tensor_in_place_changes_the_answer(self) -> None:
        """The facts are read anew in every call: nothing is remembered for an object."""
        x, weight = random(2, 8, grad=False), random(8, grad=False)
        assert rms_norm.unsupported(x, weight) is None
        x.resize_(2, 6)
        assert rms_norm.unsupported(x, weight) == "the weight's size is not the input's last size"
        table = random(1, 1, 2, 8, grad=False)
        q = random(1, 2, 2, 8, grad=False)
        assert rope.unsupported(q, table, table, "half") is None
        table.data = table.double()
        assert rope.unsupported(q, table, table, "half") == "the tables are not in the input's type"
        q.data = q.cpu()
        assert attention.unsupported(q, q, q, attention.Mask.full(), layout="BNSD") == "not on an NPU"

    def test_nothing_is_remembered_while_compiling(self) -> None:
        for op in (rms_norm, rope, attention):
            op._verdicts.clear()
        q, table, weight = random(1, 2, 4, 8), random(1, 1, 4, 8, grad=False), random(8)

        def f(q: torch.Tensor) -> torch.Tensor:
            assert rms_norm.unsupported(q, weight) is None
            assert rope.unsupported(q, table, table, "half") is None
            assert attention.unsupported(q, q, q, attention.Mask.causal(), layout="BNSD") is None
            return q * 2.0

        compiled(f)[0](q)
        assert [len(op._verdicts) for op in (rms_norm, rope, attention)] == [0, 0, 0]


class TestPerTensor:
    def test_another_object_over_the_same_memory_is_found_as_long_as_the_first_is_unchanged(self) -> None:
        known: PerTensor[str] = PerTensor()
        tensor = torch.ones(3, 4, device="npu")
        known.put(tensor, "value")
        assert known.get(tensor) == "value"
        assert known.get(tensor.view(3, 4)) is None
        assert known.find(tensor.view(3, 4)) == "value"
        assert known.find(tensor.view(4, 3)) is None
        tensor.add_(1.0)
        assert known.find(tensor) is known.find(tensor.view(3, 4)) is known.get(tensor) is None
        known.put(tensor, "again")
        tensor.data = tensor + 1.0
        assert known.get(tensor) is None

    def test_nothing_outlives_its_tensor_and_subclasses_and_inference_tensors_have_no_entry(self) -> None:
        known: PerTensor[str] = PerTensor()
        known.put(torch.ones(3, device="npu").as_subclass(Subclass), "value")
        with torch.inference_mode():
            tensor = torch.ones(3, device="npu")
        known.put(tensor, "value")
        assert known.find(tensor) is None
        tensor = torch.ones(3, device="npu")
        known.put(tensor, "value")
        assert len(known) == 1
        del tensor
        gc.collect()
        assert len(known) == 0

    def test_what_needs_a_gradient_is_made_every_time_and_has_one(self) -> None:
        double = Derived(lambda x: x * 2.0)
        tensor = torch.ones(3, device="npu")
        assert double(tensor) is double(tensor)
        tensor.requires_grad_()
        assert double(tensor).requires_grad
        assert double(tensor) is not double(tensor)

    def test_under_a_function_transform_nothing_is_remembered(self) -> None:
        double = Derived(lambda x: x * 2.0)
        torch.vmap(double)(torch.ones(3, 2, device="npu"))
        assert len(double) == 0

    def test_what_is_made_in_inference_mode_serves_training(self) -> None:
        double = Derived(lambda x: x * 2.0)
        tensor = torch.ones(3, device="npu")
        with torch.inference_mode():
            made = double(tensor)
        assert not made.is_inference()
        assert double(tensor) is made


class Subclass(torch.Tensor):
    pass
