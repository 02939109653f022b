"""Every tiny model in bfloat16: each patched call is replayed, and is no further from float64 than the original.

The formula is the original itself on float64 copies: what it casts to float32 inside is far more exact than bfloat16.
The loss is not among them: it gets float32 numbers in every model.  Experts have tests of their own.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import wrapt

import npu_patch
from npu_patch.report import Row

from ...support import tiny_models
from ...support.numerics import Call, assert_no_worse, recording

OPS = ("rms_norm", "rope", "attention", "swiglu")


def place(target: str) -> tuple[Any, str, dict[str, Any]]:
    """(owner, name, how to read and write it) of a row's target."""
    module, _, path = target.partition(":")
    if path.endswith("]"):
        registry, _, key = path[:-1].partition("[")
        mapping = type(getattr(sys.modules[module], registry))._global_mapping
        return mapping, key, {"read": operator.getitem, "write": operator.setitem}
    parent, name, _ = wrapt.resolve_path(sys.modules[module], path)
    return parent, name, {}


def reached(step: Callable[[], None]) -> list[Row]:
    """The targets whose fused operator a step runs."""
    with npu_patch.scope(*OPS):
        before = {row.target: row.hits for row in npu_patch.status()}
        step()
        return [row for row in npu_patch.status() if row.hits > before.get(row.target, 0)]


def judge(row: Row, calls: list[Call]) -> None:
    owner, name, access = place(row.target)
    read = access.get("read", getattr)
    original = read(owner, name)
    result = operator.itemgetter(0) if row.op == "attention" else lambda x: x  # nobody takes the second: weights
    if row.op == "attention":
        for call in calls:
            call.gradients = {0: call.gradients[0]}

    def fused(*args: Any, **kwargs: Any) -> Any:
        with npu_patch.scope(*OPS):  # an original may call other targets, which must be originals then
            return result(read(owner, name)(*args, **kwargs))

    def stock(*args: Any, **kwargs: Any) -> Any:
        return result(original(*args, **kwargs))

    before = npu_patch.status()
    assert_no_worse(fused, stock, stock, calls)
    after = npu_patch.status()
    assert after.hits(row.op) - before.hits(row.op) >= len(calls)
    assert after.fallbacks(row.op) == before.fallbacks(row.op)


def judge_each(model: Any, given: dict[str, Any], left_out: tuple[str, ...] = ()) -> set[str]:
    """Judges the calls of one training step, of all ops but those left out; returns the ops that were reached."""

    def step() -> None:
        model(**given, labels=given["input_ids"], use_cache=False).loss.backward()

    rows = reached(step)
    with contextlib.ExitStack() as stack:
        calls = []
        for row in rows:
            owner, key, access = place(row.target)
            calls.append(stack.enter_context(recording(owner, key, **access)))
        step()
    for row, recorded in zip(rows, calls, strict=True):
        if row.op not in left_out:
            judge(row, recorded)
    return {row.op for row in rows}


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_each_call_is_no_worse_than_the_originals(name):
    """Spread weights give gpt_oss's keys a large mean; test_attention_eager.py knows what that does to queries."""
    model, given = tiny_models.build(name, torch.bfloat16), tiny_models.inputs(name, length=40)
    expected = {op for op in OPS if getattr(tiny_models.calls(name), op) and (name, op) != ("gemma2", "attention")}
    if tiny_models.FIFTH and tiny_models.calls(name).gates:
        expected.add("swiglu")  # of the experts
    assert judge_each(model, given, ("attention",) if name == "gpt_oss" else ()) == expected


@pytest.mark.parametrize("seed", range(3))
def test_gpt_oss_with_the_weights_that_transformers_draws(seed):
    model = tiny_models.build("gpt_oss", torch.bfloat16, seed, spread=False)
    assert "attention" in judge_each(model, tiny_models.inputs("gpt_oss", length=40))
