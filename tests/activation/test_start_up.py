"""What the start-up hook does to a Python that it starts in: as little as can be, once, and beside what others do."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.packaging.environments import ROOT, Environment, Libraries, reports

ONCE = "print([type(finder).__name__ for finder in sys.meta_path].count('_Finder'))"


def test_the_hook_imports_nothing_but_a_few_modules_of_the_standard_library(installed: Environment) -> None:
    """Nothing that another start-up file (gevent, coverage) may want to change before it is imported."""
    show = "import sys; print('\\n'.join(sys.modules))"
    without = installed.code(show).stdout.split()
    added = set(installed.code(show, NPU_PATCH_OPS="default", NPU_PATCH_SIMULATE="1").stdout.split()) - set(without)
    assert "npu_patch_startup" in added
    assert {name.partition(".")[0] for name in added} - sys.stdlib_module_names == {"npu_patch_startup"}
    assert not added & {"threading", "socket", "ssl", "subprocess", "select", "queue", "logging", "typing"}


def test_the_line_of_the_start_up_file_costs_less_than_a_millisecond_where_it_has_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ("NPU_PATCH_OPS", "NPU_PATCH_SIMULATE"):
        monkeypatch.delenv(variable, raising=False)
    line = (ROOT / "npu_patch.pth").read_text()
    times = []
    for _ in range(50):
        begin = time.perf_counter()
        exec(line, {})  # as `site` does
        times.append(time.perf_counter() - begin)
    assert min(times) < 1e-3


def test_the_installed_hook_hides_no_sitecustomize_and_serves_it_too(
    installed: Environment, libraries: Libraries, tmp_path: Path
) -> None:
    """The user's own file runs, may itself import a model library, and finds that one activated."""
    (tmp_path / "sitecustomize.py").write_text("import sys, transformers\nsys.of_user = __file__\n")
    code = "import sys; print(sys.of_user, sys.modules['npu_patch'].strategy()['rope']['enabled'])"
    path = f"{tmp_path}:{libraries.path}"
    result = installed.code(code, NPU_PATCH_OPS="rope", PYTHONPATH=path)
    assert result.stdout == f"{tmp_path / 'sitecustomize.py'} True\n", result.stderr
    launched = installed.run(["npu-patch", "run", "--ops", "rope", "python", "-c", code], PYTHONPATH=path)
    assert launched.stdout == result.stdout, launched.stderr


def test_children_of_children_are_patched_once(installed: Environment, libraries: Libraries) -> None:
    """Through the start-up file, the launcher's sitecustomize and an import, all at once, three Pythons deep."""
    innermost = f"""
import sys, npu_patch
import transformers.models.tiny.modeling_tiny as m
{ONCE}
forward = m.TinyRMSNorm.forward
print("modeling_tiny" in forward.__wrapped__.__code__.co_filename, hasattr(forward.__wrapped__, "__wrapped__"))
"""
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {innermost!r}], check=True)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True)"
    for words in (["python"], ["npu-patch", "run", "--ops", "rms_norm", "python"]):
        result = installed.run(
            [*words, "-c", code], NPU_PATCH_OPS="rms_norm", NPU_PATCH_SIMULATE="1", PYTHONPATH=libraries.path
        )
        assert result.stdout.splitlines()[-2:] == ["1", "True False"], result.stderr


@pytest.mark.parametrize("spoil", ["del sys.argv", "sys.argv = []"])
def test_a_program_without_arguments_in_sys_is_activated_and_reports(
    installed: Environment, libraries: Libraries, tmp_path: Path, spoil: str
) -> None:
    """As in an embedded Python, or in a start-up file that runs before the arguments are known."""
    code = f"import sys\n{spoil}\nimport transformers.models.tiny.modeling_tiny\nprint('npu_patch' in sys.modules)"
    folder = tmp_path / "reports"
    changes = {"NPU_PATCH_OPS": "rms_norm", "NPU_PATCH_REPORT": str(folder), "NPU_PATCH_SIMULATE": "1"}
    result = installed.code(code, PYTHONPATH=libraries.path, **changes)
    assert (result.stdout.splitlines()[-1:], result.returncode) == (["True"], 0), result.stderr
    (report,) = reports(folder)
    assert (report["argv0"], report["complete"]) == ("", True)
    misspelt = installed.code(f"import sys\n{spoil}\nimport npu_patch\nprint('ran')", NPU_PATCH_OPS="rms_nrom")
    assert (misspelt.stdout, misspelt.returncode) == ("ran\n", 0), misspelt.stderr
    assert "did you mean 'rms_norm'" in misspelt.stderr


def test_a_namespace_package_that_grows_later_is_found_whole(
    installed: Environment, libraries: Libraries, tmp_path: Path
) -> None:
    """Neither the hook nor activation looks for packages of others, or remembers where they were not."""
    for folder, part in (("one", "first"), ("two", "second"), ("three", "third")):
        (tmp_path / folder / "shared").mkdir(parents=True)
        (tmp_path / folder / "shared" / f"{part}.py").write_text(f"name = {part!r}\n")
    code = f"""
    import sys
    sys.path.insert(0, {str(tmp_path / "two")!r})
    import shared.second
    import transformers
    sys.path.insert(0, {str(tmp_path / "three")!r})
    import shared.first, shared.third
    print(shared.first.name, shared.second.name, shared.third.name, "npu_patch" in sys.modules)
    """
    path = os.pathsep.join([str(tmp_path / "one"), libraries.path])
    result = installed.code(code, NPU_PATCH_OPS="rope", PYTHONPATH=path)
    assert result.stdout == "first second third True\n", result.stderr


@pytest.mark.slow
def test_a_program_that_only_loads_models_hears_nothing(installed: Environment) -> None:
    """Whatever of them is recognised or is not, ops that nobody named are not missed where they are never reached."""
    code = """
    import importlib, sys
    for model in ("llama", "clvp", "bert", "gpt_oss"):
        importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    states = {row.state for row in sys.modules["npu_patch"].status()}
    sys.stdout.write(f"{sorted(states & {'active', 'unrecognised'})}")
    """
    result = installed.code(code, NPU_PATCH_OPS="default", NPU_PATCH_SIMULATE="1", NPU_PATCH_REPORT="1")
    assert result.stdout.endswith("['active', 'unrecognised']"), result.stderr
    assert "npu_patch" not in result.stderr
