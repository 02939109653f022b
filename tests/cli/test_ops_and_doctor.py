"""`npu-patch ops` and `npu-patch doctor`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from npu_patch.registry import OPS
from tests.packaging.environments import ROOT, Environment, clean_environment


def npu_patch(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = {**clean_environment(PYTHONPATH=str(ROOT)), **changes}
    command = [sys.executable, "-m", "npu_patch", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


def test_ops_shows_every_op_and_what_the_environment_switches_on() -> None:
    rows = json.loads(npu_patch("ops", "--json", NPU_PATCH_OPS="rope").stdout)
    assert [row["name"] for row in rows] == [op.name for op in OPS]
    assert [row["name"] for row in rows if row["enabled"]] == ["rope"]
    default = json.loads(npu_patch("ops", "--json").stdout)
    assert all(row["enabled"] == row["default"] for row in default)
    table = npu_patch("ops").stdout
    assert all(op.name in table for op in OPS)


def test_ops_refuses_a_bad_variable() -> None:
    result = npu_patch("ops", NPU_PATCH_OPS="rms_nrom")
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert "rms_norm" in result.stderr


def test_command_line_patches_nothing_in_its_own_process() -> None:
    code = "import npu_patch, npu_patch.__main__ as m; m.main(['ops']); print(npu_patch.strategy())"
    environment = clean_environment(PYTHONPATH=str(ROOT), NPU_PATCH_OPS="all")
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "'enabled': True" not in result.stdout
    assert npu_patch().returncode == 2
    assert npu_patch("--version").stdout.startswith("npu_patch ")


def _lines(text: str) -> dict[str, str]:
    lines = [line.split(maxsplit=2) for line in text.splitlines() if line[:1] != " "]
    return {name: mark for mark, name, *_ in lines}


@pytest.mark.slow
def test_doctor_passes_where_an_npu_can_be_used_or_simulated(installed: Environment) -> None:
    result = installed.run(["npu-patch", "doctor"])
    marks = _lines(result.stdout)
    assert result.returncode == 0, result.stdout
    assert (marks["python"], marks["torch"], marks["torch_npu"], marks["hook"]) == ("ok",) * 4


def test_doctor_says_what_blocks_and_how_to_mend_it(installed: Environment, tmp_path: Path) -> None:
    """Another torch comes first, which cannot be imported; the variable is misspelt."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('broken library')\n")
    result = installed.run(["npu-patch", "doctor"], PYTHONPATH=str(tmp_path), NPU_PATCH_OPS="rms_nrom")
    marks = _lines(result.stdout)
    assert result.returncode == 1
    assert (marks["torch"], marks["settings"]) == ("PROBLEM", "PROBLEM")
    assert "broken library" in result.stdout
    assert "did you mean 'rms_norm'" in result.stdout
    assert result.stderr == ""


def test_doctor_works_without_torch_and_torch_npu(installed: Environment) -> None:
    code = """
    import importlib.metadata, sys
    from npu_patch.tools import doctor
    real = importlib.metadata.version
    def version(name):
        if name in ("torch", "torch_npu"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)
    doctor.importlib.metadata.version = version
    doctor.check_simulator = lambda devices: (_ for _ in ()).throw(doctor.SimulatorError("no torch_npu"))
    sys.exit(doctor.main())
    """
    result = installed.code(code)
    marks = _lines(result.stdout)
    assert result.returncode == 1, result.stderr
    assert (marks["torch"], marks["torch_npu"], marks["device"]) == ("PROBLEM",) * 3
    assert "pip install torch" in result.stdout


def test_doctor_says_where_the_hook_is_missing(elsewhere: Environment) -> None:
    result = elsewhere.code("from npu_patch.tools import doctor; print(doctor._hook())", PYTHONPATH=str(ROOT))
    assert result.stdout.startswith("note     hook")
    assert "npu-patch run" in result.stdout
