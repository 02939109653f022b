"""Activation by torchtitan's own flags, without a variable and without a line of code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import npu_patch
from tests.conftest import REAL_NPU

from .generation import PREVIOUS, current
from .trainer_runs import model_flags

ROOT = Path(__file__).parents[3]
FUSED = "npu_patch.adapters.torchtitan.override.fused"
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pretraining")]


def trained(folder: Path, *flags: str, **variables: str):
    """One step of the example, started as without npu_patch; what the process wrote of its calls, by op."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NPU_PATCH_")}
    environment |= {"NPU_PATCH_REPORT": str(folder), "OMP_NUM_THREADS": "1", **variables}
    # The start-up file of an installed npu_patch, which loads the simulated device and waits for no library.
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "npu_patch" / "_site"), str(ROOT)))
    if not REAL_NPU:
        environment["NPU_PATCH_SIMULATE"] = "1"
    checkpointing = ["--activation_checkpoint.mode", "none"] if PREVIOUS else ["activation_checkpoint:none"]
    sizes = ["--training.steps", "1", "--training.seq_len", "64"]
    command = [sys.executable, str(ROOT / "examples" / "pretrain_torchtitan.py")]
    done = subprocess.run(
        [
            *command,
            *model_flags("llama3", "debugmodel" if PREVIOUS else "llama3_debugmodel"),
            *flags,
            *sizes,  # after the list of imports, which would take whatever has no dashes
            *checkpointing,
        ],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    hits: dict[str, int] = {}
    for file in folder.glob("*.json"):
        for row in json.loads(file.read_text())["rows"]:
            hits[row["op"]] = hits.get(row["op"], 0) + row["hits"]
    return {op: number for op, number in hits.items() if number}, done.stdout + done.stderr


STEP = {"rms_norm": 13, "rope": 6, "attention": 6}


def test_the_flag_of_each_generation_activates_the_default(tmp_path):
    flag = ["--experimental.custom_import", "npu_patch"] if PREVIOUS else ["--override.imports", FUSED]
    hits, output = trained(tmp_path, *flag)
    losses = hits.pop("cross_entropy")
    assert losses == (1 if PREVIOUS else 8)  # 0.3.0 computes its loss a chunk of the sequence at a time
    assert hits == STEP
    if not PREVIOUS:
        assert f"[Override] {FUSED}: profiler" in output
        assert "produced no replacements" not in output


@current
def test_the_flag_may_name_ops(tmp_path):
    ops = json.dumps({"ops": "rms_norm,attention,rope:tables=input"})
    hits, _ = trained(tmp_path, "--override.imports", f"{FUSED}={ops}")
    assert hits == STEP


@current
def test_an_override_leaves_the_configuration_as_it_is():
    from torchtitan.tools.profiler import Profiler

    from npu_patch.adapters.torchtitan.override import fused

    config = Profiler.Config()
    assert fused(config) is config
    assert fused(config, ops="rms_norm,rope:tables=input") is config
    try:
        strategy = npu_patch.strategy()
        assert {op for op, values in strategy.items() if values["enabled"]} == {"rms_norm", "rope"}
        assert strategy["rope"]["tables"] == "input"
        assert fused(config, ops="none") is config
        assert not any(values["enabled"] for values in npu_patch.strategy().values())
        with pytest.raises(ValueError, match="rms_norm"):
            fused(config, ops="rmsnorm")
    finally:
        npu_patch.configure("rope", tables="float32")
