"""Modules that a library loads past the import system, where import hooks do not see them."""

from __future__ import annotations

import logging
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from . import registry
from .installing import Installed, MissingTarget, NotAFunction
from .registry import Library, Target

log = logging.getLogger("npu_patch")


class LateModules:
    """What one library has loaded so, and a wrapper around the function that loads more.

    Args:
        library: its `loader` and `loaded` say which function and which modules.
        arrived: called after every call of the function; must not raise.
    """

    def __init__(self, library: Library, arrived: Callable[[], None]) -> None:
        self.module, _, self.path = library.loader.partition(":")
        self._library = library
        self._arrived = arrived
        self._contents: dict[str, tuple[weakref.ref[types.ModuleType], Any]] = {}
        self._installed: Installed | None = None
        self._hopeless = False

    def look(self) -> tuple[list[str], list[str]]:
        """(names of the loaded modules, names of those that were executed anew since the last look)."""
        loaded: Mapping[str, Any] = registry.load(self._library.loaded)()
        again = []
        for name, content in loaded.items():
            before, now = self._contents.get(name), sys.modules.get(name)
            if now is None:
                continue
            if before is not None and (before[0]() is not now or before[1] != content):
                again.append(name)
            self._contents[name] = (weakref.ref(now), content)
        return list(loaded), again

    def watch(self, on: bool) -> None:
        """Put the wrapper in place, or take it out."""
        have = self._installed is not None and self._installed.on
        module = sys.modules.get(self.module)
        if on == have or module is None or self._hopeless:
            return
        if not on:
            assert self._installed is not None
            self._installed.remove()
            return
        name = self._library.name
        try:
            if self._installed is None or not self._installed.fits():
                self._installed = Installed(Target("", name, self.module, self.path, _unused), module, self._wrapper)
            self._installed.put()
        except (MissingTarget, NotAFunction) as error:
            self._hopeless = True
            log.warning("npu_patch: modules that %s loads past the import system stay unpatched: %s", name, error)

    def _wrapper(self, original: Any) -> Callable[..., Any]:
        arrived = self._arrived

        def load(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            try:
                arrived()
            except Exception:  # what was loaded works unpatched, too
                log.exception("npu_patch: what was loaded is left unpatched")
            return result

        return load


def _unused(original: Any, site: Any) -> Any:
    raise NotImplementedError
