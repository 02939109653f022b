"""An object that passes for an instance of a module class and takes down what its methods read."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch

from .bracket import NotRecognised, Signal, plain


class UnknownAttribute(Signal):
    """The class reads an attribute that nobody has given a value."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Refused(Signal):
    """The class does something that a probe cannot vouch for."""


class Absent:
    """The value of an attribute that an instance does not have."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = Absent()


class _State:
    __slots__ = ("cls", "methods", "read", "values")

    def __init__(self, cls: type, values: Mapping[str, Any]) -> None:
        self.cls = cls
        self.values = values
        self.read: set[str] = set()
        self.methods: dict[str, types.FunctionType] = {}


class StandIn:
    """Has the methods of `cls` and the given attribute values, and nothing else.

    It is no subclass: building one would run `__init_subclass__`, and an instance the `__init__` or `__new__` of `cls`.
    Properties and slots count as attributes, since a replacement reads them through the instance in the same way.

    Args:
        cls: the module class.
        values: attribute → value; `ABSENT` raises AttributeError; reading any other name raises `UnknownAttribute`.
    """

    __slots__ = ("_state",)

    def __init__(self, cls: type, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_state", _State(cls, values))

    def __getattribute__(self, name: str) -> Any:
        state: _State = object.__getattribute__(self, "_state")
        if name == "__class__":
            return state.cls
        if name not in state.values:
            method = _method(state, name)
            if method is not None:
                return types.MethodType(method, self)
        state.read.add(name)
        if name not in state.values:
            raise UnknownAttribute(name)
        value = state.values[name]
        if value is ABSENT:
            raise AttributeError(name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        raise Refused(f"writes its attribute {name!r}")

    def __delattr__(self, name: str) -> None:
        raise Refused(f"deletes its attribute {name!r}")


def record(stand_in: StandIn) -> tuple[set[str], dict[str, types.FunctionType]]:
    """The attributes that were read, and the methods that were used."""
    state: _State = object.__getattribute__(stand_in, "_state")
    return state.read, state.methods


def _method(state: _State, name: str) -> types.FunctionType | None:
    for owner in state.cls.__mro__:
        if name in vars(owner):
            found = vars(owner)[name]
            if isinstance(found, (staticmethod, classmethod)):
                raise Refused(f"calls the {type(found).__name__} {name!r}")
            if not isinstance(found, types.FunctionType):
                return None
            if owner is torch.nn.Module:
                raise Refused(f"calls nn.Module.{name}")
            try:
                state.methods[name] = plain(found)
            except NotRecognised as error:
                raise Refused(f"its method {name!r} {error}") from None
            return state.methods[name]
    return None
