"""What the attributes of a router may stand for, and in which order that is tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .routers_probes import Probe
from .standin import UnknownAttribute

MAX_FAILURES = 40
CONSTANTS: Mapping[str, bool] = {"off": False, "on": True}
"""Flags of which one value alone is understood."""

_METHODS = {True: "group_limited_greedy", False: "greedy"}
_HINTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("debug", "force"), "off"),
    (("correction", "expert_bias"), "correction"),
    (("bias",), "bias"),
    (("weight",), "weight"),
    (("topk_method",), "limited"),
    (("topk_group", "limited_group", "top_k_group"), "kept"),
    (("group",), "groups"),
    (("norm_topk", "route_norm", "renorm", "norm_expert"), "divides"),
    (("top_k", "topk", "experts_per"), "top_k"),
    (("scal",), "scale"),
    (("score", "selection"), "score"),
    (("num_experts", "n_routed_experts", "num_local_experts"), "experts"),
    (("dim", "size"), "width"),
)
_FREE = ("top_k", "experts", "width", "scale", "divides", "weight", "correction", "bias", "groups", "kept", "held")


def options(name: str) -> Iterator[str]:
    """Roles to try for an attribute, likeliest first: names are hints, what is computed decides."""
    last = name.rpartition(".")[2].lower()
    if last.startswith(("use_", "is_", "has_")):
        yield from CONSTANTS
        return
    likeliest = next((role for words, role in _HINTS if any(word in last for word in words)), None)
    if likeliest is not None:
        yield likeliest
    elif "." not in name and last in ("config", "gate", "classifier", "proj", "layer", "wg"):
        yield "held"
    else:
        yield from _FREE


def value_of(role: str, probe: Probe, limited: str | None = None) -> Any:
    """The value of an attribute; `limited`: in place of a known way of choosing."""
    if role in CONSTANTS:
        return CONSTANTS[role]
    if role == "limited":
        return limited or _METHODS[probe.limited]
    return {
        "top_k": probe.top_k,
        "experts": probe.experts,
        "width": probe.x.shape[-1],
        "scale": probe.scale,
        "divides": probe.divides,
        "score": probe.score,
        "weight": probe.weight,
        "bias": probe.bias,
        "correction": probe.correction,
        "groups": probe.groups,
        "kept": probe.kept,
    }[role]


class Held:
    """Stands for an object of a router: it has attributes, and is a projection when it is called.

    Args:
        name: of the attribute that holds it.
        assignment: what its attributes stand for, by dotted names.
        probe: where their values come from.
        seen: takes down that it was called, and under which autocast.
    """

    def __init__(self, name: str, assignment: Mapping[str, str], probe: Probe, seen: Any) -> None:
        self._held = (name, assignment, probe, seen)

    def __getattribute__(self, attribute: str) -> Any:
        if attribute in ("_held", "__class__"):
            return object.__getattribute__(self, attribute)
        name, assignment, probe, _ = object.__getattribute__(self, "_held")
        dotted = f"{name}.{attribute}"
        if dotted not in assignment or assignment[dotted] == "held":
            raise UnknownAttribute(dotted)
        return value_of(assignment[dotted], probe)

    def __call__(self, x: Tensor) -> Tensor:
        name, _, probe, seen = object.__getattribute__(self, "_held")
        seen.called.add(name)
        seen.cast = seen.cast or x.dtype is not probe.x.dtype
        # Autocast to float32 is none on a CPU, but says what is asked of other devices.
        seen.autocast = seen.autocast or torch.get_autocast_dtype("cpu") is torch.float32
        return F.linear(x, probe.weight)
