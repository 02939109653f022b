"""The command line: `npu-patch` and `python -m npu_patch`."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import NoReturn

import npu_patch

from . import settings
from .tables import OpsTable

PROGRAM = "npu-patch"
_RUN_OPTIONS = {"--ops": True, "--simulate": False, "--strict": False, "--report": True, "--help": False, "-h": False}
"""The options of `run` → whether the next word is their value."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage."""
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    table = _ops_of_environment()
    npu_patch.disable()  # nothing is patched in this process, whatever it imports
    parser = _parser()
    command: list[str] = []
    if words[:1] == ["run"]:
        try:
            options, command = _split(words[1:])
        except ValueError as error:
            parser.exit(2, f"{PROGRAM} run: {error}\n")
        words = ["run", *options]
    chosen = parser.parse_args(words)
    if chosen.action == "ops":
        return _ops(table, chosen.json)
    if chosen.action == "run":
        return _run(chosen, command)
    if chosen.action == "doctor":
        from .tools import doctor

        return doctor.main()
    if chosen.action == "coverage":
        return _coverage(chosen)
    parser.print_help(sys.stderr)
    return 2


def _parser() -> _Parser:
    parser = _Parser(prog=PROGRAM, description="Ascend NPU fused operators at run time.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"npu_patch {npu_patch.__version__}")
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    ops = actions.add_parser("ops", help="show the ops and which of them the environment switches on")
    ops.add_argument("--json", action="store_true", help="as JSON")
    run = actions.add_parser(
        "run",
        help="run a command with npu_patch switched on in every Python that it starts",
        usage=f"{PROGRAM} run [--ops OPS] [--simulate[=N[:SOC]]] [--strict] [--report DIR] [--] COMMAND [ARGUMENTS]",
        description="Runs a command (a file that ends in .py is run with this Python) with npu_patch switched on in "
        "every Python that it starts. Prints one table for all its processes on stderr and returns the command's "
        "status, or 3 where the command succeeded and an op that was named ran nowhere.",
        allow_abbrev=False,
    )
    run.add_argument("--ops", help="as NPU_PATCH_OPS: rms_norm,rope or default,-rope or all; default: that variable")
    run.add_argument("--simulate", metavar="N[:SOC]", help="simulate N Ascend NPUs; without a value 1")
    run.add_argument("--strict", action="store_true", help="a fallback to the original is an error")
    run.add_argument("--report", metavar="DIR", help="keep the processes' reports and the merged one in this folder")
    coverage = actions.add_parser(
        "coverage", help="show what of the installed model libraries is recognised, as what, and what is not and why"
    )
    coverage.add_argument("--library", metavar="L", help="torchtitan or transformers; default: all installed ones")
    coverage.add_argument("--model", metavar="NAME", help="one model, by its folder: names instead of counts")
    coverage.add_argument("--json", action="store_true", help="as JSON, one object per candidate")
    actions.add_parser("doctor", help="say whether and why npu_patch can or cannot work here")
    return parser


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The launcher's own options and the command, which begins at the first word that is no option.

    argparse alone would take `--simulate python` for a value and an unknown option for the command.

    Raises:
        ValueError: an option that `run` does not have.
    """
    options: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, _ = word.partition("=")
        if name not in _RUN_OPTIONS:
            close = difflib.get_close_matches(name, _RUN_OPTIONS, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"unknown option {name}{hint}")
        if _RUN_OPTIONS[name] and not equals:
            if not rest:
                raise ValueError(f"{name} needs a value")
            word = f"{name}={rest.pop(0)}"
        elif name == "--simulate" and not equals:
            word = "--simulate=1"
        options.append(word)
        if word == "--simulate=1" and not equals and rest and rest[0].partition(":")[0].isdigit():
            raise ValueError(f"write --simulate={rest[0]}, without a space")
    return options, rest


def _run(chosen: argparse.Namespace, command: list[str]) -> int:
    from . import launcher

    request = launcher.Request(command, chosen.ops, chosen.simulate, chosen.strict, chosen.report)
    try:
        return launcher.run(request)
    except launcher.UsageError as error:
        sys.stderr.write(f"{PROGRAM} run: {error}\n")
        return 2


def _coverage(chosen: argparse.Namespace) -> int:
    from .tools import coverage

    try:
        return coverage.main(chosen.library, chosen.model, chosen.json)
    except coverage.UsageError as error:
        sys.stderr.write(f"{PROGRAM} coverage: {error}\n")
        return 2


def _ops_of_environment() -> OpsTable | settings.SettingsError:
    """The table as a process with this environment has it; without NPU_PATCH_OPS, as after `import npu_patch`."""
    try:
        settings.from_environment(os.environ)
    except settings.SettingsError as error:
        return error
    return npu_patch.ops()


def _ops(table: OpsTable | settings.SettingsError, as_json: bool) -> int:
    if isinstance(table, settings.SettingsError):
        sys.stderr.write(f"{PROGRAM} ops: {table}\n")
        return 2
    print(json.dumps([asdict(row) for row in table], indent=1) if as_json else table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
