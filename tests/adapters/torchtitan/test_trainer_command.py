"""The trainer of torchtitan 0.2.2 as a user starts it: `npu-patch run`, the example, a configuration file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter

import pytest

from tests.conftest import REAL_NPU

from .generation import previous
from .trainer_runs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("trainer"), previous]

CONFIGURATION = """
[model]
name = "llama3"
flavor = "debugmodel_flex_attn"
[training]
steps = 4
seq_len = 64
[activation_checkpoint]
mode = "none"
[debug]
seed = 0
"""


def test_a_configuration_file_trains_patched_and_without_a_compiler(tmp_path):
    file, report = tmp_path / "small.toml", tmp_path / "report"
    file.write_text(CONFIGURATION)
    dropped = ("NPU_PATCH_", "TORCHDYNAMO_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    simulate = [] if REAL_NPU else ["--simulate"]
    launcher = [sys.executable, "-m", "npu_patch", "run", *simulate, "--report", str(report), "--"]
    done = subprocess.run(
        [*launcher, sys.executable, "examples/pretrain_torchtitan.py", "--job.config_file", str(file)],
        env={**environment, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"loss:\s+([0-9.]+)", done.stdout + done.stderr)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    rows = json.loads((report / "merged.json").read_text())["rows"]
    hits = Counter()
    for row in rows:
        hits[row["op"]] += sum(row["hits"].values())
    expected = {"rms_norm": 4 * 13, "rope": 4 * 6, "attention": 4 * 6, "cross_entropy": 4}
    assert +hits == expected
