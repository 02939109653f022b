"""What a process leaves behind at its end, however it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.environments import ROOT, clean_environment, reports


def run(code: str, wait: bool = True, **changes: str) -> Any:
    """Run code that has `report` of tests.cli.stub."""
    code = "from tests.cli.stub import report\n" + textwrap.dedent(code)
    environment = clean_environment(PYTHONPATH=str(ROOT), NPU_PATCH_OPS="none", **changes)
    child = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    if not wait:
        return child
    out, err = child.communicate(timeout=60)
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


def test_folder_gets_one_file_that_says_who_wrote_it(tmp_path: Path) -> None:
    result = run(
        "report(hits=5, named='rms_norm rope', fallbacks={'a reason': 2})",
        NPU_PATCH_REPORT=str(tmp_path / "new" / "folder"),
        RANK="1",
        LOCAL_RANK="1",
        WORLD_SIZE="4",
    )
    assert result.returncode == 0
    (path,) = (tmp_path / "new" / "folder").iterdir()
    assert re.fullmatch(r".+-1-\d+\.json", path.name)
    (report,) = reports(path.parent)
    (row,) = report["rows"]
    assert (row["hits"], row["fallbacks"]) == (5, {"a reason": 2})
    expected = {"rank": 1, "local_rank": 1, "world_size": 4, "named": ["rms_norm", "rope"], "unreached": ["rope"]}
    assert expected.items() <= report.items()
    assert report["complete"] is True
    assert {"version", "host", "pid", "argv0", "notes"} <= set(report)


def test_process_that_imported_no_model_library_writes_and_says_nothing(tmp_path: Path) -> None:
    result = run("report(named='rms_norm').imported = False", NPU_PATCH_REPORT=str(tmp_path))
    assert (result.stderr, list(tmp_path.iterdir())) == ("", [])


@pytest.mark.parametrize(
    ("changes", "shown"), [({}, True), ({"LOCAL_RANK": "0"}, True), ({"LOCAL_RANK": "1", "RANK": "1"}, False)]
)
def test_table_is_printed_by_one_process_of_a_node_on_stderr(changes: dict[str, str], shown: bool) -> None:
    result = run("report(hits=5)", NPU_PATCH_REPORT="1", **changes)
    assert result.stdout == ""
    assert ("lib.m:Norm.forward" in result.stderr) == shown


def test_no_table_where_nothing_was_reached() -> None:
    assert run("report()", NPU_PATCH_REPORT="1").stderr == ""


def test_unreached_named_op_is_warned_about_once_at_exit() -> None:
    result = run("report(hits=1, named='rms_norm rope')")
    (line,) = result.stderr.splitlines()
    assert "rope" in line
    assert "never reached" in line
    assert run("report(named='rope')", LOCAL_RANK="1").stderr == ""
    assert run("report(named='rope').no_npu = True").stderr == ""  # warned about when that was found


def test_parent_whose_children_train_is_not_warned_about() -> None:
    code = """
    import multiprocessing
    report(named="rms_norm")
    child = multiprocessing.get_context("fork").Process(target=print)
    child.start(); child.join()
    """
    assert run(code).stderr == ""


def test_forked_and_spawned_children_report_their_own_calls(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import multiprocessing, os, sys
        from tests.cli.stub import report

        patcher = report(hits=5)

        def work(hits):
            patcher.hits += hits

        if __name__ == "__main__":
            for method in ("fork", "spawn", "forkserver"):
                child = multiprocessing.get_context(method).Process(target=work, args=(2,))
                child.start(); child.join()
            if os.fork() == 0:  # without multiprocessing: leaves through atexit
                patcher.hits += 3
                sys.exit()
            os.wait()
            if os.fork() == 0:
                os._exit(0)
            os.wait()
        """)
    )
    folder = tmp_path / "reports"
    environment = clean_environment(PYTHONPATH=str(ROOT), NPU_PATCH_OPS="none", NPU_PATCH_REPORT=str(folder))
    subprocess.run([sys.executable, script], env=environment, check=True, timeout=60)
    # Parent 5; fork 0+2; spawn and forkserver run the script again, 5+2; bare fork 0+3.
    assert sorted(report["rows"][0]["hits"] for report in reports(folder)) == [2, 3, 5, 7, 7]
    assert all(report["complete"] for report in reports(folder))


def test_forked_child_without_calls_writes_nothing(tmp_path: Path) -> None:
    code = """
    import multiprocessing
    report(hits=5)
    child = multiprocessing.get_context("fork").Process(target=print)
    child.start(); child.join()
    """
    run(code, NPU_PATCH_REPORT=str(tmp_path))
    assert len(reports(tmp_path)) == 1


def test_sigterm_reports_and_still_ends_the_process(tmp_path: Path) -> None:
    code = "report(hits=5); print('ready', flush=True); import time; time.sleep(60)"
    child = run(code, wait=False, NPU_PATCH_REPORT=str(tmp_path))
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=30)
    assert child.returncode == -signal.SIGTERM
    assert [report["complete"] for report in reports(tmp_path)] == [True]


def test_sigterm_handler_of_the_program_is_left_alone(tmp_path: Path) -> None:
    code = """
    import signal
    mine = lambda *_: None
    signal.signal(signal.SIGTERM, mine)
    report(hits=5)
    print(signal.getsignal(signal.SIGTERM) is mine)
    """
    assert run(code, NPU_PATCH_REPORT=str(tmp_path)).stdout == "True\n"


def test_no_handler_outside_the_main_thread_or_without_a_report(tmp_path: Path) -> None:
    code = """
    import signal, threading
    thread = threading.Thread(target=report, kwargs={"hits": 5})
    thread.start(); thread.join()
    print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    """
    result = run(code, NPU_PATCH_REPORT=str(tmp_path))
    assert (result.stdout, result.stderr, len(reports(tmp_path))) == ("True\n", "", 1)
    assert run("import signal; report(); print(signal.getsignal(15) == signal.SIG_DFL)").stdout == "True\n"


def test_killed_process_leaves_its_last_regular_write(tmp_path: Path) -> None:
    code = """
    import os, pathlib, signal, time
    from npu_patch import process
    process.INTERVAL = 0.01
    report(hits=5)
    while not list(pathlib.Path(os.environ["NPU_PATCH_REPORT"]).glob("*.json")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run(code, NPU_PATCH_REPORT=str(tmp_path)).returncode == -signal.SIGKILL
    assert [report["complete"] for report in reports(tmp_path)] == [False]


def test_unwritable_folder_is_one_warning_and_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("report(hits=5); print('ran')", NPU_PATCH_REPORT=str(tmp_path / "file"))
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (0, "ran\n", 1)
    assert str(tmp_path / "file") in result.stderr
    vanishing = f"report(hits=5); import os; os.rmdir({str(tmp_path / 'gone')!r}); print('ran')"
    result = run(vanishing, NPU_PATCH_REPORT=str(tmp_path / "gone"))
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (0, "ran\n", 1)


def test_report_changes_no_exit_status(tmp_path: Path) -> None:
    assert run("report(hits=5); raise SystemExit(7)", NPU_PATCH_REPORT=str(tmp_path)).returncode == 7
    assert run("report(hits=5); import os; os.chdir('/')", NPU_PATCH_REPORT=os.path.relpath(tmp_path)).returncode == 0
    assert len(reports(tmp_path)) == 2
