"""Taking down which instructions of foreign code a probe runs."""

from __future__ import annotations

import gc
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

_TRUSTED = frozenset(sys.stdlib_module_names) | {"torch", "npu_patch"}


class Watch:
    """Runs functions, and takes down every step from one instruction to the next in the code of a model library.

    Not watched are torch, the standard library, this package, and the parts of the original's own library that serve
    every model: `library.utils`, seen from `library.models.llama.modeling_llama`, which neither lies below
    `library.models` nor as deep.  Neither are look-ups in the library's tables (`__getitem__` of a mapping).

    A tracer that is set, of a debugger or of coverage, is out of work inside and set again afterwards.

    Args:
        home: name of the module of the original.
    """

    def __init__(self, home: str) -> None:
        parts = home.split(".")
        self._root, self._depth, self._family = parts[0], len(parts), ".".join(parts[: max(1, len(parts) - 2)])
        self._near: dict[str, bool] = {}
        self.steps: defaultdict[types.CodeType, set[tuple[int, int]]] = defaultdict(set)
        self.entered: dict[types.CodeType, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
        """Code that ran → its globals, and the values of its free variables."""
        self.errors: list[type[BaseException]] = []
        """What was raised in, or passed through, watched code."""

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of a call.

        Raises:
            NotRecognised: it went on after an error of its own.
        """
        before, known, collects = sys.gettrace(), len(self.errors), gc.isenabled()
        gc.disable()  # finalizers of others would be watched
        sys.settrace(self._enter)
        try:
            result = function(*args, **kwargs)
        finally:
            sys.settrace(before)
            if collects:
                gc.enable()
        if len(self.errors) > known:
            from .bracket import NotRecognised

            raise NotRecognised(f"catches an error of its own: {self.errors[-1].__name__}")
        return result

    def near(self, module: str) -> bool:
        """Whether code of a module is watched."""
        if module not in self._near:
            root = module.partition(".")[0]
            beside = not f"{module}.".startswith(f"{self._family}.")
            far = root == self._root and beside and module.count(".") + 1 < self._depth
            self._near[module] = not (root in _TRUSTED or far)
        return self._near[module]

    def _enter(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not self.near(str(frame.f_globals.get("__name__", ""))):
            return None
        if code.co_name == "__getitem__" and isinstance(frame.f_locals.get(code.co_varnames[0]), Mapping):
            return None
        if _importing(frame):
            return None
        if code not in self.entered:
            local = frame.f_locals
            free = {name: local[name] for name in code.co_freevars if name in local}
            self.entered[code] = (frame.f_globals, free)
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        steps, last = self.steps[code], -1

        def step(frame: types.FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            if event == "opcode":
                steps.add((last, frame.f_lasti))
                last = frame.f_lasti
            elif event == "exception" and not issubclass(argument[0], (StopIteration, GeneratorExit)):
                self.errors.append(argument[0])
            return step

        return step


def _importing(frame: types.FrameType) -> bool:
    """Whether a frame belongs to an import that torch makes when something of it is first used: anybody's hooks run."""
    caller = frame.f_back
    while caller is not None and caller.f_code is not Watch.run.__code__:
        if caller.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        caller = caller.f_back
    return False
