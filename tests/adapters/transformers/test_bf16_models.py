"""bfloat16: over seeds, a patched model's gradients are no further from float32's than the original's.

One seed says nothing: two stock paths differ by more than the patches do.
"""

from __future__ import annotations

import copy
import functools
import statistics
from typing import Any

import pytest
import torch

import npu_patch

from ...support.numerics import Run, pooled_gradient_error
from . import tiny
from .tiny import FAMILIES, OPS

SEEDS = 16


@functools.cache
def model(family: str) -> Any:
    return tiny.model(family, torch.bfloat16)


def seeded(family: str, seed: int) -> tuple[Any, torch.Tensor]:
    """The model with other weights, and other tokens."""
    built = model(family)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in built.parameters():
            scale = 0.05 if parameter.dim() > 1 else 0.3
            offset = 0.0 if parameter.dim() > 1 or family == "gemma3" else 1.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + offset)
    return built, torch.randint(3, tiny.VOCABULARY, (2, 24), generator=generator).to("npu")


@functools.cache
def unpatched(family: str, seed: int) -> tuple[Run, float]:
    """The step in float32, and how far the original's bfloat16 step is from it."""
    built, ids = seeded(family, seed)
    exact = tiny.step(copy.deepcopy(built).float(), ids)
    return exact, pooled_gradient_error(tiny.step(built, ids), exact)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ops", [(op,) for op in OPS] + [OPS], ids=lambda ops: "+".join(ops))
def test_the_median_gradient_error_is_the_originals(family, ops):
    ratios = []
    for seed in range(SEEDS):
        exact, stock = unpatched(family, seed)
        built, ids = seeded(family, seed)
        with npu_patch.scope(*ops):
            ratios.append(pooled_gradient_error(tiny.step(built, ids), exact) / stock)
    assert statistics.median(ratios) <= 1.05, ratios
