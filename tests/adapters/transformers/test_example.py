"""The fine-tuning example trains with every op in use, and the same without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import npu_patch.simulator

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "finetune_transformers.py"
SHORT = ["--steps", "12", "--batch", "2", "--length", "64", "--dtype", "fp32"]


def run(*arguments: str, ops: str = "rms_norm,rope,attention") -> str:
    simulate = ["--simulate"] if npu_patch.simulator.is_loaded() else []
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NPU_PATCH")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "npu_patch", "run", "--ops", ops, *simulate, "--", sys.executable, str(EXAMPLE)]
    done = subprocess.run(
        [*command, *SHORT, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr  # 3 where a named op was not reached
    return done.stdout


def losses(output: str) -> tuple[float, float]:
    before, after = re.search(r"text: ([\d.]+) before, ([\d.]+) after", output).groups()
    return float(before), float(after)


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_the_loss_falls_and_is_the_same_without_patches(model):
    patched = run("--model", model, "--generate", "4")
    before, after = losses(patched)
    assert after < before - 0.1
    assert " x " not in patched  # a fallback in the table
    stock = run("--model", model, "--generate", "4", ops="none")
    assert losses(stock) == pytest.approx((before, after), abs=2e-3)
    assert stock.split("continuation:")[1].split("\n")[0] == patched.split("continuation:")[1].split("\n")[0]
