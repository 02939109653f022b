"""The reports of several processes as one table: hits from minimum to maximum, fallbacks with their ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .report import STATES, render

_STRENGTH = {state: position for position, state in enumerate(("compiled", *(s for s in STATES if s != "compiled")))}


@dataclass
class MergedRow:
    """One target over all workers.

    Args:
        op, library, target, meaning, reason: as in a `Row`.
        state: the state, or several with their workers where they differ.
        hits: worker → eager calls that ran the fused operator.
        fallbacks: reason → worker → eager calls that ran the original.
        compiled: traced by torch.compile somewhere, where calls cannot be counted.
        supporting: has no calls to count.
    """

    op: str
    library: str
    target: str
    state: str = ""
    meaning: str = ""
    reason: str = ""
    hits: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, dict[str, int]] = field(default_factory=dict)
    compiled: bool = False
    supporting: bool = False
    states: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Merged:
    """What the processes of one run report together.

    Args:
        workers: names of those whose calls count: "rank 0", or "process 1234" where there are no ranks.
        rows: one per target.
        notes: lines that concern whole workers.
        silent: ranks that wrote nothing.
        unfinished: workers that were killed; the counts are those of their last regular write.
    """

    workers: tuple[str, ...]
    rows: tuple[MergedRow, ...]
    notes: tuple[str, ...]
    silent: tuple[str, ...]
    unfinished: tuple[str, ...]

    def without_hits(self, ops: Iterable[str]) -> list[str]:
        """Those of `ops` that ran in no process."""
        ran = {row.op for row in self.rows if row.compiled or any(row.hits.values())}
        return sorted(set(ops) - ran)

    def __str__(self) -> str:
        title = "npu_patch" if len(self.workers) < 2 else f"npu_patch: {len(self.workers)} workers, hits of each"
        notes = list(self.notes)
        if self.unfinished:
            notes.append(f"killed before the end, counted up to the last write: {', '.join(self.unfinished)}")
        if self.silent:
            notes.append(f"wrote no report: {', '.join(self.silent)}")
        return render(self.rows, notes, hits=self._hits, fallbacks=self._fallbacks, title=title)

    def to_json(self) -> str:
        rows = [
            {
                **{name: getattr(row, name) for name in ("op", "library", "target", "state", "meaning", "reason")},
                "hits_min": min(row.hits.values(), default=0),
                "hits_max": max(row.hits.values(), default=0),
                "hits": row.hits,
                "fallbacks": row.fallbacks,
            }
            for row in self.rows
        ]
        rest = {name: getattr(self, name) for name in ("workers", "notes", "silent", "unfinished")}
        return json.dumps({"rows": rows, **rest}, indent=1)

    def _hits(self, row: MergedRow) -> str:
        least, most = min(row.hits.values(), default=0), max(row.hits.values(), default=0)
        return str(least) if least == most else f"{least}-{most}"

    def _fallbacks(self, row: MergedRow) -> str:
        lines = []
        for reason, counts in sorted(row.fallbacks.items()):
            where = "" if len(counts) == len(self.workers) else f" ({_list(list(counts))})"
            lines.append(f"{sum(counts.values())} x {reason}{where}")
        return "\n".join(lines) or "-"


def files(folder: Path) -> set[tuple[Path, int]]:
    """The reports in a folder and below, each with its time, which tells it from one of an earlier run."""
    return {(path, path.stat().st_mtime_ns) for path in folder.rglob("*.json")}


def read(found: Iterable[tuple[Path, int]]) -> list[dict[str, Any]]:
    """The reports in files; what is not one is passed over."""
    reports = []
    for path, _ in sorted(found):
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(report, dict) and "pid" in report and "rows" in report:
            reports.append(report)
    return reports


def merge(reports: Sequence[Mapping[str, Any]]) -> Merged:
    """One report over all of them.

    Processes of one rank count as one worker. Processes without a rank and without calls are helpers, such as a parent
    whose children train: they are left out where anybody else has something to say.
    """
    counted = [report for report in reports if _counts(report)]
    shown = [report for report in reports if report["rank"] is not None or _counts(report) or not counted]
    shown.sort(key=lambda report: (report["rank"] is None, report["rank"] or 0, report["pid"]))
    workers = list(dict.fromkeys(_worker(report) for report in shown))
    rows: dict[tuple[str, str, str], MergedRow] = {}
    for report in shown:
        for row in report["rows"]:
            _add(rows, workers, _worker(report), row)
    patched = {row.op for row in rows.values() if set(row.states) != {"waiting"}}
    kept = [row for row in rows.values() if row.op in patched and set(row.states) != {"waiting"}]
    kept += [row for row in rows.values() if row.op not in patched]
    for row in kept:
        row.state = _state(row, workers)
    order = {op: position for position, op in enumerate(dict.fromkeys(row.op for row in rows.values()))}
    kept.sort(key=lambda row: (order[row.op], row.library, row.target))
    return Merged(
        workers=tuple(workers),
        rows=tuple(kept),
        notes=tuple(_notes(shown, workers)),
        silent=tuple(f"rank {rank}" for rank in sorted(_expected(reports) - {report["rank"] for report in reports})),
        unfinished=tuple(
            f"{_worker(report)} ({time.strftime('%H:%M:%S', time.localtime(report['time']))})"
            for report in shown
            if not report["complete"]
        ),
    )


def _add(rows: dict[tuple[str, str, str], MergedRow], workers: list[str], worker: str, row: Mapping[str, Any]) -> None:
    key = (row["op"], row["library"], row["target"])
    merged = rows.get(key)
    if merged is None:
        merged = rows[key] = MergedRow(*key, hits=dict.fromkeys(workers, 0))
    merged.hits[worker] += row["hits"]
    merged.compiled |= row["state"] == "compiled"
    merged.supporting |= row.get("supporting", False)
    merged.states.setdefault(row["state"], []).append(worker)
    merged.meaning = merged.meaning or row["meaning"]
    merged.reason = merged.reason or row["reason"]
    for reason, count in row["fallbacks"].items():
        counts = merged.fallbacks.setdefault(reason, {})
        counts[worker] = counts.get(worker, 0) + count


def _state(row: MergedRow, workers: list[str]) -> str:
    """One state for all, or each with its workers; a worker in two states (a helper of its rank) has the stronger."""
    states: dict[str, list[str]] = {}
    seen: set[str] = set()
    for state in sorted(row.states, key=lambda state: _STRENGTH.get(state, len(_STRENGTH))):
        new = [worker for worker in workers if worker in row.states[state] and worker not in seen]
        if new:
            states[state] = new
            seen.update(new)
    if len(states) == 1:
        return next(iter(states))
    return "\n".join(f"{state} ({_list(names)})" for state, names in states.items())


def _notes(reports: Sequence[Mapping[str, Any]], workers: list[str]) -> list[str]:
    notes: dict[str, dict[str, None]] = {}
    for report in reports:
        for note in report["notes"]:
            notes.setdefault(note, {})[_worker(report)] = None
    return [note if len(who) == len(workers) else f"{note} ({_list(list(who))})" for note, who in notes.items()]


def _expected(reports: Sequence[Mapping[str, Any]]) -> set[int]:
    """The ranks that should have reported: those of each node that did, or all where nodes cannot be told apart."""
    expected: set[int] = set()
    for report in reports:
        rank, local_rank, size = report["rank"], report["local_rank"], report["local_world_size"]
        if rank is None:
            continue
        if local_rank is not None and size is not None:
            expected.update(range(rank - local_rank, rank - local_rank + size))
        elif report["world_size"] is not None:
            expected.update(range(report["world_size"]))
    return expected


def _counts(report: Mapping[str, Any]) -> bool:
    return any(row["hits"] or row["fallbacks"] or row["state"] == "compiled" for row in report["rows"])


def _worker(report: Mapping[str, Any]) -> str:
    return f"process {report['pid']}" if report["rank"] is None else f"rank {report['rank']}"


def _list(workers: Sequence[str]) -> str:
    """ "rank 0, 2" for "rank 0" and "rank 2"."""
    return ", ".join([*workers[:1], *(worker.rpartition(" ")[2] for worker in workers[1:])])
