"""Putting one replacement in place and taking it out again.

Three kinds of place: a plain function or method slot (wrapt finds and undoes it), a staticmethod slot (wrapt would
leave a plain function there, so the raw descriptor is kept and put back here), and an entry of a registry mapping.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import wrapt

from . import functions
from .registry import Target, Unrecognised


class MissingTarget(LookupError):
    """The module does not have what the target names."""


class NotAFunction(TypeError):
    """What the target names cannot be replaced safely."""


def holds(target: Target | Unrecognised, module: types.ModuleType) -> Any:
    """The function in a place, below replacements of this package; None where there is none."""
    try:
        return functions.beneath(_place(target, module).original)
    except (MissingTarget, NotAFunction):
        return None


def _place(target: Target | Unrecognised, module: types.ModuleType) -> Slot | Entry:
    if target.path.endswith("]"):
        return Entry(module, target.path)
    return Slot(module, target.path, getattr(target, "objects", False))


Rebind = Callable[[object, object, Iterable[str]], object]


class Installed:
    """One replacement and its place; making one changes nothing, `put` and `remove` do.

    The replacement stays the same object through any number of them, so that whoever took it while it was in place gets
    the fused operator when it is on, and the original when it is off.

    Args:
        target: what is replaced.
        module: the loaded module.
        build: `build(original) -> function`, run once.
    """

    def __init__(self, target: Target, module: types.ModuleType, build: Callable[[Any], Any]) -> None:
        self.target = target
        self.module = module
        self.place = _place(target, module)
        self.original = self.place.original
        self.replacement = functions.clone(build(self.original), self.original)
        self._code = self.replacement.__code__
        self.on = False

    def gone(self) -> bool:
        """Whether the module was executed anew, so that the place is no longer the one that users reach."""
        return self.module is not sys.modules.get(self.module.__name__, self.module) or self.place.moved() is not None

    def fits(self) -> bool:
        """Whether the place is still the one that was replaced: it holds the original or reaches the replacement."""
        return not self.gone() and (self.place.current() is self.original or self.reached())

    def put(self, rebind: Rebind = functions.rebind) -> None:
        """Put the replacement in place; below somebody's wrapper it is switched on where it is.

        Args:
            rebind: another function than `functions.rebind`, where a caller has many to make.
        """
        self.on = True  # first: whatever interrupts this, `remove` undoes it
        self.replacement.__code__ = self._code
        if not self.reached():
            self.place.put(self.replacement)
        if self.target.rebind:
            rebind(self.original, self.replacement, self.target.rebind)

    def in_place(self) -> bool:
        """Whether the replacement is what a caller reaches first."""
        return self.place.current() is self.replacement and not self.gone()

    def beneath(self) -> Any:
        """What the replacement sits on, where a third party has put that there; else None."""
        own = {self.target.library, self.module.__name__.partition(".")[0], "torch", "npu_patch"}
        root = str(getattr(self.original, "__module__", None) or "").partition(".")[0]
        return self.original if root and root not in own else None

    def reached(self) -> bool:
        """Whether the replacement is still reached, at once or below wrappers that show what they wrap."""
        current, seen = self.place.current(), 0
        while current is not None and seen < 100:
            if current is self.replacement or _captured(current, self.replacement):
                return True
            current, seen = getattr(current, "__wrapped__", None), seen + 1
        return False

    def left_behind(self) -> bool:
        """Whether the place holds the replacement although it is off: somebody put back what they had saved."""
        return not self.on and self.place.current() is self.replacement

    def remove(self, rebind: Rebind = functions.rebind) -> None:
        """Take the replacement out.

        References that others took while it was in place (a bound method, a wrapper on top) cannot be taken back; while
        it is off they reach the original all the same, because the replacement hands every call to it.
        """
        functions.bypass(self.replacement)
        if self.target.rebind:
            rebind(self.replacement, self.original, self.target.rebind)
        self.place.take_out(self.replacement)
        self.on = False


class Slot:
    """An attribute of a module or class.

    Args:
        objects: an attribute of a module may be a callable object.
    """

    def __init__(self, module: types.ModuleType, path: str, objects: bool = False) -> None:
        self.module, self.path = module, path
        try:
            self.parent, self.name, value = wrapt.resolve_path(module, path)
        except AttributeError as error:
            raise MissingTarget(str(error)) from None
        self.own = vars(self.parent).get(self.name, _ABSENT)
        self.static = isinstance(self._raw(), staticmethod)
        self.original = self._raw().__func__ if self.static else value
        if objects and isinstance(self.parent, types.ModuleType) and callable(self.original):
            return
        if not isinstance(self.original, types.FunctionType):
            raise NotAFunction(f"is a {type(self.original).__name__}, not a plain function")

    def moved(self) -> Any:
        """What the module has now in the place of the class that was written to; None while it is the same."""
        try:
            parent = wrapt.resolve_path(self.module, self.path)[0]
        except AttributeError:
            return _ABSENT
        return None if parent is self.parent else parent

    def _raw(self) -> Any:
        if not isinstance(self.parent, type):
            return vars(self.parent).get(self.name)
        for owner in self.parent.__mro__:
            if self.name in vars(owner):
                return vars(owner)[self.name]
        return None

    def put(self, replacement: types.FunctionType) -> None:
        if self.static:
            setattr(self.parent, self.name, staticmethod(replacement))
        else:
            wrapt.wrap_object(self.module, self.path, _returning(replacement))

    def current(self) -> Any:
        raw = self._raw()
        return raw.__func__ if isinstance(raw, staticmethod) else raw

    def take_out(self, replacement: types.FunctionType) -> None:
        """Put back what was there; from below a wrapt wrapper too.  Anybody else's function stays."""
        if self.current() is replacement:
            if self.own is _ABSENT:
                delattr(self.parent, self.name)
            else:
                setattr(self.parent, self.name, self.own)
            return
        with contextlib.suppress(wrapt.WrapperNotOutermostError, wrapt.WrapperNotFoundError, AttributeError):
            wrapt.unwrap_object(self.module, self.path, replacement)


class Entry:
    """An entry of a registry: a mutable mapping, or an object over a class-level `_global_mapping` (transformers)."""

    def __init__(self, module: types.ModuleType, path: str) -> None:
        attribute, _, key = path[:-1].partition("[")
        container = getattr(module, attribute, None)
        if container is None:
            raise MissingTarget(f"{module.__name__} has no {attribute!r}")
        self.mapping: MutableMapping[str, Any] = getattr(type(container), "_global_mapping", container)
        self.key = key
        if key not in self.mapping:
            raise MissingTarget(f"{module.__name__}.{attribute} has no entry {key!r}")
        self.original = self.mapping[key]
        if not isinstance(self.original, types.FunctionType):
            raise NotAFunction(f"is a {type(self.original).__name__}, not a plain function")

    def moved(self) -> None:
        return None

    def put(self, replacement: types.FunctionType) -> None:
        self.mapping[self.key] = replacement

    def current(self) -> Any:
        return self.mapping.get(self.key)

    def take_out(self, replacement: types.FunctionType) -> None:
        if self.current() is replacement:
            self.mapping[self.key] = self.original


def _returning(replacement: types.FunctionType) -> Any:
    """A wrapt factory that gives a plain function instead of a proxy."""
    return lambda original: replacement


class _Absent:
    pass


_ABSENT = _Absent()


def _captured(current: Any, replacement: types.FunctionType) -> bool:
    """Whether `current`, somebody else's function, holds on to the replacement and may call it."""
    cells = getattr(current, "__closure__", None) or ()
    values = [cell.cell_contents for cell in cells if _filled(cell)]
    return replacement in values or getattr(current, "__wrapped__", None) is replacement


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
