from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from npu_patch.simulator import SimulatorError, build

from .conftest import environment

Run = Callable[..., subprocess.CompletedProcess[str]]
BUILD = "from npu_patch.simulator import build; print(build.build())"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("NPU_PATCH_CACHE", str(folder))
    return folder


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    for name in ("NPU_PATCH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert build.cache_root() == Path("/home/somebody/.cache/npu_patch/simulator")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/tmp/x")
    assert build.cache_root() == Path("/var/tmp/x/npu_patch/simulator")
    monkeypatch.setenv("NPU_PATCH_CACHE", "/var/tmp/own")
    assert build.cache_root() == Path("/var/tmp/own/simulator")


def test_the_folder_is_private_complete_and_built_once(cache: Path) -> None:
    assert not build.is_built()
    folder = build.build()
    assert build.is_built()
    assert folder.parent == cache / "simulator"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    names = {path.name for path in build.libraries(folder)}
    assert {"libascendcl.so", "libhccl.so", "libopapi.so", "libacl_op_compiler.so"} <= names
    assert build.libraries(folder)[0].name == "libascendcl.so"
    assert not list(folder.glob("*.c"))
    assert sorted(p.name for p in folder.parent.iterdir()) == sorted(["lock", folder.name])
    before = (folder / "libascendcl.so").stat().st_mtime_ns
    assert build.build() == folder
    assert (folder / "libascendcl.so").stat().st_mtime_ns == before


def test_the_folder_changes_with_the_sources(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installation = build.find_torch_npu()
    first = build.folder_for(installation)
    (tmp_path / "runtime").mkdir()
    for source in build.RUNTIME.iterdir():
        (tmp_path / "runtime" / source.name).write_bytes(source.read_bytes() + b"\n")
    monkeypatch.setattr(build, "RUNTIME", tmp_path / "runtime")
    assert build.folder_for(installation) != first


def test_four_processes_that_start_at_once_build_once(cache: Path) -> None:
    # Every process says so when it really compiles.
    code = (
        "from npu_patch.simulator import build\n"
        "real = build._compile_all\n"
        "build._compile_all = lambda *a: (print('compiling'), real(*a))\n"
        "print(build.build())\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment(NPU_PATCH_CACHE=str(cache)), stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert "".join(outputs).count("compiling") == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1


def test_no_compiler_names_those_that_were_tried(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "mycc")
    with pytest.raises(SimulatorError, match=r"needs a C compiler.*tried mycc, cc, gcc, clang.*install gcc or set CC"):
        build.build()
    assert not list((cache / "simulator").glob("*-*"))


def test_cc_is_taken_first(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "mycc"
    compiler.write_text("#!/bin/sh\necho 'mycc: error: unwilling' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(SimulatorError, match=r"compiling the simulated NPU with .*mycc failed: mycc: error: unwilling"):
        build.build()
    # A failed build leaves nothing, and the next one starts afresh.
    assert [p.name for p in (cache / "simulator").iterdir()] == ["lock"]
    monkeypatch.delenv("CC")
    assert build.build().is_dir()


def test_a_cache_writable_by_others_is_refused(cache: Path) -> None:
    (cache / "simulator").mkdir(parents=True)
    for folder in (cache, cache / "simulator"):
        folder.chmod(0o777)
        with pytest.raises(SimulatorError, match=f"{folder} is writable by others: run chmod go-w"):
            build.build()
        folder.chmod(0o700)


def test_a_library_folder_writable_by_others_is_refused(cache: Path) -> None:
    build.build().chmod(0o770)
    with pytest.raises(SimulatorError, match="writable by others"):
        build.build()


def test_a_cache_of_another_user_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build.build()
    if os.geteuid() == 0:
        os.chown(folder, 4321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
    with pytest.raises(SimulatorError, match=r"belongs to another user \(uid \d+\): set NPU_PATCH_CACHE"):
        build.build()


def test_a_cache_that_cannot_be_made_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NPU_PATCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(SimulatorError, match=r"cannot make the cache folder .*: set NPU_PATCH_CACHE to a writable"):
        build.build()
