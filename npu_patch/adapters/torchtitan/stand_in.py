"""Running a forward with something else in the place of an attention that has no CPU code."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any


def standing_in(function: FunctionType, genuine: Callable[..., Any], stub: Callable[..., Any]) -> FunctionType | None:
    """A clone of the function that calls `stub` where the function calls `genuine` or a `torch.compile` of it.

    Nothing is written to the function's module.  `genuine` may be a name of the module, or an attribute of a class that
    is one.  None where the function uses neither.
    """
    places: dict[str, Any] = {}
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if _is(value, genuine):
            places[name] = stub
        elif isinstance(value, type):
            held = [key for cls in value.__mro__[:-1] for key, own in vars(cls).items() if _is(own, genuine)]
            if held:
                places[name] = SimpleNamespace(**dict.fromkeys(held, stub))
    if not places:
        return None
    clone = FunctionType(
        function.__code__,
        {**function.__globals__, **places},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    clone.__kwdefaults__ = function.__kwdefaults__
    return clone


def _is(value: Any, genuine: Callable[..., Any]) -> bool:
    return callable(value) and _innermost(value) is _innermost(genuine)


def _innermost(function: Any) -> Any:
    """Without what torch.compile wraps around a function; around one of torch's own it also puts a plain wrapper."""
    function = getattr(function, "_torchdynamo_orig_callable", function)
    return getattr(function, "__wrapped__", function)
