"""bfloat16: over seeds, a patched model's gradients are no further from float32's than the original's.

One seed says nothing: two stock paths differ by more than the patches do.
"""

from __future__ import annotations

import copy
import statistics

import pytest
import torch

import npu_patch

from ...support.numerics import pooled_gradient_error
from . import tiny
from .tiny import FAMILIES, OPS

SEEDS = 16


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ops", [(op,) for op in OPS] + [OPS], ids=lambda ops: "+".join(ops))
def test_the_median_gradient_error_is_the_originals(family, ops):
    built = tiny.model(family, torch.bfloat16)
    ratios = []
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in built.parameters():
                scale = 0.05 if parameter.dim() > 1 else 0.3
                offset = 0.0 if parameter.dim() > 1 or family == "gemma3" else 1.0
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + offset)
        ids = torch.randint(3, tiny.VOCABULARY, (2, 24), generator=generator).to("npu")
        exact = tiny.step(copy.deepcopy(built).float(), ids)
        stock = tiny.step(built, ids)
        with npu_patch.scope(*ops):
            patched = tiny.step(built, ids)
        ratios.append(pooled_gradient_error(patched, exact) / pooled_gradient_error(stock, exact))
    assert statistics.median(ratios) <= 1.05, ratios
