"""Tensor parallelism hands norms, rotary embeddings and feed-forwards DTensors: they are computed, on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import REAL_NPU

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("trainer")]


def test_norms_rotary_embeddings_and_feed_forwards_on_two_ranks():
    if REAL_NPU and torch.npu.device_count() < 2:
        pytest.skip("needs two NPUs")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NPU_PATCH_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launcher = [sys.executable, "-m", "npu_patch", "run", "--ops", "none", *([] if REAL_NPU else ["--simulate=2"])]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "--", *command, "-m", "tests.adapters.torchtitan.two_ranks"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert done.stdout.count("is done") == 2
