"""What the attributes of a norm may be, and in which order that is tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .norm_probes import Probe
from .standin import ABSENT


@dataclass(frozen=True)
class Role:
    """What an attribute stands for, when it is not a plain value."""

    kind: str

    def value(self, probe: Probe) -> Any:
        return {
            "weight": probe.weight,
            "eps": probe.eps,
            "no eps": None,
            "width": probe.width,
            "widths": (probe.width,),
            "groups": probe.groups,
            "gain": probe.gain,
            "group size": probe.width // probe.groups,
        }[self.kind]


_FLAGS = (True, False, None, ABSENT)


def options(name: str) -> Iterator[tuple[Any, ...]]:
    """Groups of values to try for an attribute, likeliest first; within a group every value may lead somewhere."""
    lower = name.lower()
    if lower == "training":
        yield (True, False)
        return
    if "group" in lower:
        yield (None,)
    groups = {
        "weight": (Role("weight"),),
        "flag": _FLAGS,
        "eps": (Role("eps"),),
        "width": (Role("width"),),
        "widths": (Role("widths"),),
    }
    if "eps" in lower:
        first = "eps"
    elif lower.startswith(("with_", "use_", "is_", "has_", "add_", "elementwise")) or "_with_" in lower:
        first = "flag"
    elif "shape" in lower:
        first = "widths"
    elif "dim" in lower or "size" in lower:
        first = "width"
    else:
        first = "weight"
    yield groups.pop(first)
    yield from groups.values()
