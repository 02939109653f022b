"""Guards run on every call, so what they cost is measured against one small operator on the CPU."""

from __future__ import annotations

import timeit

import pytest
import torch

from npu_patch.ops import attention, rms_norm, rope
from npu_patch.sites import Site

from .tools import random


def microseconds(call: object) -> float:
    return min(timeit.repeat(call, number=2000, repeat=9)) / 2000 * 1e6


@pytest.fixture
def yardstick() -> float:
    x, weight = torch.randn(1, 64), torch.nn.Parameter(torch.ones(64))
    return microseconds(lambda: torch.nn.functional.rms_norm(x, (64,), weight, 1e-6))


def test_the_norms_guards_and_counting_cost_at_most_four_tenths_of_a_small_norm(yardstick: float) -> None:
    x, weight = random(1, 64), torch.nn.Parameter(random(64))
    site = Site("module:path", "rms_norm", {})

    def call() -> None:
        if rms_norm.unsupported(x, weight) is None:
            site.hit()

    assert microseconds(call) <= 0.4 * yardstick


def test_the_other_guards_cost_at_most_one_small_norm(yardstick: float) -> None:
    x, table = random(2, 4, 6, 8), random(1, 1, 6, 8, grad=False)
    mask = attention.Mask.causal()
    assert microseconds(lambda: rope.unsupported(x, table, table, "half")) <= yardstick
    assert microseconds(lambda: attention.unsupported(x, x, x, mask, layout="BNSD")) <= yardstick
