"""What a probed function reads and writes besides its arguments.

A number, a list or a flag of a module may be another one when the function is called in earnest, and so may a class
attribute or what a closure holds.  Nothing that was recognised needs any of them, so none is accepted.  Functions that
a library's function calls are, and are taken down, so that somebody's later replacement of one can be noticed.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import functions
from .bracket import NotRecognised
from .watch import Watch

_MODULES = frozenset(("contextlib", "functools", "itertools", "math", "operator", "torch", "typing", "warnings"))
_BUILTINS = frozenset(
    (
        *("abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "frozenset", "getattr", "hasattr"),
        *("int", "isinstance", "issubclass", "iter", "len", "list", "map", "max", "min", "next", "range", "reversed"),
        *("round", "set", "slice", "sorted", "str", "sum", "super", "tuple", "zip"),
    )
)
_SURROUNDINGS = re.compile(
    r"\.(is_(?!tensor$|floating_point$|complex$|nonzero$|same_size$|signed$|conj$|neg$)\w+|are_\w+|get_\w+|current_\w+"
    r"|backends|compiler|cuda|distributed|jit|mps|npu|version|xpu|_C|_dynamo)\b"
)
"""Parts of torch that tell something of the process or its devices."""

_OPEN = (types.ModuleType, types.FunctionType, type)
"""What attributes are read of by name, without running anything."""

_WRITES = frozenset(("DELETE_ATTR", "DELETE_GLOBAL", "STORE_ATTR", "STORE_GLOBAL"))
_FREE = ("LOAD_DEREF", "LOAD_CLASSDEREF", "STORE_DEREF", "DELETE_DEREF")


@dataclass(frozen=True, eq=False)
class Part:
    """A function, or a table of functions, that takes part in what another function computes.

    Args:
        holder: the module's variables, or the class, where it is found.
        name: under which name.
        value: what was there while the other function was recognised.
        content: what was in it, if it is a table.
    """

    holder: Any
    name: str
    value: Any
    content: Any = None

    def current(self) -> Any:
        """What is there now; None where nothing is."""
        return _get(self.holder, self.name)

    def changed(self) -> bool:
        """Whether somebody put something else there, or into the table in place of what was in it."""
        now = functions.beneath(self.current())
        if now is not functions.beneath(self.value):
            return True
        if self.content is None:
            return False
        table = _contents(now)
        return any(table.get(key) is not value for key, value in self.content.items())


def joined(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Each part once."""
    return tuple({(id(part.holder), part.name): part for part in parts}.values())


def parts_of(watch: Watch) -> tuple[Part, ...]:
    """The functions that the watched code finds in modules.

    Raises:
        NotRecognised: it reads or writes something else outside.
    """
    inner = {constant for code in watch.entered for constant in _inner(code)}
    found: list[Part] = []
    for code, (variables, free) in watch.entered.items():
        executed = {offset for step in watch.steps[code] for offset in step}
        listing = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "EXTENDED_ARG", "NOP")]
        for index, one in enumerate(listing):
            if one.offset not in executed:
                continue
            if one.opname in _WRITES or (one.opname.endswith("E_DEREF") and _outer(code, one, inner)):
                raise NotRecognised(f"{code.co_name} writes {one.argval!r} outside of itself")
            if one.opname == "IMPORT_NAME":
                raise NotRecognised(f"{code.co_name} imports {one.argval}")
            if one.opname in ("LOAD_ATTR", "LOAD_METHOD") and re.fullmatch("__.*__", one.argval):
                raise NotRecognised(f"{code.co_name} reads {one.argval}")
            if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                holder: Any = variables if one.argval in variables else vars(builtins)
            elif one.opname in _FREE and _outer(code, one, inner):
                holder = free
            else:
                continue
            found += _follow(holder, one.argval, listing[index + 1 :], watch)
    return joined(found)


def _inner(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _inner(constant)


def _outer(code: types.CodeType, instruction: dis.Instruction, inner: set[types.CodeType]) -> bool:
    """Whether a variable belongs to a function that ran before, which made this one."""
    return instruction.argval in code.co_freevars and code not in inner


def _follow(holder: Any, name: str, rest: Sequence[dis.Instruction], watch: Watch) -> Iterator[Part]:
    """Judge what `name`, with the attributes that are read of it, stands for.

    Raises:
        NotRecognised: for something that may be another thing later.
    """
    value, path = _get(holder, name), name
    if holder is vars(builtins):
        if name not in _BUILTINS and not (isinstance(value, type) and issubclass(value, BaseException)):
            raise NotRecognised(f"uses {name}")
        return
    module = value if isinstance(value, types.ModuleType) else None
    for one in rest:
        if one.opname not in ("LOAD_ATTR", "LOAD_METHOD") or not isinstance(value, _OPEN):
            break
        holder, name, path = value, one.argval, f"{path}.{one.argval}"
        value = _get(holder, name)
        module = value if isinstance(value, types.ModuleType) else module
    function = isinstance(value, (types.FunctionType, types.BuiltinFunctionType))
    owner = module.__name__ if module is not None else str(value.__module__) if function else ""
    library = owner.partition(".")[0]
    if isinstance(value, types.ModuleType) or (library in sys.stdlib_module_names and library not in _MODULES):
        raise NotRecognised(f"uses {path}")
    if library == "torch":
        if any(_SURROUNDINGS.search(f".{one}") for one in (path, value.__name__ if function else "")):
            raise NotRecognised(f"asks {path}")
        return
    if library in _MODULES or isinstance(value, (type, torch.dtype, torch.layout, torch.memory_format, torch.device)):
        return
    place = vars(holder) if isinstance(holder, types.ModuleType) else holder
    if _of_functions(value):
        yield Part(place, name, value, _contents(value))
        return
    if not isinstance(value, types.FunctionType):
        raise NotRecognised(f"reads {path}, a {type(value).__name__} that may change")
    if watch.near(owner) and any(isinstance(default, (dict, list, set)) for default in value.__defaults__ or ()):
        raise NotRecognised(f"calls {path}, which keeps something in a default")
    yield Part(place, name, value)


def _get(holder: Any, name: str) -> Any:
    if isinstance(holder, Mapping):
        return holder.get(name)
    if isinstance(holder, type):
        found = inspect.getattr_static(holder, name, None)
        return found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
    return getattr(holder, name, None)


def _contents(table: Mapping[str, Any]) -> dict[str, Any]:
    """What a table holds; some make a new object at every look-up, so that is not used."""
    return dict(dict.items(table)) if isinstance(table, dict) else {}


def _of_functions(value: Any) -> bool:
    """Whether a value is a table of functions or classes, or of classes with their arguments."""
    if not isinstance(value, dict):
        return False
    return all(callable(one[0] if isinstance(one, tuple) and one else one) for one in _contents(value).values())
