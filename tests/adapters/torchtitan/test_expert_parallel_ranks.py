"""torchtitan's dispatcher between two and four ranks, for routings of every kind (`expert_ranks`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import REAL_NPU

from .generation import CURRENT

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("experts"),
    pytest.mark.skipif(not CURRENT, reason="torchtitan 0.2.2 has no dispatchers"),
]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_any_routing_between_ranks_equals_the_formula_and_the_original(ranks):
    if REAL_NPU and torch.npu.device_count() < ranks:
        pytest.skip(f"needs {ranks} NPUs")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NPU_PATCH_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    simulated = [] if REAL_NPU else [f"--simulate={ranks}"]
    launcher = [sys.executable, "-m", "npu_patch", "run", "--ops", "none", *simulated]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*launcher, "--", *command, "-m", "tests.adapters.torchtitan.expert_ranks"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert done.stdout.count("is done") == ranks
