"""`npu-patch run`: arguments, signals, status, and one report for all processes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.packaging.environments import ROOT, clean_environment, reports

RUN = [sys.executable, "-m", "npu_patch", "run"]


def run(
    *words: str | Path, cwd: Path | None = None, launcher: Sequence[str] = RUN, **changes: str
) -> subprocess.CompletedProcess[str]:
    environment = {**clean_environment(PYTHONPATH=str(ROOT)), **changes}
    return subprocess.run(
        [*launcher, *map(str, words)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    """A command that starts ranks: `ranks.py HITS…`, a rank for each number; "kill" is one that is killed."""
    script = tmp_path / "ranks.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, subprocess, sys
        from tests.cli.stub import report

        if "RANK" not in os.environ:
            words = sys.argv[1:]
            size = {"WORLD_SIZE": str(len(words)), "LOCAL_WORLD_SIZE": str(len(words))}
            children = [
                subprocess.Popen(
                    [sys.executable, __file__, word], env={**os.environ, **size, "RANK": str(i), "LOCAL_RANK": str(i)}
                )
                for i, word in enumerate(words)
            ]
            for child in children:
                child.wait()
        elif sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            report(hits=int(sys.argv[1]), named=os.environ.get("NPU_PATCH_OPS", ""))
        """)
    )
    return script


BAD = [
    (["--ops", "rms_nrom", "COMMAND"], "rms_norm"),
    (["--ops=rms_norm:pack=1", "COMMAND"], "no option 'pack'"),
    (["--opps=rms_norm", "COMMAND"], "--ops"),
    (["--ops"], "needs a value"),
    (["--simulate=0", "COMMAND"], "from 1 to 16"),
    (["--simulate=many", "COMMAND"], "N or N:SOC"),
    (["--simulate=1:Ascend910Z", "COMMAND"], "Ascend910"),
    (["--strict=yes", "COMMAND"], "--strict"),
    (["there-is-no-such-command"], "there-is-no-such-command"),
    (["missing.py"], "missing.py"),
    (["/etc/passwd"], "/etc/passwd"),
    (["--report=/dev/null/folder", "COMMAND"], "/dev/null"),
    (["--report=", "COMMAND"], "--report"),
    (["--"], "no command"),
    ([], "no command"),
]


@pytest.mark.parametrize(("words", "says"), BAD, ids=[" ".join(words) or "nothing" for words, _ in BAD])
def test_bad_input_is_one_line_and_status_2_and_starts_nothing(words: list[str], says: str, tmp_path: Path) -> None:
    touch = [sys.executable, "-c", "open('started', 'w')"]
    command = [part for word in words for part in (touch if word == "COMMAND" else [word])]
    result = run(*command, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert says in line
    assert list(tmp_path.iterdir()) == []


def test_bad_variable_is_refused_before_the_command_starts(tmp_path: Path) -> None:
    result = run("touch", tmp_path / "started", NPU_PATCH_OPS="rms_nrom")
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "rms_norm" in result.stderr
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("words", [["rnu"], ["--no-such-option"], ["ops", "--jsn"]])
def test_unknown_action_or_option_is_one_line_and_status_2(words: list[str]) -> None:
    result = run(*words, launcher=RUN[:-1])
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)


def test_command_gets_its_own_options_and_its_output_stays_clean(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.executable, sys.argv[1:])")
    result = run("--ops", "all", script, "--ops", "x", "--", "--simulate")
    assert (result.returncode, result.stdout) == (0, f"{sys.executable} ['--ops', 'x', '--', '--simulate']\n")
    assert run("--", "echo", "--strict").stdout == "--strict\n"


@pytest.mark.parametrize(
    ("word", "variable", "seen"),
    [(None, None, "default"), (None, "rope", "rope"), ("rms_norm", "rope", "rms_norm"), (None, "none", "none")],
)
def test_ops_come_from_the_option_then_the_variable_then_the_default(
    word: str | None, variable: str | None, seen: str
) -> None:
    options = [] if word is None else ["--ops", word]
    changes = {} if variable is None else {"NPU_PATCH_OPS": variable}
    result = run(*options, "sh", "-c", "echo $NPU_PATCH_OPS/$NPU_PATCH_STRICT", **changes)
    assert result.stdout == f"{seen}/\n"
    if seen == "none":
        assert result.stderr == ""


def test_strict_reaches_the_command() -> None:
    assert run("--strict", "sh", "-c", "echo $NPU_PATCH_STRICT").stdout == "1\n"


def test_status_is_that_of_the_command() -> None:
    assert run("sh", "-c", "exit 7").returncode == 7
    assert run("sh", "-c", "kill -KILL $$").returncode == 128 + signal.SIGKILL
    assert run("sh", "-c", "kill -TERM $$").returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"])
def test_signals_are_handed_on(name: str) -> None:
    number = getattr(signal, name)
    code = f"""
import signal, sys
signal.signal(signal.{name}, lambda *_: sys.exit(9))
print("ready", flush=True)
signal.pause()
"""
    child = subprocess.Popen(
        [*RUN, sys.executable, "-c", code],
        env=clean_environment(PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(number)
    assert child.wait(timeout=30) == 9
    child.stdout.close()


def test_command_starts_with_the_signals_that_the_launcher_found() -> None:
    code = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []), repr(signal.getsignal(signal.SIGHUP)))"
    direct = run("-c", code, launcher=[sys.executable]).stdout
    assert run(sys.executable, "-c", code).stdout == direct
    ignored = ["sh", "-c", 'trap "" HUP CHLD; exec "$@"', "sh"]
    result = run(sys.executable, "-c", f"{code}; raise SystemExit(5)", launcher=[*ignored, *RUN])
    assert (result.returncode, "SIG_IGN" in result.stdout) == (5, True)


def test_ranks_are_merged_into_one_table_on_stderr(ranks: Path) -> None:
    result = run(ranks, 4, 7, NPU_PATCH_OPS="rms_norm")
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr.count("lib.m:Norm.forward") == 1
    assert "4-7" in result.stderr


def test_killed_rank_does_not_lose_the_report_of_the_others(ranks: Path) -> None:
    result = run(ranks, 4, "kill", 7)
    assert "4-7" in result.stderr
    assert "wrote no report: rank 1" in result.stderr


def test_named_op_that_ran_nowhere_is_status_3_and_said_once(ranks: Path) -> None:
    result = run("--ops", "rope", ranks, 4, 7)
    assert result.returncode == 3
    assert [line for line in result.stderr.splitlines() if "rope was named" in line] != []
    assert result.stderr.count("rope was named") == 1
    assert "never reached" not in result.stderr  # the ranks leave that to the launcher
    assert run("--ops", "rope", "sh", "-c", "exit 7").returncode == 7
    assert run("true").returncode == 0  # the default set names nothing


def test_report_folder_keeps_the_files_of_this_run_alone_in_the_merged_one(ranks: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept" / "here"
    run("--report", folder, ranks, 4, 7)
    assert len(reports(folder)) == 2
    run("--report", folder, ranks, 9)
    assert len(reports(folder)) == 3
    (row,) = json.loads((folder / "merged.json").read_text())["rows"]
    assert row["hits"] == {"rank 0": 9}
    variable = tmp_path / "variable"
    run(ranks, 4, NPU_PATCH_REPORT=str(variable))
    assert (variable / "merged.json").exists()


def test_nested_launchers_print_one_table_and_know_their_own_ops(ranks: Path) -> None:
    result = run("sh", "-c", '"$@" && "$@"', "sh", *RUN, "--ops", "rms_norm", ranks, 4)
    assert (result.returncode, result.stderr.count("lib.m:Norm.forward")) == (0, 1)
    assert " 8 " in result.stderr
    assert run(*RUN, "--ops", "rope", ranks, 4).returncode == 3


def test_python_path_of_the_user_is_kept_behind_ours(tmp_path: Path) -> None:
    show = ["sh", "-c", "echo $PYTHONPATH"]
    site = str(ROOT / "npu_patch" / "_site")
    assert run(*show, PYTHONPATH=f"{ROOT}:/a:/b").stdout == f"{site}:{ROOT}:/a:/b\n"
    assert run(*show, PYTHONPATH=f":{ROOT}:{site}").stdout == f"{site}::{ROOT}\n"  # an empty entry is the work folder
    bare = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); import npu_patch.__main__ as m; "]
    bare[-1] += "sys.exit(m.main(['run', 'sh', '-c', 'echo $PYTHONPATH']))"
    environment = clean_environment()
    assert "PYTHONPATH" not in environment
    assert subprocess.run(bare, env=environment, capture_output=True, text=True, check=True).stdout == f"{site}\n"


def test_no_folder_is_left_behind(tmp_path: Path) -> None:
    run("true", TMPDIR=str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_interrupt_from_the_terminal_reaches_the_command_once(tmp_path: Path) -> None:
    """The terminal sends it to the command as well, so the launcher must not send a second one."""
    code = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
print("ready", flush=True)
signal.sigwait({signal.SIGINT})
second = signal.sigtimedwait({signal.SIGINT}, 0.5)
print("interrupts:", 1 if second is None else 2, flush=True)
"""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [*RUN, sys.executable, "-c", code], clean_environment(PYTHONPATH=str(ROOT)))
    output = b""
    with contextlib.suppress(OSError):  # how a terminal says that the last program has left
        while chunk := os.read(terminal, 4096):
            output += chunk
            if b"ready" in output and b"^C" not in output:
                os.write(terminal, b"\x03")
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert b"interrupts: 1" in output


@pytest.mark.parametrize("folder", ["~nosuchuser/reports", "x" * 300, "/proc/reports"])
def test_a_report_folder_that_cannot_be_is_one_line(folder: str) -> None:
    result = run("--report", folder, "true")
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("npu-patch run: ")


def test_a_value_apart_from_simulate_is_explained() -> None:
    result = run("--simulate", "2", "--", "true")
    assert (result.returncode, result.stderr) == (2, "npu-patch run: write --simulate=2, without a space\n")
