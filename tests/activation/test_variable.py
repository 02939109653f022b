"""NPU_PATCH_OPS alone activates in every Python of the environment (through npu_patch.pth)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.packaging.environments import Environment, Libraries, reports

ACTIVE = "'npu_patch' in sys.modules and [op for op, v in sys.modules['npu_patch'].strategy().items() if v['enabled']]"


def test_first_import_of_a_library_activates_the_named_ops(installed: Environment, libraries: Libraries) -> None:
    code = f"""
    import sys
    print("npu_patch" in sys.modules, "wrapt" in sys.modules)
    import {{library}}
    print({ACTIVE}, "torch" in sys.modules)
    """
    for library in ("transformers", "torchtitan"):
        result = installed.code(code.format(library=library), NPU_PATCH_OPS="rms_norm", PYTHONPATH=libraries.path)
        assert result.stdout == "False False\n['rms_norm'] False\n", result.stderr
        assert result.stderr == ""


@pytest.mark.parametrize("value", ["", "0", "off", "none"])
def test_nothing_is_loaded_where_the_variable_says_no(installed: Environment, libraries: Libraries, value: str) -> None:
    code = "import sys, transformers, torchtitan; print('npu_patch' in sys.modules)"
    assert installed.code(code, NPU_PATCH_OPS=value, PYTHONPATH=libraries.path).stdout == "False\n"


@pytest.mark.parametrize(("flags", "active"), [(["-I"], True), (["-E"], True), (["-s"], True), (["-S"], False)])
def test_isolated_modes(installed: Environment, libraries: Libraries, flags: list[str], active: bool) -> None:
    """Without `site` (-S) no start-up file is read: there `import npu_patch` is the way."""
    code = f"import sys; sys.path.insert(0, {libraries.path!r}); import transformers; print('npu_patch' in sys.modules)"
    assert installed.code(code, *flags, NPU_PATCH_OPS="rms_norm").stdout == f"{active}\n"


def test_misspelt_variable_stops_the_first_import_and_every_later_one(
    installed: Environment, libraries: Libraries
) -> None:
    code = """
    import importlib
    for library in ("transformers", "transformers", "torchtitan"):
        try:
            importlib.import_module(library)
        except ValueError as error:
            print(error)
    import npu_patch
    print(npu_patch.status().notes)
    import transformers
    """
    result = installed.code(code, NPU_PATCH_OPS="rms_nrom", PYTHONPATH=libraries.path)
    *errors, notes = result.stdout.splitlines()
    assert len(errors) == 3
    assert all("NPU_PATCH_OPS='rms_nrom'" in line and "did you mean 'rms_norm'" in line for line in [*errors, notes])
    assert result.returncode == 1
    assert "did you mean 'rms_norm'" in result.stderr.splitlines()[-1]


def test_misspelt_variable_stops_no_python_that_imports_no_library(installed: Environment) -> None:
    result = installed.code("print('ran')", NPU_PATCH_OPS="rms_nrom")
    assert (result.returncode, result.stdout, result.stderr) == (0, "ran\n", "")


def test_forked_spawned_and_forkserver_processes(installed: Environment, libraries: Libraries, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import multiprocessing, subprocess, sys

def work(queue):
    import transformers
    queue.put({ACTIVE})

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=work, args=(queue,))
        child.start()
        print(method, queue.get())
        child.join()
    import transformers
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    print("fork after activation", queue.get())
    child.join()
    code = "import sys, transformers; print('subprocess', {ACTIVE})"
    subprocess.run([sys.executable, "-c", code.replace('"', "'")])
""".replace("'subprocess', 'npu_patch'", "\\'subprocess\\', \\'npu_patch\\'")
    )
    result = installed.run([installed.python, script], NPU_PATCH_OPS="rms_norm", PYTHONPATH=libraries.path)
    assert result.stderr == ""
    ways = ("fork", "spawn", "forkserver", "fork after activation", "subprocess")
    assert sorted(result.stdout.splitlines()) == sorted(f"{way} ['rms_norm']" for way in ways)


RANKS = """
import multiprocessing, os, sys
import torch
from torch.utils.data import DataLoader
from transformers.models.tiny.modeling_tiny import TinyRMSNorm
import npu_patch

def call(times):
    norm = TinyRMSNorm(64).to("npu")
    for _ in range(times):
        norm(torch.randn(4, 64, device="npu"))
    return TinyRMSNorm.forward

class Calls(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return float(any(row.state == "active" for row in sys.modules["npu_patch"].status()))

def child(queue):
    torch.npu.set_device(0)
    call(2)
    queue.put(npu_patch.status().hits("rms_norm"))

if __name__ == "__main__":
    assert not torch.npu.is_initialized()
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        assert queue.get(timeout=120) == 2, method
        process.join()
    assert [batch.item() for batch in DataLoader(Calls(), num_workers=1)] == [1.0, 1.0]
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    call(3 + int(os.environ["RANK"]))
"""


@pytest.mark.slow
def test_torchrun_ranks_their_children_and_loading_workers_are_patched(
    installed: Environment, libraries: Libraries, tmp_path: Path
) -> None:
    """Of the wheel, not editable, with nothing but variables. Activation initialises no device: children can use it."""
    (tmp_path / "ranks.py").write_text(RANKS)
    folder = tmp_path / "reports"
    result = installed.run(
        [installed.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "ranks.py"],
        cwd=tmp_path,
        NPU_PATCH_OPS="rms_norm",
        NPU_PATCH_SIMULATE="2",
        NPU_PATCH_REPORT=str(folder),
        PYTHONPATH=libraries.path,
    )
    assert result.returncode == 0, result.stderr
    counts = [(report["rank"], row["hits"]) for report in reports(folder) for row in report["rows"] if row["hits"]]
    assert sorted(counts) == [(0, 2), (0, 2), (0, 3), (1, 2), (1, 2), (1, 4)]
    assert all(report["named"] == ["rms_norm"] for report in reports(folder))
    json.dumps(reports(folder))
