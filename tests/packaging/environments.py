"""Virtual environments with the built package, and clean subprocesses in them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("LICENSE", "README.md", "setup.cfg", "setup.py", "pyproject.toml", "npu_patch.pth", "npu_patch.start")


def site_packages_of_tests() -> str:
    """Where this test run has its installed packages."""
    return str(Path(pytest.__file__).parent.parent)


def clean_environment(**changes: str) -> dict[str, str]:
    """The environment without what this test run, or npu_patch in it, has set."""
    dropped = ("NPU_PATCH_", "PYTHON", "TASK_QUEUE_ENABLE", "RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTEST")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **changes}


@dataclass(frozen=True)
class Environment:
    """A virtual environment."""

    folder: Path

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    @property
    def python(self) -> str:
        return str(self.bin / "python")

    @property
    def site_packages(self) -> Path:
        return self.folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"

    def share(self, *folders: str | Path) -> Environment:
        """Make the packages of other folders importable, without their start-up files and after its own."""
        self.site_packages.mkdir(parents=True, exist_ok=True)
        (self.site_packages / "zz_shared.pth").write_text("".join(f"{folder}\n" for folder in folders))
        return self

    def pip(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """This run's pip, working on this environment; never asks an index."""
        command = [sys.executable, "-m", "pip", "--python", self.python, *map(str, words)]
        return checked(command, env=clean_environment(PIP_NO_INDEX="1"))

    def run(
        self, words: Sequence[str | Path], cwd: Path | None = None, timeout: float = 240, **changes: str
    ) -> subprocess.CompletedProcess[str]:
        """A command with this environment's programs first on the path."""
        environment = clean_environment(PATH=f"{self.bin}{os.pathsep}{os.environ['PATH']}")
        environment.update(changes)
        command = [str(word) for word in words]
        if os.sep not in command[0] and (self.bin / command[0]).exists():
            command[0] = str(self.bin / command[0])
        return subprocess.run(
            command,
            cwd=cwd or self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def code(self, code: str, *flags: str, **changes: Any) -> subprocess.CompletedProcess[str]:
        """A piece of Python."""
        return self.run([self.python, *flags, "-c", textwrap.dedent(code)], **changes)


def make_environment(folder: Path) -> Environment:
    venv.create(folder, with_pip=False, symlinks=True)
    return Environment(folder)


def checked(words: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def copy_sources(folder: Path) -> Path:
    """A checkout that building may write to."""
    folder.mkdir(parents=True)
    for name in (*SOURCES, "npu_patch_startup.py"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "npu_patch", folder / "npu_patch", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@dataclass(frozen=True)
class Built:
    """The distributions, the wheel being built from the sdist."""

    sdist: Path
    wheel: Path


def build(folder: Path) -> Built:
    sources = copy_sources(folder / "sources")
    checked([sys.executable, "-m", "build", "--no-isolation", sources, "--outdir", folder], env=clean_environment())
    return Built(next(folder.glob("*.tar.gz")), next(folder.glob("*.whl")))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory, built: Built) -> Environment:
    """The wheel, not editable, beside the packages of this test run."""
    environment = make_environment(tmp_path_factory.mktemp("installed") / "venv")
    environment.pip("install", "--quiet", "--no-deps", built.wheel)
    return environment.share(site_packages_of_tests())


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The packages of this test run without npu_patch's start-up files: only PYTHONPATH can bring it in."""
    return make_environment(tmp_path_factory.mktemp("elsewhere") / "venv").share(site_packages_of_tests())


@dataclass
class Libraries:
    """Stand-ins for the model libraries, quick to import: a folder for PYTHONPATH."""

    folder: Path

    @property
    def path(self) -> str:
        return str(self.folder)


_NORM = """
import torch
from torch import nn


class TinyRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)
"""


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    """`transformers` with one norm class, whose module alone needs torch, and an empty `torchtitan`."""
    folder = tmp_path_factory.mktemp("libraries")
    for package in ("transformers/models/tiny", "torchtitan"):
        (folder / package).mkdir(parents=True)
    for package in ("transformers", "transformers/models", "transformers/models/tiny", "torchtitan"):
        (folder / package / "__init__.py").touch()
    (folder / "transformers/models/tiny/modeling_tiny.py").write_text(_NORM)
    return Libraries(folder)


def reports(folder: Path) -> list[dict[str, Any]]:
    """The JSON files that processes wrote."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json")) if path.name != "merged.json"]
