"""`npu-patch run`: a command with npu_patch switched on in every Python that it starts, and one report for them all.

The launcher stays the parent: it hands signals on, returns the command's status, and merges what the processes wrote
into one table on stderr (stdout belongs to the command).
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import merging, process, settings

SITE = str(Path(__file__).parent / "_site")
NOT_REACHED = 3
"""Exit status where the command succeeded and an op that was named ran nowhere."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_SI_KERNEL = 0x80  # a signal from the terminal, which the command has received as well


class UsageError(ValueError):
    """The command line asks for something that cannot be done; the message is one line that says what to do."""


@dataclass(frozen=True)
class Request:
    """What `run` was asked for; None: leave it to the environment."""

    command: Sequence[str]
    ops: str | None = None
    simulate: str | None = None
    strict: bool = False
    report: str | None = None


@dataclass(frozen=True)
class Plan:
    """What will be run; making one changes nothing."""

    command: Sequence[str]
    environment: Mapping[str, str]
    named: frozenset[str]
    enabled: bool
    simulated: bool
    keep: Path | None


def run(request: Request) -> int:
    """Run the command; returns the exit status.

    Raises:
        UsageError: something is wrong with the request; nothing was started.
    """
    plan = prepare(request)
    if plan.simulated:
        _build_simulator()
    nested = _around(plan.environment)
    with tempfile.TemporaryDirectory(prefix="npu_patch-", dir=nested) as temporary:
        folder = plan.keep or Path(temporary)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--report: cannot make the folder {str(folder)!r}: {error.strerror}") from None
        others = merging.files(folder)
        environment = {**plan.environment, "NPU_PATCH_REPORT": str(folder), process.LAUNCHER: str(folder)}
        status = _wait(_spawn(plan.command, environment))
        merged = merging.merge(merging.read(merging.files(folder) - others))
        missed = merged.without_hits(plan.named)
        if plan.keep is not None:
            process.write_atomically(folder / "merged.json", merged.to_json())
        if nested is not None and plan.keep is None:
            _hand_up(folder, nested)
        elif plan.enabled:
            _print(merged, missed)
    return NOT_REACHED if missed and status == 0 else status


def prepare(request: Request) -> Plan:
    """Check a request against this machine.

    Raises:
        UsageError: see `run`.
    """
    environment = dict(os.environ)
    if request.ops is not None:
        environment["NPU_PATCH_OPS"] = request.ops
    environment.setdefault("NPU_PATCH_OPS", "default")
    if request.strict:
        environment["NPU_PATCH_STRICT"] = "1"
    try:
        if request.ops is not None:
            settings.parse_ops(request.ops)
    except settings.SettingsError as error:
        raise UsageError(f"--ops={request.ops}: {error}") from None
    try:
        chosen = settings.from_environment(environment)
    except settings.SettingsError as error:
        raise UsageError(str(error)) from None
    keep = _kept_folder(request.report, chosen.report, environment)
    if request.simulate is not None:
        environment["NPU_PATCH_SIMULATE"] = request.simulate
    simulate = environment.get("NPU_PATCH_SIMULATE", "")
    simulated = request.simulate is not None or simulate.strip().lower() not in ("", "0", "off")
    command = _command(request.command)
    if simulated:
        _check_simulator("--simulate" if request.simulate is not None else "NPU_PATCH_SIMULATE", simulate)
    environment["PYTHONPATH"] = _python_path(environment.get("PYTHONPATH", ""))
    return Plan(command, environment, chosen.named, bool(chosen.enabled), simulated, keep)


def _command(command: Sequence[str]) -> list[str]:
    if not command:
        raise UsageError("no command was given: npu-patch run [options] [--] COMMAND [ARGUMENTS]")
    name = command[0]
    if name.endswith(".py"):
        if not os.path.isfile(name):
            raise UsageError(f"there is no file {name!r}")
        return [sys.executable, *command]
    if shutil.which(name) is None:
        found = os.path.exists(name) if os.sep in name else False
        raise UsageError(f"{name!r} is not a command that can be run" if found else f"there is no command {name!r}")
    return list(command)


def _python_path(path: str) -> str:
    """Our folder first, so that its sitecustomize is found; what the user has stays, empty entries included."""
    rest = [entry for entry in path.split(os.pathsep) if entry != SITE] if path else []
    return os.pathsep.join([SITE, *rest])


def _kept_folder(option: str | None, variable: str | None, environment: Mapping[str, str]) -> Path | None:
    """The folder that --report, or a user's NPU_PATCH_REPORT, names; made and checked here."""
    if option is None and (variable in (None, "1") or variable == environment.get(process.LAUNCHER)):
        return None
    name = option if option is not None else str(variable)
    if not name:
        raise UsageError("--report: expected a folder")
    try:
        folder = Path(name).expanduser().absolute()
        existing = folder
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
    except (OSError, RuntimeError) as error:  # RuntimeError: ~nobody; OSError: too long, or a work folder that is gone
        raise UsageError(f"cannot write reports to {name!r}: {error}") from None
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write reports to {name!r}: {existing} is not a writable folder")
    return folder


def _around(environment: Mapping[str, str]) -> Path | None:
    """The report folder of an `npu-patch run` around this one."""
    folder = environment.get(process.LAUNCHER)
    return Path(folder) if folder and os.path.isdir(folder) else None


def _check_simulator(name: str, text: str) -> None:
    from . import simulator

    try:
        devices, soc = simulator.parse_request(text)
        simulator.check(devices, soc)
    except (ValueError, simulator.SimulatorError) as error:
        raise UsageError(f"{name}={text}: {error}") from None


def _build_simulator() -> None:
    """Once, before there are children that would wait for each other."""
    from .simulator import SimulatorError, build

    try:
        build.build()
    except SimulatorError as error:
        raise UsageError(f"--simulate: {error}") from None


def _spawn(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Start the command with the signal mask and dispositions that this process was started with."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited "ignore" would lose the exit status
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})
    # Python ignores these two for itself.
    defaults = [signal.SIGPIPE, signal.SIGXFSZ]
    program = shutil.which(command[0]) or command[0]
    try:
        return os.posix_spawn(program, list(command), dict(environment), setsigmask=mask, setsigdef=defaults)
    except OSError as error:
        raise UsageError(f"cannot run {command[0]!r}: {error.strerror}") from None


def _wait(child: int) -> int:
    """Hand signals on until the child has ended; returns its status as a shell would."""
    while True:
        info = signal.sigwaitinfo({*FORWARDED, signal.SIGCHLD})
        if info.si_signo == signal.SIGCHLD:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
        elif info.si_code != _SI_KERNEL:
            os.kill(child, info.si_signo)


def _hand_up(folder: Path, around: Path) -> None:
    """Give the reports to the `npu-patch run` around this one, whose table then covers them."""
    for path in folder.rglob("*.json"):
        os.replace(path, around / path.name)


def _print(merged: merging.Merged, missed: Sequence[str]) -> None:
    lines = [str(merged)] if merged.rows or merged.notes else []
    if not merged.workers:
        lines.append("npu_patch: no Python process of this command reported that it imported model code")
    lines += [f"npu_patch: {op} was named but ran in no process" for op in missed]
    sys.stderr.write("".join(f"{line}\n" for line in lines if line))
