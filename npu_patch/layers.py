"""What should be on, as data: a base table, one layer per open scope on top of it, and the options of every op.

The last word wins: the layer opened last that names an op decides, and an `exact` layer also says no to every op that
it does not name. The tables know nothing of modules or patches; whoever changes them makes the modules match
afterwards (engine.py), which also holds the lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from . import registry
from .registry import OptionValue


@dataclass(eq=False)  # two scopes with the same content are two layers
class Layer:
    """What one level of the table says; `exact` layers also say no to everything that they do not name."""

    table: dict[str, bool] = field(default_factory=dict)
    exact: bool = False


class Layers:
    """The base table, the layers of the open scopes, and the options."""

    def __init__(self) -> None:
        self._layers = [Layer(exact=True)]
        self._options: dict[str, dict[str, OptionValue]] = {
            op.name: {option.name: option.default for option in op.options} for op in registry.OPS
        }

    def enabled(self, op: str) -> bool:
        for layer in reversed(self._layers):
            if op in layer.table:
                return layer.table[op]
            if layer.exact:
                return False
        return False

    def update(self, table: Mapping[str, bool]) -> None:
        """Change the base table."""
        self._layers[0].table.update(table)

    def clear(self) -> None:
        """Everything off, in the base table and in every open scope."""
        self._layers[:] = [Layer(exact=True)]

    def push(self, layer: Layer) -> None:
        self._layers.append(layer)

    def drop(self, layer: Layer) -> None:
        """Take one layer out, wherever it is; one that `clear` has dropped already is no error."""
        self._layers[:] = [other for other in self._layers if other is not layer]

    def options(self, op: str) -> dict[str, OptionValue]:
        """The op's options: the one dict that its call sites hold, changed in place by `configure`."""
        return self._options[op]

    def configure(self, op: str, options: Mapping[str, OptionValue]) -> bool:
        """Set options; returns whether any of them changed."""
        changed = any(self._options[op][name] != value for name, value in options.items())
        self._options[op].update(options)
        return changed

    def strategy(self) -> dict[str, dict[str, OptionValue]]:
        return {op.name: {"enabled": self.enabled(op.name), **self._options[op.name]} for op in registry.OPS}


class Scope(contextlib.ContextDecorator):
    """A block with other ops; may be entered again, also while it is open.

    Args:
        opening, closing: called with this block's layer, at its beginning and its end.
    """

    def __init__(
        self, table: Mapping[str, bool], exact: bool, opening: Callable[[Layer], None], closing: Callable[[Layer], None]
    ) -> None:
        self._table, self._exact = dict(table), exact
        self._opening, self._closing = opening, closing
        self._open: list[Layer] = []

    def __enter__(self) -> None:
        layer = Layer(dict(self._table), self._exact)
        self._opening(layer)
        self._open.append(layer)

    def __exit__(self, *error: object) -> None:
        self._closing(self._open.pop())
