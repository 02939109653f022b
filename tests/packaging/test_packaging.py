"""sdist → wheel → install → uninstall, and start-up files that never disturb a Python start."""

from __future__ import annotations

import os
import statistics
import subprocess
import tarfile
import time
import zipfile
from pathlib import Path

from .environments import (
    ROOT,
    Built,
    Environment,
    checked,
    clean_environment,
    copy_sources,
    make_environment,
    site_packages_of_tests,
)

HOOK_LOADED = "import sys; print('npu_patch_startup' in sys.modules)"


def _contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_wheel_carries_start_up_files_simulator_sources_and_sitecustomize(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = set(wheel.namelist())
    sources = {f"npu_patch/simulator/runtime/{path.name}" for path in (ROOT / "npu_patch/simulator/runtime").iterdir()}
    modules = {
        str(path.relative_to(ROOT)) for path in (ROOT / "npu_patch").rglob("*.py") if "__pycache__" not in path.parts
    }
    assert {"npu_patch.pth", "npu_patch.start", "npu_patch_startup.py"} | sources | modules <= names
    assert not any(name.startswith(("tests/", "examples/")) for name in names)


def test_sdist_can_be_built_from(built: Built) -> None:
    with tarfile.open(built.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"setup.py", "setup.cfg", "pyproject.toml", "LICENSE", "npu_patch.pth", "npu_patch.start"} <= names


def test_uninstalling_leaves_the_environment_as_before(built: Built, tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "venv").share()
    before = _contents(environment.folder)
    environment.pip("install", "--quiet", "--no-deps", built.wheel)
    assert environment.code(HOOK_LOADED, NPU_PATCH_OPS="default").stdout == "True\n"
    environment.pip("uninstall", "--quiet", "--yes", "npu_patch")
    assert _contents(environment.folder) == before


def test_editable_install_activates_and_leaves_nothing(tmp_path: Path) -> None:
    sources = copy_sources(tmp_path / "sources")
    environment = make_environment(tmp_path / "venv").share(site_packages_of_tests())
    before = _contents(environment.folder)
    pip = [environment.python, "-m", "pip"]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--editable", sources]
    checked(install, env=clean_environment())
    code = "import sys; m = sys.modules.get('npu_patch_startup'); print(m and m.__file__)"
    assert environment.code(code, NPU_PATCH_OPS="default").stdout.strip() == str(sources / "npu_patch_startup.py")
    assert environment.code(code).stdout == "None\n"
    checked([*pip, "uninstall", "--quiet", "--yes", "npu_patch"], env=clean_environment())
    assert _contents(environment.folder) == before


def test_start_file_names_the_same_function_as_the_pth_line() -> None:
    assert (ROOT / "npu_patch.start").read_text().split() == ["npu_patch_startup:start"]
    (line,) = (ROOT / "npu_patch.pth").read_text().splitlines()
    assert line.startswith("import os;")
    assert "__import__('npu_patch_startup').start()" in line


def test_pth_line_without_the_package_says_nothing(tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "venv").share()
    (environment.site_packages / "npu_patch.pth").write_text((ROOT / "npu_patch.pth").read_text())
    result = environment.code("print('ran')", NPU_PATCH_OPS="default", NPU_PATCH_SIMULATE="1")
    assert (result.returncode, result.stdout, result.stderr) == (0, "ran\n", "")


def test_start_up_files_of_another_version_do_not_stop_python(tmp_path: Path) -> None:
    """The two files of one version meet a module of another, which even tries to exit."""
    environment = make_environment(tmp_path / "venv").share()
    (environment.site_packages / "npu_patch.pth").write_text((ROOT / "npu_patch.pth").read_text())
    for start in ("raise SystemExit(3)", "raise RuntimeError('other')"):
        (environment.site_packages / "npu_patch_startup.py").write_text(f"def start():\n    {start}\n")
        for changes in ({}, {"PYTHONPATH": str(ROOT / "npu_patch/_site")}):
            result = environment.code("print('ran')", NPU_PATCH_OPS="default", **changes)
            assert (result.returncode, result.stdout) == (0, "ran\n")
            # A virtual environment runs its .pth files twice.
            assert set(result.stderr.splitlines()) <= {f"npu_patch: not active in this process: {_shown(start)}"}
    (environment.site_packages / "npu_patch_startup.py").write_text("")
    assert environment.code("print('ran')", NPU_PATCH_OPS="default").stdout == "ran\n"


def _shown(start: str) -> str:
    return start.removeprefix("raise ")


def test_package_beside_a_start_up_module_of_another_version_says_so(installed: Environment, tmp_path: Path) -> None:
    (tmp_path / "npu_patch_startup.py").write_text("def start(): pass\ndef watch(): pass\n")
    result = installed.code("import npu_patch", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert f"start-up module of another version, {tmp_path}" in result.stderr.splitlines()[-1]


def test_python_start_costs_the_same_with_the_variable_unset(built: Built, tmp_path: Path) -> None:
    without = make_environment(tmp_path / "without").share()
    with_package = make_environment(tmp_path / "with").share()
    with_package.pip("install", "--quiet", "--no-deps", built.wheel)

    def start(environment: Environment) -> float:
        begin = time.perf_counter()
        subprocess.run([environment.python, "-c", "pass"], env=clean_environment(), check=True)
        return time.perf_counter() - begin

    ratios = []
    for _ in range(3):  # the machine may be busy with something else: the best of three tries counts
        pairs = [(start(without), start(with_package)) for _ in range(30)]
        ratios.append(statistics.median(b for _, b in pairs) / statistics.median(a for a, _ in pairs))
        if ratios[-1] <= 1.15:
            break
    assert min(ratios) <= 1.15
    assert with_package.code(HOOK_LOADED).stdout == "False\n"
    assert with_package.code(HOOK_LOADED, NPU_PATCH_OPS="").stdout == "False\n"
    assert os.path.exists(with_package.site_packages / "npu_patch.pth")
