"""What `ops()` and `strategy()` return: plain data that prints as a table."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .registry import OPS, OptionValue


@dataclass(frozen=True)
class OpRow:
    """One op: what it is, whether it is on, its options with their values, the operators that it calls."""

    name: str
    enabled: bool
    default: bool
    options: Mapping[str, OptionValue]
    operators: tuple[str, ...]
    summary: str


class Strategy(dict[str, dict[str, OptionValue]]):
    """op → {"enabled": bool, option: value, …}."""

    def __str__(self) -> str:
        return text_table(
            ("op", "on", "options"),
            [(name, _yes(values["enabled"]), _options(values)) for name, values in self.items()],
        )


class OpsTable(tuple[OpRow, ...]):
    """The enable table, one `OpRow` per op."""

    def __new__(cls, strategy: Mapping[str, Mapping[str, OptionValue]]) -> OpsTable:
        rows = []
        for op in OPS:
            values = dict(strategy[op.name])
            enabled = bool(values.pop("enabled"))
            rows.append(OpRow(op.name, enabled, op.default, values, op.operators, op.summary))
        return super().__new__(cls, rows)

    def __str__(self) -> str:
        return text_table(
            ("op", "on", "default", "options", "operators", "what it is"),
            [
                (r.name, _yes(r.enabled), _yes(r.default), _options(r.options), "\n".join(r.operators), r.summary)
                for r in self
            ],
        )


def _yes(value: Any) -> str:
    return "yes" if value else "no"


def _options(values: Mapping[str, OptionValue]) -> str:
    return "\n".join(f"{name}={value}" for name, value in values.items() if name != "enabled") or "-"


def text_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None, width: int = 140
) -> str:
    """A table as plain ASCII text, which every terminal, log file and encoding can show."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.ASCII2)
    for heading in headings:
        table.add_column(heading, overflow="fold", justify="right" if heading == "hits" else "left")
    for row in rows:
        table.add_row(*row)
    buffer = io.StringIO()
    Console(file=buffer, width=width, highlight=False, markup=False).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())
