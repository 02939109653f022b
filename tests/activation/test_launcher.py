"""`npu-patch run` brings npu_patch into Pythons whose environment does not have its start-up files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.packaging.environments import ROOT, Environment, Libraries, make_environment

RUN = ["-m", "npu_patch", "run", "--ops", "rms_norm"]
SHOW = "import sys, transformers; print('npu_patch' in sys.modules, getattr(sys, 'of_user', None))"


def launch(
    environment: Environment, *words: str | Path, path: str | None, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run the launcher from the checkout, which is on sys.path for `-m` alone."""
    if path is not None:
        changes["PYTHONPATH"] = path
    changes["NPU_PATCH_LOG"] = "info"
    return environment.run([environment.python, *words], cwd=ROOT, **changes)


def test_environment_without_start_up_files_and_without_python_path(
    elsewhere: Environment, tmp_path: Path, libraries: Libraries, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"import sys; sys.path.append({libraries.path!r}); {SHOW}"
    monkeypatch.delenv("PYTHONPATH", raising=False)
    result = launch(elsewhere, *RUN, elsewhere.python, "-c", code, path=None)
    assert result.stdout == "True None\n", result.stderr
    # An isolated Python reads neither PYTHONPATH nor what it points to; the installed start-up file would reach it.
    assert launch(elsewhere, *RUN, elsewhere.python, "-I", "-c", code, path=None).stdout == "False None\n"


def test_sitecustomize_of_the_user_runs_as_well(elsewhere: Environment, tmp_path: Path, libraries: Libraries) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.of_user = __file__\n")
    code = f"{SHOW}; import sitecustomize; print(sitecustomize.__file__)"
    path = f"{tmp_path}:{libraries.path}"
    result = launch(elsewhere, *RUN, elsewhere.python, "-c", code, path=path)
    mine = str(tmp_path / "sitecustomize.py")
    assert result.stdout == f"True {mine}\n{mine}\n"
    nested = launch(elsewhere, *RUN, elsewhere.python, *RUN, elsewhere.python, "-c", code, path=path)
    assert nested.stdout == result.stdout


def test_failing_sitecustomize_of_the_user_is_reported_as_python_does(
    elsewhere: Environment, tmp_path: Path, libraries: Libraries
) -> None:
    (tmp_path / "sitecustomize.py").write_text("1 / 0\n")
    result = launch(elsewhere, *RUN, elsewhere.python, "-c", SHOW, path=f"{tmp_path}:{libraries.path}")
    assert result.stdout == "True None\n"
    assert "ZeroDivisionError" in result.stderr


def test_launcher_of_one_environment_adds_nothing_else_to_another(
    installed: Environment, tmp_path: Path, libraries: Libraries
) -> None:
    """The other Python finds npu_patch, and none of the packages that are installed beside it."""
    other = make_environment(tmp_path / "venv").share()
    code = """
import importlib.util, sys
print([bool(importlib.util.find_spec(name)) for name in ("npu_patch", "npu_patch_startup", "torch", "pytest")])
"""
    result = installed.run(["npu-patch", "run", other.python, "-c", code])
    assert result.stdout == "[True, True, False, False]\n"


def test_installed_and_launched_at_once_activates_once(installed: Environment, libraries: Libraries) -> None:
    code = "import sys; print([type(finder).__name__ for finder in sys.meta_path].count('_Finder'))"
    result = installed.run(["npu-patch", "run", "python", "-c", code])
    assert result.stdout == "1\n"


SCRIPT = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
model = LlamaForCausalLM(config).to("npu")
ids = torch.arange(32, device="npu")[None]
model(ids, labels=ids).loss.backward()
"""


@pytest.mark.slow
def test_real_transformers_and_torchtitan(elsewhere: Environment, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = elsewhere.run(
        [elsewhere.python, "-m", "npu_patch", "run", "--simulate", "--ops", "rms_norm,rope,attention", script], cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    table = [line.split("|") for line in result.stderr.splitlines() if line.startswith("|")]
    hits = {cells[1].strip(): cells[5].strip() for cells in table if "transformers" in cells[2]}
    assert hits == {"rms_norm": "5", "rope": "2", "attention": "2"}
    code = "import sys, torchtitan.models.common; print(sys.modules['npu_patch'].status().rows[0].library)"
    result = elsewhere.run(
        [elsewhere.python, "-m", "npu_patch", "run", "--simulate", elsewhere.python, "-c", code], cwd=ROOT
    )
    assert result.stdout.splitlines()[-1] == "torchtitan", result.stderr
    misspelt = elsewhere.run(
        [elsewhere.python, "-c", "import npu_patch, torchtitan"], cwd=ROOT, NPU_PATCH_OPS="rms_nrom"
    )
    assert "did you mean 'rms_norm'" in misspelt.stderr.splitlines()[-1]
