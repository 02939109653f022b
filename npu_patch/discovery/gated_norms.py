"""Recognise root-mean-square norms with a gate, whose forward takes the gate beside the input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .attributes import Role, options
from .bracket import NotRecognised, foreign_code, no_random_draws, quiet
from .norm_meaning import NormMeaning
from .norm_probes import GATED, Probe, gated_probes
from .norms import Search, forward_of

_ACTIVATION_NAMES = ("silu", "swish", "sigmoid")


@foreign_code()
def recognise_gated_norm(cls: type) -> tuple[NormMeaning, ...]:
    """Every meaning of `cls.forward(input, gate)`; the formula is a name in `GATED`.

    Raises:
        NotRecognised: it equals no known formula.
    """
    forward = forward_of(cls, arguments=2)
    with quiet(), no_random_draws():
        search = _GatedSearch(cls, forward)
        found = search.explore({})
        if not found:
            raise NotRecognised(search.reason)
        for meaning in found:
            if GATED[meaning.formula].grouped != (len(meaning.groups) == 1):
                raise NotRecognised("normalises in groups that are no attribute of it")
        return tuple(found)


class _GatedSearch(Search):
    formulas = GATED

    def probes(self) -> tuple[Probe, ...]:
        return gated_probes()

    def options(self, name: str) -> Iterator[tuple[Any, ...]]:
        if "group" in name.lower():
            kinds = ("group size", "groups") if "size" in name.lower() else ("groups", "group size")
            yield from ((Role(kind),) for kind in kinds)
        if "act" in name.lower():
            yield _ACTIVATION_NAMES
        yield from options(name)
