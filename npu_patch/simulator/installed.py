"""What is installed here, read from files: torch_npu, torch, and real CANN libraries. Nothing is imported or loaded."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from .errors import SimulatorError

#: The torch_npu versions that the simulator was tested with.
TESTED = ("2.13.0",)
ALLOW_UNTESTED = "NPU_PATCH_SIMULATE_UNTESTED"
INSTALL_HINT = "install npu_patch[sim], or torch==2.13.0 (a CPU build) and torch_npu==2.13.0"

_LINKER_CACHE = Path("/etc/ld.so.cache")
_CANN_RUNTIME = "libascendcl.so"


@dataclass(frozen=True)
class Installation:
    """An installed package: its folder and its version."""

    folder: Path
    version: str


def _find(name: str) -> Installation | None:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.origin:
        return None
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    return Installation(Path(spec.origin).parent, version)


def find_torch_npu() -> Installation:
    """The installed torch_npu, or ``SimulatorError``."""
    found = _find("torch_npu")
    if found is None:
        raise SimulatorError(f"the simulated NPU needs torch_npu, which is not installed: {INSTALL_HINT}")
    return found


def check_versions() -> None:
    """Raises ``SimulatorError`` unless torch is a CPU build and torch_npu one that was tested."""
    torch = _find("torch")
    if torch is None:
        raise SimulatorError(f"the simulated NPU needs torch, which is not installed: {INSTALL_HINT}")
    torch_npu = find_torch_npu()
    backend = _accelerator_of(torch.folder)
    if backend:
        raise SimulatorError(
            f"torch {torch.version} is a build for {backend}, which does not work beside torch_npu: install a CPU "
            f"build (pip install torch --index-url https://download.pytorch.org/whl/cpu)"
        )
    if torch_npu.version.partition("+")[0] not in TESTED and os.environ.get(ALLOW_UNTESTED) != "1":
        raise SimulatorError(
            f"the simulated NPU was tested with torch_npu {', '.join(TESTED)}, not with {torch_npu.version}: install a "
            f"tested one, or set {ALLOW_UNTESTED}=1 to try"
        )


def _accelerator_of(torch: Path) -> str | None:
    """``"CUDA 13.0"`` or ``"ROCm 7.0"`` for such a build of torch; its version number alone does not tell."""
    try:
        text = (torch / "version.py").read_text()
    except OSError:
        return None
    for attribute, name in (("cuda", "CUDA"), ("hip", "ROCm")):
        match = re.search(rf"^{attribute}\b[^=\n]*=\s*['\"](.+?)['\"]", text, re.MULTILINE)
        if match:
            return f"{name} {match.group(1)}"
    return None


def check_no_cann(marker: str) -> None:
    """Raises ``SimulatorError`` where real CANN libraries are found; ``marker`` names a file that marks our own."""
    found = find_cann(marker)
    if found:
        raise SimulatorError(
            f"real CANN libraries are here ({found}), so there is no need to simulate an NPU: unset NPU_PATCH_SIMULATE"
        )


def find_cann(marker: str) -> str | None:
    """Where real CANN libraries would be loaded from, or ``None``."""
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        value = os.environ.get(variable)
        if value and Path(value).is_dir():
            return f"{variable}={value}"
    for entry in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        library = Path(entry) / _CANN_RUNTIME
        if library.exists() and not (Path(entry) / marker).exists():
            return str(library)
    try:
        known = _LINKER_CACHE.read_bytes()
    except OSError:
        return None
    match = re.search(rb"/[^\0]*/" + re.escape(_CANN_RUNTIME.encode()) + rb"(?=[\0.])", known)
    return match.group().decode("utf-8", "replace") if match else None
