"""bfloat16: over seeds, a patched model's gradients are no further from float32's than the original's.

One seed says nothing: two stock paths differ by more than the patches do.
"""

from __future__ import annotations

import functools
import statistics

import pytest
import torch

import npu_patch
from tests.support.numerics import Run, pooled_gradient_error, training_step

from .generation import current
from .models import OPS, build, loss_of, packed_positions, uncompiled

pytestmark = current

SEEDS = 16
LENGTH = 24
model = functools.cache(build)


def seeded(family: str, seed: int) -> tuple[torch.nn.Module, torch.nn.Module, torch.Tensor]:
    """The model in bfloat16 and in float32 with the same new weights, and positions of packed documents."""
    low, exact = (model(family, dtype, length=LENGTH) for dtype in (torch.bfloat16, torch.float32))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in low.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.05 * noise)
        for own, other in zip(exact.parameters(), low.parameters(), strict=True):
            own.copy_(other)
    cut = int(torch.randint(1, LENGTH, (1,), generator=generator))
    return low, exact, packed_positions((LENGTH,), (cut, LENGTH - cut))


@functools.cache
def unpatched(family: str, seed: int) -> tuple[Run, float]:
    """The step in float32, and how far the original's bfloat16 step is from it."""
    low, exact, positions = seeded(family, seed)
    with uncompiled():
        reference = training_step(exact, loss_of(exact, positions))
        return reference, pooled_gradient_error(training_step(low, loss_of(low, positions)), reference)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=pytest.mark.xdist_group(f"seeds of {f}")) for f in ("llama3", "qwen3")]
)
@pytest.mark.parametrize("ops", [(op,) for op in OPS] + [OPS], ids=lambda ops: "+".join(ops))
def test_the_median_gradient_error_is_the_originals(family, ops):
    ratios = []
    for seed in range(SEEDS):
        reference, stock = unpatched(family, seed)
        low, _, positions = seeded(family, seed)
        with npu_patch.scope(*ops), uncompiled():
            ratios.append(pooled_gradient_error(training_step(low, loss_of(low, positions)), reference) / stock)
    assert statistics.median(ratios) <= 1.05, ratios
