"""`npu-patch doctor`: what npu_patch needs, what is here, and how to mend what is missing.

torch and torch_npu are imported in other processes only, so that a broken one is a line of the answer.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import npu_patch

from .. import settings
from ..simulator import SimulatorError, build, installed
from ..simulator import check as check_simulator

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 7)


@dataclass(frozen=True)
class Finding:
    """One line of the answer.

    Args:
        name: what was looked at.
        ok: True, False (npu_patch cannot work like this) or None (worth knowing, blocks nothing).
        found: what is here.
        fix: what to do about it.
    """

    name: str
    ok: bool | None
    found: str
    fix: str = ""

    def __str__(self) -> str:
        mark = {True: "ok", False: "PROBLEM", None: "note"}[self.ok]
        fix = f"\n{'':22}-> {self.fix}" if self.fix else ""
        return f"{mark:8} {self.name:12} {self.found}{fix}"


def main() -> int:
    """Print what was found; returns 1 where something blocks, else 0."""
    findings = examine()
    print("\n".join(str(finding) for finding in findings))
    return int(any(finding.ok is False for finding in findings))


def examine() -> list[Finding]:
    npu = _npu()
    simulator = _simulator()
    findings = [_python(), _torch(), _torch_npu(), _cann(), npu, simulator, _compiler()]
    if not npu.ok and not simulator.ok:
        fix = "on Ascend hardware install driver, CANN and torch_npu; elsewhere mend the simulator as it says above"
        findings.append(Finding("device", False, "neither a visible NPU nor a simulator that works", fix))
    return [*findings, *_model_libraries(), _hook(), _settings()]


def _python() -> Finding:
    found = f"{sys.version.split()[0]} ({sys.executable})"
    if sys.version_info[:2] < OLDEST_PYTHON:
        return Finding("python", False, found, "use Python 3.10 or newer")
    return Finding("python", True, found)


def _torch() -> Finding:
    version = _version("torch")
    if version is None:
        return Finding("torch", False, "not installed", "pip install torch (a CPU build, beside torch_npu)")
    failure, _ = _try("import torch", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    if failure:
        return Finding("torch", False, f"{version} cannot be imported: {failure}", "install torch again")
    if _numbers(version)[:2] < OLDEST_TORCH:
        return Finding("torch", False, version, "install torch 2.7 or newer")
    return Finding("torch", True, version)


def _torch_npu() -> Finding:
    version, torch = _version("torch_npu"), _version("torch")
    if version is None:
        wanted = f"=={'.'.join(map(str, _numbers(torch)))}" if torch else ""
        return Finding("torch_npu", False, "not installed", f"pip install torch_npu{wanted}")
    if torch is not None and _numbers(torch)[:2] != _numbers(version)[:2]:
        fix = "torch_npu X.Y works with torch X.Y only: install a matching pair"
        return Finding("torch_npu", False, f"{version} beside torch {torch}", fix)
    return Finding("torch_npu", True, version)


def _cann() -> Finding:
    place = installed.find_cann(build.MARKER)
    if place is None:
        return Finding("CANN", None, "not found", "on Ascend hardware: source the set_env.sh of the CANN toolkit")
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME") or ""
    versions = [
        line.partition("=")[2].strip()
        for path in sorted(Path(home).glob("*/ascend_toolkit_install.info") if home else ())
        for line in path.read_text(errors="replace").splitlines()
        if line.startswith("version=")
    ]
    return Finding("CANN", True, f"{place} {' '.join(versions)}".strip())


def _npu() -> Finding:
    """Whether a real NPU can be used; asked in a process that simulates nothing."""
    if _version("torch_npu") is None or _version("torch") is None:
        return Finding("NPU", None, "cannot be asked for without torch and torch_npu")
    code = "import torch, torch_npu; print(torch.npu.device_count(), torch.npu.is_available())"
    failure, output = _try(code, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    if failure:
        without = (
            "without CANN `import torch` fails as well, except in simulation or with TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        )
        return Finding("NPU", None, f"torch_npu cannot be imported: {failure}", without)
    count, available = output.split()[-2:]
    if count == "0" or available != "True":
        devices = sorted(str(path) for path in Path("/dev").glob("davinci[0-9]*"))
        hint = "the devices are not usable: check npu-smi info and ASCEND_RT_VISIBLE_DEVICES" if devices else ""
        return Finding("NPU", None, f"none visible (devices: {', '.join(devices) or 'none'})", hint)
    return Finding("NPU", True, f"{count} visible")


def _simulator() -> Finding:
    try:
        check_simulator(1)
    except (SimulatorError, ValueError) as error:
        return Finding("simulator", None, f"not usable: {error}")
    return Finding("simulator", True, "usable: npu-patch run --simulate")


def _compiler() -> Finding:
    try:
        return Finding("compiler", True, build.find_compiler())
    except SimulatorError as error:
        return Finding("compiler", None, str(error))


def _model_libraries() -> list[Finding]:
    found = {name: _version(name) for name in ("torchtitan", "transformers")}
    if not any(found.values()):
        return [Finding("models", None, "neither torchtitan nor transformers is installed", "install one to patch it")]
    return [Finding(name, True, version) for name, version in found.items() if version]


def _hook() -> Finding:
    """Whether NPU_PATCH_OPS alone activates; the launcher's own way in is kept out of the question."""
    code = "import sys; print('npu_patch_startup' in sys.modules)"
    failure, output = _try(code, {"NPU_PATCH_OPS": "default", "PYTHONPATH": ""})
    if not failure and output.split()[-1:] == ["True"]:
        return Finding("hook", True, "installed: NPU_PATCH_OPS activates npu_patch in every Python of this environment")
    place = Path(npu_patch.__file__ or "").parent.parent
    fix = f"pip install npu_patch into this environment (used now: {place}), or start with `npu-patch run`"
    return Finding("hook", None, "not installed: NPU_PATCH_OPS alone activates nothing", fix)


def _settings() -> Finding:
    try:
        chosen = settings.from_environment()
    except settings.SettingsError as error:
        return Finding("settings", False, str(error), "correct or unset the variable")
    return Finding("settings", True, f"on: {', '.join(sorted(chosen.enabled)) or 'nothing'}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The release part of a version: (2, 13, 0) for "2.13.0+cpu" and "2.13.0.post2"."""
    numbers = []
    for part in version.partition("+")[0].split(".")[:3]:
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _try(code: str, changes: Mapping[str, str]) -> tuple[str, str]:
    """Run a line of Python with everything of npu_patch off: (last line of the error or "", output)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NPU_PATCH_")}
    environment.update(changes)
    try:
        result = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error), ""
    if result.returncode == 0:
        return "", result.stdout
    lines = result.stderr.strip().splitlines()
    return (lines[-1] if lines else f"exit status {result.returncode}"), result.stdout
