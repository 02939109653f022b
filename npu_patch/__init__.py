"""Ascend NPU fused operators for torchtitan and Hugging Face transformers, patched in at run time.

    import npu_patch                      # activates from the environment; default: every op whose default is on
    npu_patch.enable("rms_norm")          # switch on, beside what is on
    npu_patch.disable("rope")             # switch off; without an argument: everything
    with npu_patch.scope("rms_norm"): ... # inside: exactly these ops
    print(npu_patch.status())             # what is patched, how often it was reached, and why not

Importing this package imports neither torch nor a model library.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import npu_patch_startup

from . import settings as _settings
from .engine import Patcher, Scope
from .report import Row, Status
from .settings import SettingsError
from .tables import OpsTable, Strategy

__version__ = "0.1.0"

if getattr(npu_patch_startup, "INTERFACE", None) != 1:  # a leftover of another installation came first on the path
    raise ImportError(
        f"npu_patch {__version__} found the start-up module of another version, {npu_patch_startup.__file__}: "
        "uninstall npu_patch until pip finds none, then install it again"
    )

__all__ = [
    "Row",
    "SettingsError",
    "Status",
    "StrictError",
    "configure",
    "disable",
    "enable",
    "ops",
    "scope",
    "status",
    "strategy",
]

_patcher = Patcher()


def enable(*names: str) -> None:
    """Switch ops on, beside what is on.

    Args:
        names: ops, aliases or groups; none: every op whose default is on.

    Raises:
        SettingsError (a ValueError): an unknown name; nothing is changed then.
    """
    chosen = _resolve(names) if names else _settings.default_ops()
    _patcher.set(dict.fromkeys(chosen, True))


def disable(*names: str) -> None:
    """Switch ops off.

    Args:
        names: ops, aliases or groups; none: everything, in open scopes too, so that every original is back in place.

    Raises:
        SettingsError (a ValueError): an unknown name; nothing is changed then.
    """
    if names:
        _patcher.set(dict.fromkeys(_resolve(names), False))
    else:
        _patcher.clear()


def scope(*names: str, **changes: bool) -> Scope:
    """A block with other ops: `scope("rms_norm")` has exactly these on, `scope(rope=False)` changes the table outside.

    Scopes hold for the whole process (other threads see them) and may close in any order.  With activation
    checkpointing a scope must cover the backward pass too, since the forward runs again there.

    Raises:
        ValueError: names and keywords together, or neither.
        SettingsError (a ValueError): an unknown name.
    """
    if bool(names) == bool(changes):
        raise ValueError(
            "scope() takes op names (exactly these are on) or keywords such as rope=False (changes); "
            "not both, and not neither"
        )
    if names:
        return _patcher.scope(dict.fromkeys(_resolve(names), True), exact=True)
    for name, value in changes.items():
        if not isinstance(value, bool):
            raise ValueError(f"scope({name}={value!r}): expected True or False")
    return _patcher.scope({op: value for name, value in changes.items() for op in _resolve([name])}, exact=False)


def configure(op: str, **options: bool | int | float | str) -> None:
    """Set options of one op; `ops()` lists them.

    Raises:
        SettingsError (a ValueError): an unknown op or option, or a value of the wrong type; nothing is changed then.
    """
    (name,) = _one(op)
    _patcher.configure(name, {key: _settings.option_value(name, key, value) for key, value in options.items()})


def strategy() -> Strategy:
    """The whole effective strategy: op → {"enabled": bool, option: value, …}."""
    return Strategy(_patcher.strategy())


def status(model: Any = None) -> Status:
    """The state of every target.

    Args:
        model: a torch.nn.Module; adds rows for its modules whose own `forward` attribute hides a patched class.

    Raises:
        TypeError: the model is something else.
    """
    if model is not None and not hasattr(model, "named_modules"):
        raise TypeError(f"status() takes a torch.nn.Module or nothing, got a {type(model).__name__}")
    result = _patcher.status(model)
    if _state.error is not None:
        return Status(result.rows, (*result.notes, f"not active: {_state.error}"))
    return result


def ops_table() -> OpsTable:
    """The enable table: name, enabled, default, options, operators, summary of every op."""
    return OpsTable(_patcher.strategy())


ops = ops_table  # until the sub-package of this name is imported, which is callable for that reason


def _resolve(names: Any) -> set[str]:
    resolved: set[str] = set()
    for name in names:
        if not isinstance(name, str):
            raise SettingsError(f"expected the name of an op, got {name!r}")
        resolved.update(_settings.resolve(name))
    return resolved


def _one(op: str) -> tuple[str]:
    resolved = sorted(_resolve([op]))
    if len(resolved) != 1:
        raise SettingsError(f"{op!r} stands for several ops ({', '.join(resolved)}): configure one at a time")
    return (resolved[0],)


class _State:
    """What activation from the environment came to."""

    def __init__(self) -> None:
        self.activated = False
        self.error: SettingsError | None = None


_state = _State()


def _activate() -> None:
    """Take the settings from the environment, once.

    Raises:
        SettingsError: the environment cannot be understood; raised again by every later call.
    """
    if _state.error is not None:
        raise _state.error
    if _state.activated:
        return
    try:
        settings = _settings.from_environment()
    except SettingsError as error:
        _state.error = error
        raise
    _state.activated = True
    if settings.log is not None:
        _log_to_stderr(settings.log)
    for op, options in settings.options.items():
        _patcher.configure(op, options)
    _patcher.strict = settings.strict
    _patcher.named = settings.named
    _patcher.set(dict.fromkeys(settings.enabled, True))
    if settings.enabled or settings.report is not None:
        from . import process

        process.start(_patcher, settings.report)


def _about_to_import(root: str) -> None:
    """A model library is about to be imported (called by the start-up finder).

    Raises:
        SettingsError: the environment cannot be understood; the import fails with it, now and every later time.
    """
    _activate()
    _patcher.prepare(root)
    from . import process

    process.library_imported()


def _log_to_stderr(level: str) -> None:
    logger = logging.getLogger("npu_patch")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level.upper())


def __getattr__(name: str) -> Any:
    if name == "StrictError":  # lives where torch is needed
        from .sites import StrictError

        return StrictError
    if name == "simulator":
        import importlib

        return importlib.import_module("npu_patch.simulator")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


npu_patch_startup.watch()
if not npu_patch_startup.loading_simulator():
    try:
        _activate()
    except SettingsError as error:  # raised where a library is imported, so that it cannot be missed
        if os.path.basename((getattr(sys, "argv", None) or [""])[0]) not in ("-m", "npu-patch"):  # it says so itself
            logging.getLogger("npu_patch").warning("npu_patch: not active: %s", error)
