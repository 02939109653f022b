"""Counts of one training step, patched against unpatched, in one run: `python -m tests.benchmarks.counts`.

What is counted (launches, bytes, host syncs, bytes saved for backward, peak bytes) is defined by
`npu_patch.simulator.trace`.  These are counts, not times: they say nothing of speed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import sys
from collections.abc import Sequence

import tests.conftest  # noqa: F401  # brings the device up, before torch is imported

# isort: split
import npu_patch
from npu_patch.simulator import trace
from tests.benchmarks import models

THREE = ("rms_norm", "rope", "attention")
DEFAULT = tuple(row.name for row in npu_patch.ops() if row.default)
DENSE = tuple(op for op in DEFAULT if op not in ("gmm", "permute"))


@dataclasses.dataclass(frozen=True)
class Counts:
    """One training step: launches, megabytes read and written, host syncs, megabytes saved for backward, peak."""

    launches: int
    moved: int
    syncs: int
    saved: int
    peak: int
    loss: float

    def ratio(self, other: Counts, what: str) -> float:
        return getattr(self, what) / max(getattr(other, what), 1)


def measure(subject: models.Subject, ops: Sequence[str]) -> Counts:
    """The second of two steps with exactly these ops on; the first one fills caches."""
    with subject.unpatched() if "attention" not in ops else contextlib.nullcontext(), contextlib.ExitStack() as stack:
        if ops:
            stack.enter_context(npu_patch.scope(*ops))
        for _ in range(2):
            subject.model.zero_grad(set_to_none=True)
            gc.collect()
            with trace(list(subject.model.parameters())) as t:
                loss = subject.step()
        moved = t.bytes_read + t.bytes_written
        return Counts(t.launches, moved, t.host_syncs, t.saved_bytes, t.peak_bytes, loss.item())


def compare(name: str, singles: bool = True) -> dict[str, Counts]:
    """Counts by ops: "unpatched", "default" (every op whose default is on), "three", and each dense op alone."""
    subject = models.subject(name)
    result = {"unpatched": measure(subject, ()), "default": measure(subject, DEFAULT)}
    if singles:
        result |= {"three": measure(subject, THREE)} | {op: measure(subject, (op,)) for op in DENSE}
    return result


def row(name: str, before: Counts, after: Counts) -> str:
    def cell(what: str, unit: float = 1, form: str = "{:.0f}") -> str:
        old, new = getattr(before, what) / unit, getattr(after, what) / unit
        return f"{form.format(old)} → {form.format(new)} ({before.ratio(after, what):.2f}×)"

    cells = (cell("launches"), cell("moved", 1e6), cell("saved", 1e6, "{:.1f}"), cell("peak", 1e6, "{:.1f}"))
    return f"| {name} | " + " | ".join(cells) + f" | {before.syncs} → {after.syncs} |"


HEADING = (
    "| model | launches | MB read and written | MB saved for backward | MB peak | host syncs |\n"
    "|---|---|---|---|---|---|"
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"models, of: {', '.join(models.NAMES)}")
    parser.add_argument("--singles", action="store_true", help="each op alone, too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    everything = {}
    if not options.json:
        print(HEADING, flush=True)
    for name in options.names or models.NAMES:
        if name not in models.NAMES:
            parser.error(f"unknown model {name!r}; expected one of: {', '.join(models.NAMES)}")
        everything[name] = compare(name, options.singles)
        if not options.json:
            for ops, after in everything[name].items():
                if ops != "unpatched":
                    label = name if ops == "default" else f"{name}, {ops} alone"
                    print(row(label, everything[name]["unpatched"], after), flush=True)
    if options.json:
        json.dump({n: {k: dataclasses.asdict(c) for k, c in v.items()} for n, v in everything.items()}, sys.stdout)


if __name__ == "__main__":
    main()
