"""Found through PYTHONPATH under `npu-patch run`: starts npu_patch, then hands over to the file that this one hides.

Works where .pth files are not read (`pip install --target`, a source checkout, another virtual environment).  Only two
names are made importable from here, so that nothing else of this installation shadows or completes the user's.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from typing import Any


class _Beside:
    """The last resort for an interpreter that has no npu_patch of its own: the one that this file belongs to."""

    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname in ("npu_patch", "npu_patch_startup"):
            return importlib.machinery.PathFinder.find_spec(fullname, [self.root])
        return None


def _start() -> None:
    if not any(type(finder).__name__ == "_Beside" for finder in sys.meta_path):
        sys.meta_path.append(_Beside())  # type: ignore[arg-type]
    try:
        # May be of another version than this file: start(), without arguments, is all that the two agree on.
        importlib.import_module("npu_patch_startup").start()
    except (Exception, SystemExit) as error:  # either would end or disturb the start of every Python
        sys.stderr.write(f"npu_patch: not active in this process: {error!r}\n")


def _hand_over() -> None:
    """Run the next sitecustomize on the path, as if this one were not there."""
    here = os.path.dirname(os.path.abspath(__file__))
    path = [os.path.abspath(entry or ".") for entry in sys.path]
    # What stands before this folder did not have one; an npu-patch run around this one may come after it.
    behind = [entry for entry in path[path.index(here) + 1 :] if entry != here] if here in path else path
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", behind)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_start()
_hand_over()
