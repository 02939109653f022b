"""Functions of transformers 4 that write a mask out as numbers, for models that have no function of indices for it.

What they return is remembered as a mask of 0 and the type's lowest number.  Any other additive mask may be a bias.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from ...discovery.additive_masks import recognise_additive_mask
from ...registry import Target
from ...sites import Site
from . import LIBRARY, masks

_OP = "attention"


def find(module: ModuleType) -> Iterator[Target]:
    """Functions and static methods of a module that prepare a written-out mask."""
    for path, function, rebind in _candidates(module):
        if recognise_additive_mask(function):
            says = "writes a mask out as numbers"
            yield Target(_OP, LIBRARY, module.__name__, path, _adapter, says, rebind, supporting=True)


def _candidates(module: ModuleType) -> Iterator[tuple[str, FunctionType, tuple[str, ...]]]:
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, FunctionType) and "mask" in name:
            yield name, value, (LIBRARY,)
        elif isinstance(value, type):
            for inner, method in list(vars(value).items()):
                if isinstance(method, staticmethod) and isinstance(method.__func__, FunctionType):
                    yield f"{name}.{inner}", method.__func__, ()


def _adapter(original: Any, site: Site) -> Callable[..., Any]:
    def prepare(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if isinstance(result, Tensor) and not is_compiling():
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            if not any(x is result or (x.dim() == 4 and not masks.is_hard(x)) for x in given):
                masks.remember_hard(result)
        return result

    return prepare
