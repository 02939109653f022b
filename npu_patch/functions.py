"""Plain functions that take the place of others: clones that carry an original's names, and rebinding of imported
names.

A forward must stay a plain `types.FunctionType`: with a proxy object in its place torch.compile of a parent module runs
the original or fails.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any


class SignatureError(TypeError):
    """A replacement does not take the arguments of the function that it replaces."""


_VARARGS, _VARKEYWORDS = inspect.CO_VARARGS, inspect.CO_VARKEYWORDS


def _parameters(code: types.CodeType) -> tuple[str, ...]:
    collectors = bool(code.co_flags & _VARARGS) + bool(code.co_flags & _VARKEYWORDS)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + collectors]


def clone(replacement: Callable[..., Any], original: Callable[..., Any]) -> types.FunctionType:
    """A fresh plain function with the body of `replacement` and the face of `original`.

    Positional parameters of the replacement take the original's names and defaults, so that calls by keyword,
    `inspect.signature` and code that keys on parameter names see the original's interface.  The original's
    `__dict__` is not copied: it may hold torch.compile markers that belong to the original alone.

    Args:
        replacement: a plain function; its positional parameters are those of the original, in the same order, under
        any name. original: the function that is replaced.

    Raises:
        SignatureError: the number of positional parameters or the names of keyword-only parameters differ.
    """
    if not isinstance(replacement, types.FunctionType):
        raise SignatureError(f"{replacement!r} is not a plain function")
    code = replacement.__code__
    takes_anything = code.co_argcount == 0 and code.co_flags & _VARARGS and code.co_flags & _VARKEYWORDS
    if takes_anything or not isinstance(original, types.FunctionType):  # nothing to rename
        fresh = types.FunctionType(
            code, replacement.__globals__, replacement.__name__, replacement.__defaults__, replacement.__closure__
        )
        fresh.__kwdefaults__ = replacement.__kwdefaults__
        functools.update_wrapper(fresh, original, updated=())
        fresh.__dict__[_OURS] = True
        return fresh
    theirs = original.__code__
    ours, wanted = _parameters(code), _parameters(theirs)
    keyword_only = set(ours[code.co_argcount : code.co_argcount + code.co_kwonlyargcount])
    theirs_keyword_only = set(wanted[theirs.co_argcount : theirs.co_argcount + theirs.co_kwonlyargcount])
    collects_less = theirs.co_flags & ~code.co_flags & (_VARARGS | _VARKEYWORDS)
    if code.co_argcount != theirs.co_argcount or keyword_only != theirs_keyword_only or collects_less:
        raise SignatureError(
            f"{replacement.__qualname__}{ours} cannot replace {original.__module__}.{original.__qualname__}{wanted}"
        )
    names = list(code.co_varnames)
    names[: code.co_argcount] = theirs.co_varnames[: theirs.co_argcount]
    taken = set(names[: code.co_argcount])
    for i in range(code.co_argcount, len(names)):  # a local of the replacement must not share a parameter's new name
        while names[i] in taken and i >= len(ours):
            names[i] += "_"
    cells = set(code.co_cellvars) & set(ours[: code.co_argcount])
    if cells and tuple(names[: code.co_argcount]) != ours[: code.co_argcount]:
        raise SignatureError(f"{replacement.__qualname__}: parameters {sorted(cells)} are used by an inner function")
    fresh = types.FunctionType(
        code.replace(co_varnames=tuple(names)),
        replacement.__globals__,
        original.__name__,
        original.__defaults__,
        replacement.__closure__,
    )
    fresh.__kwdefaults__ = dict(original.__kwdefaults__) if original.__kwdefaults__ else replacement.__kwdefaults__
    functools.update_wrapper(fresh, original, updated=())
    fresh.__dict__[_OURS] = True
    return fresh


def beneath(function: Any) -> Any:
    """What a replacement of this package replaced; any other function itself."""
    while isinstance(function, types.FunctionType) and _OURS in function.__dict__:
        function = function.__wrapped__  # type: ignore[attr-defined]
    return function


_OURS = "_npu_patch_replacement"


def rebind(old: object, new: object, prefixes: Iterable[str]) -> list[str]:
    """Point every module-level name that is bound to `old` at `new`, in loaded modules below the given packages.

    The comparison is by identity, so a name that somebody bound to something else is left alone, and the same call with
    the arguments exchanged undoes it, for modules imported in between too.

    Returns:
        The names that were changed, as "module.name".
    """
    batch = Rebinding()
    batch.add(old, new, prefixes)
    return batch.run()


class Rebinding:
    """Several rebindings, made in one pass over the loaded modules: there can be thousands of either."""

    def __init__(self) -> None:
        self._pairs: dict[int, list[tuple[object, object, tuple[str, ...]]]] = {}

    def add(self, old: object, new: object, prefixes: Iterable[str]) -> None:
        """Take down a call of `rebind`."""
        self._pairs.setdefault(id(old), []).append((old, new, tuple(prefixes)))

    def run(self) -> list[str]:
        """Make them, and forget them.

        Returns:
            The names that were changed, as "module.name".
        """
        pairs, self._pairs = self._pairs, {}
        heads = {head for found in pairs.values() for _, _, prefixes in found for head in prefixes}
        changed = []
        for module_name, module in list(sys.modules.items()) if pairs else ():
            if not isinstance(module_name, str) or not _below(module_name, heads):
                continue
            namespace = getattr(module, "__dict__", None)
            if type(namespace) is not dict:  # lazy stand-ins without a real namespace
                continue
            for name, value in list(namespace.items()):
                for _, new, prefixes in pairs.get(id(value), ()):
                    if _below(module_name, prefixes):
                        namespace[name] = new
                        changed.append(f"{module_name}.{name}")
                        break
        return changed


def _below(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def bypass(replacement: types.FunctionType) -> None:
    """Make an installed replacement hand every call to its original, which it must hold as the free variable
    `original`.

    For a replacement that cannot be taken out, because somebody's wrapper holds on to it.  Setting `__code__` back
    to what it was switches the replacement on again.
    """
    names = replacement.__code__.co_freevars
    if "original" not in names:
        raise SignatureError(f"{replacement.__qualname__} does not hold its original")
    source = (
        f"def outer({', '.join(names)}):\n"
        "    def bypassed(*args, **kwargs):\n"
        f"        ({', '.join(names)},)\n"
        "        return original(*args, **kwargs)\n"
        "    return bypassed\n"
    )
    namespace: dict[str, Any] = {}
    exec(source, namespace)  # the only way to a code object with exactly these free variables
    passthrough = namespace["outer"](*[None] * len(names)).__code__
    replacement.__code__ = passthrough.replace(co_name=replacement.__name__)
