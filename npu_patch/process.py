"""What a process does with its report: a table or a file at its end, and a word about ops that were never reached.

A forked child and a terminated worker run no atexit, and a killed process runs nothing at all.  So the end is watched
in three ways (atexit, multiprocessing's finalizers, SIGTERM), and a folder also gets a file every minute.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import platform
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from multiprocessing import parent_process, util
from pathlib import Path
from types import FrameType
from typing import Any

from .engine import Patcher
from .report import Row, Status

log = logging.getLogger("npu_patch")

LAUNCHER = "NPU_PATCH_LAUNCHER"
"""Set by `npu-patch run` to its report folder: it prints the table and the warnings for all processes together."""
INTERVAL = 60.0


def start(patcher: Patcher, report: str | None) -> None:
    """Arrange for the end of this process and of its forked children; a second call does nothing.

    Args:
        patcher: whose status is reported.
        report: None (warnings only), "1" (a table on stderr) or a folder that takes one JSON file per process.
    """
    global _reporter
    if _reporter is None:
        _reporter = Reporter(patcher, report)
        _reporter.watch()
    if patcher.touched():
        _reporter.patching()


def library_imported() -> None:
    """A model library is about to be imported: from now on there may be something to lose."""
    if _reporter is not None:
        _reporter.patching()


class Reporter:
    """The report of this process; after a fork, that of the child."""

    def __init__(self, patcher: Patcher, report: str | None) -> None:
        self.patcher = patcher
        self.table = report == "1"
        self.folder = None if report is None or self.table else _folder(report)
        self.launched = report is not None and os.environ.get(LAUNCHER) == report
        self._ready = False
        self._begin(forked=False)

    def _begin(self, forked: bool) -> None:
        self.forked = forked
        self._done = False
        self._stop = threading.Event()
        self._files = threading.RLock()

    def watch(self) -> None:
        """Have `finish` called at the end of this process, however it comes."""
        atexit.register(self.finish)
        util.Finalize(None, self.finish, exitpriority=-100)
        os.register_at_fork(after_in_child=self._forked)
        util.register_after_fork(self, Reporter._multiprocessing_child)

    def patching(self) -> None:
        """Be ready for a sudden end; processes that patch nothing get neither a signal handler nor a thread."""
        if self._ready or not (self.table or self.folder):
            return
        self._ready = True
        self._catch_sigterm()
        self._write_regularly()

    def _forked(self) -> None:
        self.patcher.after_fork()  # whatever else: the child counts its own calls
        self._begin(forked=True)

    def _multiprocessing_child(self) -> None:
        # Such a child leaves through os._exit, after its finalizers; those of the parent were dropped at the fork.
        util.Finalize(None, self.finish, exitpriority=-100)
        if self._ready:
            self._write_regularly()

    def _catch_sigterm(self) -> None:
        """Report before SIGTERM ends the process, where nobody else handles it.

        Python handlers run between two bytecodes: a process stuck inside one C call dies only when that returns, or
        of the SIGKILL that follows (torchrun sends it after 30 seconds).
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminated)

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        self.finish(print_=_print_unbuffered)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _write_regularly(self) -> None:
        if self.folder is None:
            return
        stop = self._stop

        def run() -> None:
            while not stop.wait(INTERVAL):
                self._guarded(lambda: self._write(complete=False))

        threading.Thread(target=run, name="npu_patch report", daemon=True).start()

    # ---- the end ---------------------------------------------------------------------------------------------------

    def finish(self, print_: Callable[[str], None] | None = None) -> None:
        """Report; only the first call does anything."""
        if self._done:
            return
        self._done = True
        self._stop.set()
        self._guarded(lambda: self._write(complete=True))
        self._guarded(lambda: self._say(print_ or _print))

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:  # a report must not change how a program ends
            log.warning("npu_patch: no report from this process", exc_info=True)

    def _say(self, print_: Callable[[str], None]) -> None:
        """The table, and the ops that were asked for and never reached: one process of a node speaks."""
        if self.launched or _integer("LOCAL_RANK") not in (None, 0):
            return
        status = self.patcher.status()
        if self.table and _counted(status):
            print_(f"{status}\n")
        if self.patcher.named and self._ran_models():
            for op in unreached(self.patcher):
                print_(f"npu_patch: {op} is named in NPU_PATCH_OPS but was never reached{_why(op, status.rows)}\n")

    def _ran_models(self) -> bool:
        """Whether it is this process whose calls were expected.

        Not so: data loading workers, and a parent whose children train.  A machine without an NPU was warned about.
        """
        if not self.patcher.touched() or self.patcher.hopeless():
            return False
        npu = getattr(sys.modules.get("torch"), "npu", None)
        if npu is not None and npu.is_initialized():
            return True
        has_children = "multiprocessing.popen_fork" in sys.modules  # imported when the first one is started
        return parent_process() is None and not self.forked and not has_children

    def _write(self, complete: bool) -> None:
        if self.folder is None or not self.patcher.touched():
            return
        status = self.patcher.status()
        if self.forked and not _counted(status):
            return  # has the parent's patches and no calls of its own
        about = _about_process()
        report = {**about, **_about_patches(self.patcher, status), "complete": complete}
        with self._files:
            if self._done and not complete:
                return  # the last word has been written
            try:
                write_atomically(self.folder / _file_name(about), json.dumps(report, indent=1))
            except OSError as error:
                folder, self.folder = self.folder, None
                if not self.launched:  # where npu-patch run has ended before this process, nobody waits for the file
                    log.warning("npu_patch: no report from this process: cannot write to %s: %s", folder, error)


_reporter: Reporter | None = None


def unreached(patcher: Patcher) -> list[str]:
    """Ops that the user named, that are still on, and that no call reached in this process."""
    return sorted(op for op in patcher.named if patcher.enabled(op) and not patcher.reached(op))


def write_atomically(path: Path, content: str) -> None:
    """Write so that a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        temporary.write_text(content, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _folder(report: str) -> Path | None:
    try:
        folder = Path(report).expanduser().absolute()  # the process may change its directory
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: ~nobody
        if _integer("LOCAL_RANK") in (None, 0):
            log.warning("npu_patch: no report: NPU_PATCH_REPORT=%s: %s", report, error)
        return None
    return folder


def _counted(status: Status) -> bool:
    return any(row.hits or row.fallbacks or row.state == "compiled" for row in status.rows)


def _why(op: str, rows: tuple[Row, ...]) -> str:
    """What is known of the op's targets, most telling first: ": 2 unrecognised, 1 active"."""
    states: dict[str, int] = {}
    for row in rows:
        if row.op == op and row.state != "waiting":
            states[row.state] = states.get(row.state, 0) + 1
    found = ", ".join(f"{count} {state}" for state, count in states.items())
    return f" (its targets: {found})" if found else " (no module with targets was imported)"


def _integer(variable: str) -> int | None:
    try:
        return int(os.environ[variable])
    except (KeyError, ValueError):
        return None


def _about_process() -> dict[str, Any]:
    rank, world_size = _integer("RANK"), _integer("WORLD_SIZE")
    distributed = sys.modules.get("torch.distributed")
    if rank is None and distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank, world_size = distributed.get_rank(), distributed.get_world_size()  # started without torchrun
    return {
        "host": platform.node(),
        "rank": rank,
        "local_rank": _integer("LOCAL_RANK"),
        "world_size": world_size,
        "local_world_size": _integer("LOCAL_WORLD_SIZE"),
        "pid": os.getpid(),
        "argv0": (getattr(sys, "argv", None) or [""])[0],
        "time": time.time(),
    }


def _about_patches(patcher: Patcher, status: Status) -> dict[str, Any]:
    from . import __version__

    return {
        "version": __version__,
        "named": sorted(patcher.named),
        "unreached": unreached(patcher),
        "rows": [asdict(row) for row in status.rows],
        "notes": list(status.notes),
    }


def _file_name(about: Mapping[str, Any]) -> str:
    host = re.sub(r"[^\w.-]", "_", about["host"]) or "host"
    return f"{host}-{'none' if about['rank'] is None else about['rank']}-{about['pid']}.json"


def _print(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(text)


def _print_unbuffered(text: str) -> None:
    """From a signal handler: the program may be in the middle of a write to sys.stderr, which takes no second one."""
    os.write(2, text.encode("utf-8", "replace"))
