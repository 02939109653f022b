"""The module classes of a modeling file."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from torch import nn

from ...discovery import NotRecognised, foreign_code


def defined(module: ModuleType) -> Iterator[tuple[str, type[nn.Module]]]:
    """Name and class, of those that a module defines itself; what cannot even be looked at is left out."""
    for name, value in list(vars(module).items()):
        try:
            with foreign_code():
                own = isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__
        except NotRecognised:
            continue
        if own:
            yield name, value
