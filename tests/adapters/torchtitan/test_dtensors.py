"""Tensor parallelism hands norms, rotary embeddings and feed-forwards DTensors: they are computed, on two ranks."""

from __future__ import annotations

import pytest

from .ranks import run_on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("trainer")]


def test_norms_rotary_embeddings_and_feed_forwards_on_two_ranks():
    run_on_ranks("two_ranks", 2)
