"""What is patched, how often it was reached, and why not: `Status` and its rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .tables import text_table

STATES = ("active", "compiled", "waiting", "off", "missing", "unrecognised", "overridden")


@dataclass(frozen=True)
class Row:
    """One target.

    Args:
        op: name of the op.
        library: root package of the target.
        target: "module:path"; the package alone while nothing of it was imported.
        state: active (in place), compiled (in place and traced by torch.compile, where calls cannot be counted),
        waiting
            (its module or the NPU is not there yet), off, missing (the library does not have it), unrecognised (it
            computes something else), overridden (somebody else's replacement sits on top of or instead of ours).
        meaning: what the original was recognised as.
        hits: eager calls that ran the fused operator.
        fallbacks: reason → eager calls that ran the original for it.
        reason: why the state is what it is, where that needs saying.
        supporting: a part of an op that computes nothing itself, such as a mask builder: it has no calls to count.
    """

    op: str
    library: str
    target: str
    state: str
    meaning: str = ""
    hits: int = 0
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""
    supporting: bool = False


class Status:
    """The state of every target; prints as a table.

    Args:
        rows: the rows, in the order of the enable table.
        notes: lines that concern the whole process, such as why nothing is patched.
    """

    def __init__(self, rows: Iterable[Row], notes: Iterable[str] = ()) -> None:
        self.rows = tuple(rows)
        self.notes = tuple(notes)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def to_json(self) -> str:
        """`{"rows": [...], "notes": [...]}`."""
        return json.dumps({"rows": [asdict(row) for row in self.rows], "notes": list(self.notes)}, indent=1)

    def hits(self, op: str) -> int:
        """Calls of one op, over all its targets."""
        return sum(row.hits for row in self.rows if row.op == op)

    def fallbacks(self, op: str) -> dict[str, int]:
        """Fallbacks of one op by reason, over all its targets."""
        total: dict[str, int] = {}
        for row in self.rows:
            if row.op == op:
                for reason, count in row.fallbacks.items():
                    total[reason] = total.get(reason, 0) + count
        return total

    def __str__(self) -> str:
        return render(self.rows, self.notes, hits=lambda row: str(row.hits), fallbacks=_fallback_text)

    def _repr_html_(self) -> str:
        return f"<pre>{self}</pre>"

    __repr__ = __str__


_WIDE = 40  # a longer target takes two lines, broken after its module
HEADINGS = ("op", "target", "state", "meaning", "hits", "fallbacks")


def render(rows: Iterable[Any], notes: Iterable[str], hits: Any, fallbacks: Any, title: str = "npu_patch") -> str:
    """A text table of rows; `hits(row)` and `fallbacks(row)` give those two cells.

    Supporting places that are in order are only numbered: they have nothing to count.
    """
    rows = list(rows)
    shown = [row for row in rows if not (row.supporting and row.state in ("active", "off"))]
    notes = list(notes)
    if active := sum(row.state == "active" for row in rows if row.supporting):
        places = "place" if active == 1 else "places"
        notes.append(f"and {active} supporting {places} (mask builders and the like), active")
    cells = [
        (
            row.op,
            row.target.replace(":", ":\n  ") if len(row.target) > _WIDE else row.target,
            f"{row.state}: {row.reason}" if row.reason else row.state,
            row.meaning or "-",
            "-" if row.supporting else hits(row),
            fallbacks(row),
        )
        for row in shown
    ]
    lines = [text_table(HEADINGS, cells, title=title, width=160)] if cells else []
    return "\n".join([*lines, *notes])


def _fallback_text(row: Row) -> str:
    return "\n".join(f"{count} x {reason}" for reason, count in sorted(row.fallbacks.items())) or "-"
