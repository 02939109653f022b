"""Mixtures of experts of transformers: fewer launches and bytes in training, and in each token that is generated."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import npu_patch
from npu_patch.simulator import trace
from tests.benchmarks import counts, models

pytest.importorskip("transformers.integrations.moe")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("counts")]
# (launches, bytes read and written): how many times fewer, with every op whose default is on
AT_LEAST = {"qwen3_moe": (3.0, 2.4), "deepseek_v3": (2.2, 1.8), "gpt_oss": (2.25, 3.6)}
measured = functools.cache(lambda name: counts.compare(name, singles=False))


@pytest.mark.parametrize("name", AT_LEAST)
def test_a_training_step_launches_and_moves_less_and_no_expert_waits(name):
    before, after = measured(name)["unpatched"], measured(name)["default"]
    launches, moved = AT_LEAST[name]
    assert before.ratio(after, "launches") >= launches
    assert before.ratio(after, "moved") >= moved
    assert before.syncs > 10  # one for each product, in both directions
    assert after.syncs <= 1  # transformers itself asks whether a batch is packed
    assert after.saved < before.saved
    assert after.peak < before.peak
    assert after.loss == pytest.approx(before.loss, rel=2e-3)


def generated(model: Any, ids: torch.Tensor) -> tuple[float, int]:
    """Launches of a token that `generate` adds, from the difference of two lengths, and host syncs of it."""
    seen = []
    for tokens in (4, 12):
        with trace() as t:
            model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        seen.append((t.launches, t.host_syncs))
    (first, first_syncs), (second, second_syncs) = seen
    return (second - first) / 8, second_syncs - first_syncs


def test_a_generated_token_takes_half_of_the_launches():
    model = models.subject("qwen3_moe").model.eval()
    ids = torch.randint(3, 2000, (1, 20), generator=torch.Generator().manual_seed(0)).npu()
    stock, stock_syncs = generated(model, ids)
    with npu_patch.scope(*counts.DEFAULT):
        before = {op: npu_patch.status().hits(op) for op in ("gmm", "permute", "swiglu")}
        patched, syncs = generated(model, ids)
        assert all(npu_patch.status().hits(op) > hits for op, hits in before.items())
    assert patched <= stock / 2
    assert syncs <= stock_syncs
