"""torchtitan's dispatcher between two and four ranks, for routings of every kind (`expert_ranks`)."""

from __future__ import annotations

import pytest

from .generation import CURRENT
from .ranks import run_on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("experts"),
    pytest.mark.skipif(not CURRENT, reason="torchtitan 0.2.2 has no dispatchers"),
]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_any_routing_between_ranks_equals_the_formula_and_the_original(ranks):
    run_on_ranks("expert_ranks", ranks)
