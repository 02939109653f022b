"""Machines on which the device cannot be simulated: one clear line each, and nothing half done."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from npu_patch.simulator import SimulatorError, build, installed


def package(folder: Path, name: str, version: str, text: str = "") -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise AssertionError('must not be imported')\n")
    (folder / name / "version.py").write_text(text)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


CPU = "from typing import Optional\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site-packages of its own; what is put there is found, and nothing else."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("torch", "torch_npu"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if getattr(f, "__name__", "") == "PathFinder"])
    return tmp_path


def test_a_cpu_torch_and_a_tested_torch_npu_are_fine(site: Path) -> None:
    package(site, "torch", "2.13.0+cpu", CPU)
    package(site, "torch_npu", "2.13.0")
    installed.check_versions()


def test_no_torch(site: Path) -> None:
    with pytest.raises(SimulatorError, match="needs torch, which is not installed: install npu_patch\\[sim\\]"):
        installed.check_versions()


def test_no_torch_npu(site: Path) -> None:
    package(site, "torch", "2.13.0+cpu", CPU)
    with pytest.raises(SimulatorError, match="needs torch_npu, which is not installed: install npu_patch"):
        installed.check_versions()


@pytest.mark.parametrize(
    ("text", "name"),
    [("cuda: Optional[str] = '13.0'\n", r"CUDA 13\.0"), ("cuda = None\nhip: Optional[str] = '7.0'\n", r"ROCm 7\.0")],
)
def test_a_build_of_torch_for_another_accelerator(site: Path, text: str, name: str) -> None:
    package(site, "torch", "2.13.0", text)  # on PyPI the version of a CUDA build has no suffix
    package(site, "torch_npu", "2.13.0")
    with pytest.raises(SimulatorError, match=f"torch 2.13.0 is a build for {name}.*install a CPU build"):
        installed.check_versions()


def test_a_torch_npu_that_was_not_tested(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(site, "torch", "2.14.0", CPU)
    package(site, "torch_npu", "2.14.0")
    with pytest.raises(SimulatorError, match=r"tested with torch_npu 2.13.0, not with 2.14.0.*UNTESTED=1"):
        installed.check_versions()
    monkeypatch.setenv("NPU_PATCH_SIMULATE_UNTESTED", "1")
    installed.check_versions()


@pytest.fixture
def no_cann(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(installed, "_LINKER_CACHE", tmp_path / "none")


@pytest.mark.usefixtures("no_cann")
def test_no_cann_is_found_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "gone"))
    installed.check_no_cann(build.MARKER)


@pytest.mark.usefixtures("no_cann")
@pytest.mark.parametrize("variable", ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"])
def test_an_existing_toolkit_folder_is_real_cann(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, str(tmp_path))
    with pytest.raises(SimulatorError, match=f"real CANN libraries are here \\({variable}=.*unset NPU_PATCH_SIMULATE"):
        installed.check_no_cann(build.MARKER)


@pytest.mark.usefixtures("no_cann")
def test_a_library_on_the_search_path_is_real_cann_unless_it_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libascendcl.so").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nonexistent:{tmp_path}")
    with pytest.raises(SimulatorError, match=r"libascendcl\.so"):
        installed.check_no_cann(build.MARKER)
    (tmp_path / build.MARKER).touch()
    installed.check_no_cann(build.MARKER)


@pytest.mark.usefixtures("no_cann")
def test_a_library_known_to_the_linker_is_real_cann(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "ld.so.cache"
    cache.write_bytes(b"glibc-ld.so.cache1.1\0libc.so.6\0/lib/libc.so.6\0/usr/local/Ascend/lib64/libascendcl.so\0")
    monkeypatch.setattr(installed, "_LINKER_CACHE", cache)
    with pytest.raises(SimulatorError, match=r"/usr/local/Ascend/lib64/libascendcl\.so"):
        installed.check_no_cann(build.MARKER)
