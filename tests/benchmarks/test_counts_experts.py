"""torchtitan's mixtures of experts: by how much one training step launches and keeps less, at least."""

from __future__ import annotations

import pytest

import npu_patch
from tests.benchmarks import counts, models

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("counts")]

#: Launches with the default ops, by the type of the rotary tables; bytes kept, and bytes moved.
AT_LEAST = {
    "torchtitan deepseek_v3": ({"float32": 2.3, "input": 2.45}, 1.25, 1.4),
    "torchtitan qwen3_moe": ({"float32": 8.0, "input": 8.6}, 1 / 0.7, 1.6),
}


@pytest.mark.parametrize(
    "name", ["torchtitan deepseek_v3", pytest.param("torchtitan qwen3_moe", marks=pytest.mark.long)]
)
def test_experts_launch_and_keep_less_and_do_not_wait(name):
    launches, saved, moved = AT_LEAST[name]
    subject = models.subject(name)
    before, after = counts.measure(subject, ()), {}
    try:
        for tables in launches:
            npu_patch.configure("rope", tables=tables)
            after[tables] = counts.measure(subject, counts.DEFAULT)
    finally:
        npu_patch.configure("rope", tables="float32")
    found = {tables: before.ratio(step, "launches") for tables, step in after.items()}
    assert all(found[tables] >= least for tables, least in launches.items()), found
    for step in after.values():
        assert step.syncs == 0
        assert before.ratio(step, "saved") >= saved
        assert before.ratio(step, "moved") >= moved
        assert step.peak < before.peak
        assert step.loss == pytest.approx(before.loss, rel=2e-3)
