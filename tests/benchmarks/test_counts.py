"""Fewer launches, fewer bytes, no more syncs, no more memory: by how much, at least."""

from __future__ import annotations

import functools

import pytest

from tests.benchmarks import counts

# (launches, bytes read and written): how many times fewer
AT_LEAST = {
    "llama": (2.2, 1.85),
    "qwen3": (2.8, 2.25),
    "gemma3": (2.75, 2.75),
    "torchtitan llama3": (2.0, 1.5),
    "torchtitan qwen3": (3.0, 2.5),
}
measured = functools.cache(counts.compare)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("counts")]


@pytest.mark.parametrize("name", AT_LEAST)
def test_a_training_step_launches_and_moves_less(name):
    result = measured(name)
    launches, moved = AT_LEAST[name]
    before, after = result["unpatched"], result["all"]
    assert before.ratio(after, "launches") >= launches
    assert before.ratio(after, "moved") >= moved
    assert after.loss == pytest.approx(before.loss, rel=2e-3)


@pytest.mark.parametrize("name", AT_LEAST)
def test_no_host_sync_is_added(name):
    result = measured(name)
    assert result["all"].syncs <= max(result["unpatched"].syncs, 0)
    if name.startswith("torchtitan"):
        assert result["all"].syncs <= 1


@pytest.mark.parametrize("name", AT_LEAST)
def test_less_is_saved_for_backward_and_the_peak_is_not_higher(name):
    result = measured(name)
    before = result["unpatched"]
    assert result["all"].saved < before.saved
    assert result["rms_norm"].saved < before.saved
    assert result["attention"].saved < before.saved
    assert result["rope"].saved <= before.saved
    assert result["all"].peak <= before.peak
