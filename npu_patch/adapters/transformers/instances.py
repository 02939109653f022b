"""What an instance must have for a meaning of its class to hold, asked on every call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...discovery.standin import ABSENT


def overridden(self: Any, methods: tuple[tuple[str, Any], ...]) -> str | None:
    for name, function in methods:
        if getattr(type(self), name) is not function:
            return f"{type(self).__name__} overrides {name}"
    return None


def holds(self: Any, x: Tensor, conditions: tuple[tuple[str, Any], ...], widths: tuple[tuple[str, type], ...]) -> bool:
    for name, value in conditions:
        own = getattr(self, name, ABSENT)
        if type(own) is not type(value) or own != value:
            return False
    for name, kind in widths:
        own = getattr(self, name, None)
        if own != x.shape[-1] if kind is int else tuple(own or ()) != (x.shape[-1],):
            return False
    return True
