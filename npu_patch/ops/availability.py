"""Whether an NPU can be used, and what the installed torch_npu offers.

Nothing here imports torch_npu against the user's will, and nothing initialises the device: `torch.npu.is_initialized()`
stays False until the user's first tensor, so that forked children can still use the device.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from typing import Any

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


@dataclass(frozen=True)
class Unavailable:
    """Why no NPU can be used.

    Args:
        reason: one line.
        final: asking again in this process gives the same answer.
    """

    reason: str
    final: bool


def why_unavailable() -> Unavailable | None:
    """Why no NPU can be used right now, or None when one can.

    torch imports torch_npu itself unless TORCH_DEVICE_BACKEND_AUTOLOAD says otherwise; torch_npu is imported here only
    where torch would have done so too.
    """
    module = sys.modules.get("torch_npu")
    if module is None:
        if not _installed():
            return Unavailable("torch_npu is not installed", final=True)
        autoload = os.environ.get(_AUTOLOAD, "1")
        if autoload != "1":  # the comparison that torch makes
            return Unavailable(f"torch_npu is installed but not imported ({_AUTOLOAD}={autoload})", final=False)
    if _importing("torch") or _importing("torch_npu"):
        return Unavailable("torch_npu is still being imported", final=False)
    try:
        torch = importlib.import_module("torch")
        importlib.import_module("torch_npu")
    except Exception as error:  # a broken installation raises anything: OSError, ImportError, RuntimeError
        return Unavailable(f"torch_npu cannot be imported: {_first_line(_cause(error))}", final=True)
    npu = getattr(torch, "npu", None)
    if npu is None:
        return Unavailable("torch_npu is imported but did not register torch.npu", final=True)
    try:
        if npu.device_count() == 0:
            return Unavailable("no NPU is visible: torch.npu.device_count() is 0", final=True)
        if not npu.is_available():
            return Unavailable("no NPU can be used: torch.npu.is_available() is False", final=True)
    except Exception as error:
        return Unavailable(f"torch_npu cannot count its devices: {_first_line(error)}", final=True)
    return None


def _installed() -> bool:
    try:
        return importlib.util.find_spec("torch_npu") is not None
    except (ImportError, ValueError):  # ValueError: a stand-in module without a spec
        return False


_executed: set[str] = set()


def executed(name: str) -> None:
    """A post-import hook of `name` runs: all of it is there, although the import system still calls it unfinished."""
    _executed.add(name)


def _importing(name: str) -> bool:
    if name in _executed:
        return False
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _cause(error: BaseException) -> BaseException:
    """What torch_npu itself said: torch wraps it while loading its back ends."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _npu() -> Any:
    """torch.npu, or None."""
    return getattr(sys.modules.get("torch"), "npu", None)


_soc_name = ""
_schema_answers: dict[tuple[str, str | None], bool] = {}


def soc_name() -> str:
    """The chip's name ("Ascend910B1"), or "" while the device is not initialised or the name cannot be read."""
    global _soc_name
    if not _soc_name:
        npu = _npu()
        if npu is not None and npu.is_initialized():
            try:
                _soc_name = str(npu.get_device_name())
            except Exception:  # limits of the oldest supported chip then hold
                return ""
    return _soc_name


def is_ascend950() -> bool:
    """True on the Ascend 950 family, whose limits and operator set differ from A2 and A3."""
    return soc_name().startswith("Ascend950")


def schema_has(operator: str, argument: str | None = None) -> bool:
    """True when the installed torch_npu has `torch.ops.npu.<operator>` (with an argument of that name).

    X.Y.Z and X.Y.Z.postN wheels of torch_npu carry different operators, so version numbers say nothing.
    """
    key = (operator, argument)
    known = _schema_answers.get(key)
    if known is None:
        try:
            schema = getattr(sys.modules["torch"].ops.npu, operator).default._schema
        except (AttributeError, KeyError):
            return False  # not remembered: torch_npu may be imported later
        known = argument is None or any(a.name == argument for a in schema.arguments)
        _schema_answers[key] = known
    return known


# What torch.compiler.assume_constant_result sets, without importing torch._dynamo: torch.compile runs these functions
# while it traces and takes the answers as constants.
for _function in (soc_name, is_ascend950, schema_has):
    _function.__dict__["_dynamo_marked_constant"] = True
