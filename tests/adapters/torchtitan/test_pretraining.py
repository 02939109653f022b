"""torchtitan's trainer in processes of its own, as `examples/pretrain_torchtitan.py` starts it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import REAL_NPU

from .generation import current

ROOT = Path(__file__).parents[3]
EXAMPLE = str(ROOT / "examples" / "pretrain_torchtitan.py")
FLAGS = shlex.split(
    "--module llama3 --config llama3_debugmodel --debug.seed 0 --training.steps 2 --training.seq_len 64 "
    "--parallelism.spmd_backend partial_dtensor"
)
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pretraining"), current]


def train(report, ranks, *flags, **variables):
    """The losses that rank 0 logs."""
    dropped = ("NPU_PATCH_", "TORCHDYNAMO_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    launcher = [sys.executable, "-m", "npu_patch", "run", "--report", str(report)]
    launcher += [] if REAL_NPU else [f"--simulate={ranks}"]
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*launcher, "--", *command, EXAMPLE, *FLAGS, *flags],
        env={**environment, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    if variables.get("NPU_PATCH_OPS") != "none":  # one table, however many ranks
        assert done.stderr.count("torchtitan.models.common.nn_modules:") == 1, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"loss:\s+([0-9.]+)", done.stdout + done.stderr)]
    return losses[::ranks]  # every rank logs the same


def hits(folder):
    """Per process: op → hits, of the processes that were ranks."""
    result = []
    for file in sorted(folder.glob("*.json")):
        if file.name != "merged.json":
            count = {}
            for row in json.loads(file.read_text())["rows"]:
                count[row["op"]] = count.get(row["op"], 0) + row["hits"]
                assert not row["fallbacks"], row
            result.append({op: number for op, number in count.items() if number})
    return [count for count in result if any(count.values())]


def test_two_ranks_train_as_without_patches(tmp_path):
    if REAL_NPU and torch.npu.device_count() < 2:
        pytest.skip("needs two NPUs")
    patched = train(tmp_path / "patched", 2, "activation_checkpoint:none")
    stock = train(tmp_path / "stock", 2, "activation_checkpoint:none", NPU_PATCH_OPS="none", TORCHDYNAMO_DISABLE="1")
    assert len(patched) == len(stock) == 2
    assert patched == pytest.approx(stock, abs=1e-3)
    assert patched[1] < patched[0]
    per_step = {"rms_norm": 13, "rope": 6, "attention": 6, "cross_entropy": 8}  # the loss comes in eight chunks
    assert hits(tmp_path / "patched") == [{op: 2 * count for op, count in per_step.items()}] * 2
    merged = json.loads((tmp_path / "patched" / "merged.json").read_text())["rows"]
    both = {op: {f"rank {rank}": 2 * count for rank in range(2)} for op, count in per_step.items()}
    assert {row["op"]: row["hits"] for row in merged if any(row["hits"].values())} == both


def test_a_single_process_needs_no_launcher(tmp_path):
    losses = train(tmp_path, 1)
    assert losses[1] < losses[0]
    (count,) = hits(tmp_path)
    assert count == {
        "rms_norm": 2 * 25,
        "rope": 2 * 12,
        "attention": 2 * 12,
        "cross_entropy": 2 * 8,
    }  # selective checkpointing: forwards run twice
