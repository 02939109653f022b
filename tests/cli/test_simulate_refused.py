"""`--simulate` where it cannot work: one line, status 2, nothing started. torch is here as files that are only read."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import rich
import wrapt

from tests.packaging.environments import Built, Environment, make_environment


@pytest.fixture(scope="module")
def lean(tmp_path_factory: pytest.TempPathFactory, built: Built) -> Environment:
    """npu_patch with wrapt and rich, and no torch."""
    folder = tmp_path_factory.mktemp("lean")
    environment = make_environment(folder / "venv")
    environment.pip("install", "--quiet", "--no-deps", built.wheel)
    (folder / "needed").mkdir()
    for package in (wrapt, rich):
        source = Path(package.__file__).parent
        (folder / "needed" / source.name).symlink_to(source)
    return environment.share(folder / "needed")


def stand_in(folder: Path, **torch: str) -> str:
    """Files that look like torch and torch_npu; gives PYTHONPATH."""
    for name, version in (("torch", "2.13.0"), ("torch_npu", torch.pop("torch_npu", "2.13.0"))):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise ImportError('only read')\n")
        (folder / f"{name}-{version}.dist-info").mkdir()
        (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    lines = [f"{name}: Optional[str] = {torch.get(name)!r}\n" for name in ("cuda", "hip")]
    (folder / "torch" / "version.py").write_text("".join(lines))
    return str(folder)


def refused(result: subprocess.CompletedProcess[str], says: str, folder: Path) -> None:
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    (line,) = result.stderr.splitlines()
    assert says in line
    assert not (folder / "started").exists()


def simulate(environment: Environment, folder: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text("open('started', 'w')\n")
    changes.setdefault("NPU_PATCH_CACHE", str(folder / "cache"))
    command = [environment.bin / "npu-patch", "run", "--simulate", script]
    return environment.run(command, cwd=folder, **changes)


def test_without_torch_npu(lean: Environment, tmp_path: Path) -> None:
    (tmp_path / "packages" / "torch").mkdir(parents=True)
    (tmp_path / "packages" / "torch" / "__init__.py").touch()
    refused(simulate(lean, tmp_path, PYTHONPATH=str(tmp_path / "packages")), "torch_npu", tmp_path)
    refused(simulate(lean, tmp_path), "needs torch, which is not installed", tmp_path)


def test_without_a_compiler(lean: Environment, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    path = stand_in(tmp_path / "packages")
    result = simulate(lean, tmp_path, PYTHONPATH=path, PATH=str(tmp_path / "empty"), CC="no-such-compiler")
    refused(result, "compiler", tmp_path)
    assert not (tmp_path / "cache").exists()


def test_with_a_cuda_build_of_torch(lean: Environment, tmp_path: Path) -> None:
    refused(simulate(lean, tmp_path, PYTHONPATH=stand_in(tmp_path / "packages", cuda="13.0")), "CUDA 13.0", tmp_path)


def test_with_a_torch_npu_that_was_not_tested(lean: Environment, tmp_path: Path) -> None:
    path = stand_in(tmp_path / "packages", torch_npu="2.5.1")
    refused(simulate(lean, tmp_path, PYTHONPATH=path), "2.5.1", tmp_path)


def test_with_real_cann_libraries(lean: Environment, tmp_path: Path) -> None:
    path = stand_in(tmp_path / "packages")
    refused(simulate(lean, tmp_path, PYTHONPATH=path, ASCEND_HOME_PATH=str(tmp_path)), "real CANN", tmp_path)
