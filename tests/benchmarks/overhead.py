"""How much of a patched call is npu_patch's own Python, in shares of a small norm."""

from __future__ import annotations

import importlib
import timeit
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from npu_patch.ops import rope as rope_ops

ALLOWED = 0.4

Call = Callable[[], Any]

STAND_INS: dict[str, Callable[[Any], Any]] = {
    "npu_rms_norm": lambda x: (x, None),
    "npu_rotary_mul": lambda x: x,
    "npu_fusion_attention": lambda x: (x, None, None),
    "npu_swiglu": lambda x: x,
}


def best(calls: list[Call], rounds: int = 400, number: int = 10) -> list[float]:
    """Seconds of each call: the best of many short rounds, in which the calls take turns.

    The best is what the code costs, and not what else the machine was doing.
    """
    times = [[timeit.timeit(call, number=number) for call in calls] for _ in range(rounds)]
    return [min(column) / number for column in zip(*times, strict=True)]


def share_of_a_small_norm(patched: Call, bare: Call, attempts: int = 40) -> float:
    """(patched - bare) / yardstick.

    Each of the three is the best of all attempts, which end when the share is small enough: other processes make each
    of them longer and none shorter.  So that an unlucky yardstick or bare call does not decide, at least eight
    attempts are made.
    """
    x, weight = torch.randn(1, 64), torch.ones(64)

    def yardstick() -> Any:
        return torch.nn.functional.rms_norm(x, (64,), weight)

    least = [float("inf")] * 3
    share = float("inf")
    for attempt in range(attempts):
        least = [min(pair) for pair in zip(least, best([yardstick, patched, bare]), strict=True)]
        norm, ours, plain = least
        share = (ours - plain) / norm
        if attempt >= 7 and share <= ALLOWED:
            break
    return share


class Operators(TorchDispatchMode):
    """Stand-ins for the operators that do nothing, and what a call asks of them and of tensors."""

    seen: list[tuple[Any, ...]] | None = None

    def add(self, name: str, *arguments: Any) -> None:
        if self.seen is not None:
            self.seen.append((name, *(_plain(x) for x in arguments)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.add(str(func), *args)
        return func(*args, **(kwargs or {}))

    def asked_by(self, call: Call) -> list[tuple[Any, ...]]:
        """What a call asks, in forms that compare."""
        self.seen = []
        with self:
            call()
        seen, self.seen = self.seen, None
        return seen


def _plain(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return [*argument.shape, *argument.stride(), argument.dtype, argument.device]
    if isinstance(argument, dict):
        return sorted((name, _plain(value)) for name, value in argument.items())
    if isinstance(argument, (list, tuple)):
        return [_plain(part) for part in argument]
    return argument


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Operators:
    """The operators, doing nothing."""
    importlib.import_module("torchtitan.models.common")  # imports tables of all operators, which must be real ones
    operators = Operators()

    def stand_in(name: str, result: Callable[[Any], Any]) -> None:
        def operator(x: Any, *args: Any, **keywords: Any) -> Any:
            if operators.seen is not None:
                operators.add(name, x, *args, keywords)
            return result(x)

        monkeypatch.setattr(torch.ops.npu, name, SimpleNamespace(default=operator))

    for name, result in STAND_INS.items():
        stand_in(name, result)
    return operators


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, operators: Operators) -> SimpleNamespace:
    """The autograd node of a rotation, doing nothing: making one costs more than the yardstick and asks nothing."""

    def apply(x: Any, *args: Any) -> Any:
        if operators.seen is not None:
            operators.add("node", x, *args)
        return x

    node = SimpleNamespace(apply=apply)
    monkeypatch.setattr(rope_ops, "Rotate", node)
    return node


@pytest.fixture
def judge(benchmark: Any, operators: Operators) -> Callable[[Call, Call], None]:
    """Holds a patched call against a bare one, which must ask the same of operators and tensors."""

    def judge(patched: Call, bare: Call) -> None:
        patched()  # what is made once
        asked = operators.asked_by(patched)
        assert operators.asked_by(bare) == asked
        assert {name for name, *_ in asked} & {"node", *STAND_INS}
        share = share_of_a_small_norm(patched, bare)
        benchmark.extra_info["share of a small norm"] = round(share, 3)
        benchmark.pedantic(patched, rounds=20, iterations=100)
        assert share <= ALLOWED

    return judge
