"""Fixtures of the simulator's tests: other SoCs in this process, and fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import npu_patch.simulator
from npu_patch.simulator import limits

ROOT = Path(__file__).parents[2]


@pytest.fixture
def simulated() -> None:
    """Skips on real hardware: for tests of what only the simulated device does."""
    if not npu_patch.simulator.is_loaded():
        pytest.skip("needs the simulated device")


@pytest.fixture
def as_soc(simulated: None) -> Iterator[Callable[[str], None]]:
    """Lets the kernels enforce another SoC's limits (torch_npu's own C++ still sees the first one)."""
    before = limits.current().name
    yield lambda name: limits.select(name)
    limits.select(before)


def environment(**changes: str | None) -> dict[str, str]:
    """The environment of a fresh process: this repository importable, no simulator request unless it is given."""
    result = dict(os.environ, PYTHONPATH=str(ROOT))
    for name in ("NPU_PATCH_SIMULATE", "TASK_QUEUE_ENABLE"):
        result.pop(name, None)
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script in a fresh process. The script is a file, so that spawned children can import it."""

    def run(code: str, timeout: float = 120, **changes: str | None) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text(code)
        command = [sys.executable, str(script)]
        return subprocess.run(
            command,
            env=environment(**changes),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
