"""Interpreter start-up: wait for the first import of a model library, then activate npu_patch.

`npu_patch.pth` (and `npu_patch.start` for Python 3.15) calls `start` in every interpreter whose environment asks for
npu_patch.  This module is not inside the package, because importing the package activates it, and it uses the standard
library alone, because it runs in every such interpreter, with or without torch.  What takes milliseconds to import
(typing, threading, contextlib, importlib.util) is imported only when there is something to do.

Errors raised here surface at the user's import line: a misspelt NPU_PATCH_OPS must not leave a training run unpatched.
"""

from __future__ import annotations

import importlib
import os
import sys
from _thread import _local

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any

INTERFACE = 1
"""Raised when the functions that the package uses here change; `start()` without arguments is there for ever, because
start-up files of other versions call it."""

LIBRARIES = ("torchtitan", "transformers")
RUNTIME = ("torch", "torch_npu")
_OFF = ("", "0", "off")


class _Finder:
    """Sees imports before the finders behind it; finds nothing of its own."""

    def __init__(self) -> None:
        self.local = _local()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        simulate = fullname in RUNTIME and _simulating()
        activate = fullname in LIBRARIES and ("npu_patch" in sys.modules or _asked())
        if not (activate or simulate) or getattr(self.local, "busy", False):
            return None
        self.local.busy = True
        try:
            if simulate:
                _load_simulator()
            else:
                importlib.import_module("npu_patch")._about_to_import(fullname)
            # Hooks registered just now sit in front of this finder: search again, so that this very import sees them.
            return importlib.import_module("importlib.util").find_spec(fullname)
        finally:
            self.local.busy = False


_FINDER = _Finder()


def start() -> None:
    """Wait for a model library, or for torch where an NPU is simulated, if the environment asks for it."""
    if _asked() or _simulating():
        watch()


def watch() -> None:
    """Wait for a model library; may be called again (a virtual environment runs every .pth file twice)."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)  # type: ignore[arg-type]


def loading_simulator() -> bool:
    """Whether the package is being imported for its simulator alone, which activates nothing."""
    return bool(getattr(_FINDER.local, "simulator", False))


class for_simulator:
    """Inside, importing the package activates nothing; afterwards a first `import npu_patch` of the user's still does.

    Needed wherever the simulator imports parts of itself unasked, since that imports the package again.
    """

    def __enter__(self) -> None:
        self.known = "npu_patch" in sys.modules
        self.before = loading_simulator()
        _FINDER.local.simulator = self.before or not self.known

    def __exit__(self, *error: object) -> None:
        _FINDER.local.simulator = self.before
        if not self.known:
            sys.modules.pop("npu_patch", None)


def _asked() -> bool:
    return os.environ.get("NPU_PATCH_OPS", "").strip().lower() not in (*_OFF, "none", "false", "no")


def _simulating() -> bool:
    return os.environ.get("NPU_PATCH_SIMULATE", "").strip().lower() not in _OFF


def _load_simulator() -> None:
    with for_simulator():
        importlib.import_module("npu_patch.simulator").load()
