"""A rank of torchrun that is killed: the launcher ends the others, which still report."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from .test_run import run

RANKS = """
import os, pathlib, signal, sys, time
from tests.cli.stub import report

report(hits=4, named="rms_norm")
ready = pathlib.Path(sys.argv[1])
(ready / os.environ["RANK"]).touch()
if os.environ["RANK"] == "1":
    while len(list(ready.iterdir())) < 3:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()  # until torchrun ends what is left
"""


def test_ranks_that_torchrun_ends_after_another_was_killed_are_in_the_table(tmp_path: Path) -> None:
    script, ready = tmp_path / "ranks.py", tmp_path / "ready"
    script.write_text(textwrap.dedent(RANKS))
    ready.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 3]
    folder = tmp_path / "reports"
    result = run(
        "--report", folder, "--", *torchrun, script, ready, NPU_PATCH_OPS="rms_norm", TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    assert result.returncode == 1, result.stderr
    assert result.stderr.count("lib.m:Norm.forward") == 1
    assert "wrote no report: rank 1" in result.stderr
    assert {path.name.split("-")[-2] for path in folder.glob("*-*.json")} == {"0", "2"}
