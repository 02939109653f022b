"""Modeling files that come with a checkpoint (`trust_remote_code`): which are loaded."""

from __future__ import annotations

import sys

from . import REMOTE

_HASH = "__transformers_module_hash__"


def loaded() -> dict[str, str | None]:
    """Name of each loaded module of remote code → what transformers says of its content.

    transformers executes a module again, under the same name, when its file has changed.
    """
    return {
        name: vars(module).get(_HASH)
        for name, module in list(sys.modules.items())
        if name.startswith(REMOTE + ".") and hasattr(module, "__dict__") and getattr(module, "__file__", None)
    }
