"""Running a module of this folder on several ranks, each with an NPU of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import REAL_NPU

ROOT = Path(__file__).parents[3]


def run_on_ranks(module: str, ranks: int) -> None:
    """The module must end well, and every rank say "is done"; skipped where there are fewer NPUs."""
    if REAL_NPU and torch.npu.device_count() < ranks:
        pytest.skip(f"needs {ranks} NPUs")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NPU_PATCH_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    simulated = [] if REAL_NPU else [f"--simulate={ranks}"]
    launcher = [sys.executable, "-m", "npu_patch", "run", "--ops", "none", *simulated]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*launcher, "--", *command, "-m", f"tests.adapters.torchtitan.{module}"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert done.stdout.count("is done") == ranks
