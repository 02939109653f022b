"""Recognise root-mean-square norms by what their forward computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch

from .attributes import Role, options
from .bracket import NotRecognised, failure, foreign_code, no_random_draws, plain, quiet, same
from .branches import Settled, check_branches
from .norm_meaning import NormMeaning, is_norm_class, says_rms
from .norm_probes import FORMULAS, GAIN, Expected, Gradients, Probe, forget, probes
from .outside import Part, joined, parts_of
from .standin import Refused, StandIn, UnknownAttribute, record
from .watch import Watch

__all__ = ["NormMeaning", "is_norm_class", "recognise_norm", "says_rms"]

MAX_FAILURES = 24


@foreign_code()
def recognise_norm(cls: type, gains: bool = False) -> tuple[NormMeaning, ...]:
    """Every meaning of `cls.forward`, one per combination of attribute values that it distinguishes.

    The forward runs on stand-ins for instances, forward and backward, in three dtypes, on 1-D to 5-D inputs of several
    widths with rows from 0 to 1e12, and without gradients.  What it branches on must go both ways, or be an attribute.

    Args:
        cls: the class.
        gains: also look for a number that is added to the weight; the caller must then heed `NormMeaning.gain`.

    Raises:
        NotRecognised: it equals no known formula.
    """
    forward = forward_of(cls, arguments=1)
    with quiet(), no_random_draws():
        search = (_GainSearch if gains else Search)(cls, forward)
        found = search.explore({})
        if not found:
            raise NotRecognised(search.reason)
        return tuple(search.without_weight(found))


def forward_of(cls: type, arguments: int) -> FunctionType:
    """The forward of a class, which takes this many arguments.

    Raises:
        NotRecognised: it takes others, or is no plain function.
    """
    if issubclass(cls, torch.jit.ScriptModule):
        raise NotRecognised("is a ScriptModule")
    forward = plain(_attribute(cls, "forward"))
    code = forward.__code__
    if code.co_argcount != 1 + arguments or code.co_kwonlyargcount or code.co_flags & 0x0C:
        names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
        raise NotRecognised(f"its forward takes ({', '.join(names)})")
    return forward


def _attribute(cls: type, name: str) -> object:
    for owner in cls.__mro__:
        if name in vars(owner):
            return vars(owner)[name]
    return None


# ---- the search over what the attributes may be ----------------------------------------------------------------------


def _whenever(found: list[NormMeaning], name: str) -> list[NormMeaning]:
    """The same meanings without a condition on a flag, where both of its values lead to one meaning."""
    without = [replace(m, conditions=tuple(pair for pair in m.conditions if pair[0] != name)) for m in found]
    result: list[NormMeaning] = []
    for meaning, key in zip(found, without, strict=True):
        both = without.count(key) == 2
        if not both or key not in result:
            result.append(key if both else meaning)
    return result


class Search:
    """Finds assignments of attribute values under which a forward equals a formula."""

    formulas: Iterable[str] = FORMULAS

    def __init__(self, cls: type, forward: FunctionType) -> None:
        self.cls = cls
        self.forward = forward
        self.failures = 0
        self.reason = "computes no known norm"
        self._rank = (-1, -1)

    def probes(self) -> tuple[Probe, ...]:
        return probes()

    def options(self, name: str) -> Iterator[tuple[Any, ...]]:
        return options(name)

    def explore(self, assignment: dict[str, Any]) -> list[NormMeaning]:
        """Every meaning that can be reached by giving values to more attributes."""
        try:
            return [self._try(assignment)]
        except UnknownAttribute as unknown:
            name = unknown.name
        except NotRecognised as error:
            self.failures += 1
            self._note(len(assignment), str(error))
            return []
        for group in self.options(name):
            if self.failures > MAX_FAILURES:
                self._note(len(assignment), "depends on too many attributes")
                return []
            found = [meaning for value in group for meaning in self.explore({**assignment, name: value})]
            if found and name == "training":
                found = _whenever(found, name)
            if found:
                return found
        return []

    def without_weight(self, found: list[NormMeaning]) -> Iterator[NormMeaning]:
        """Adds what the same forward does when its weight is None, and what an epsilon of None stands for."""
        for meaning in found:
            assignment = self._assignment(meaning)
            for name in ("x", "float32"):
                try:
                    self._try({**assignment, meaning.eps: Role("no eps")}, default_eps=name)
                except (NotRecognised, UnknownAttribute):
                    continue
                meaning = replace(meaning, default_eps=name)
                break
            yield meaning
            if meaning.weight is not None:
                try:
                    yield replace(self._try({**assignment, meaning.weight: None}), default_eps=meaning.default_eps)
                except (NotRecognised, UnknownAttribute):
                    continue

    def _assignment(self, meaning: NormMeaning) -> dict[str, Any]:
        assignment: dict[str, Any] = dict(meaning.conditions)
        assignment.update({name: Role("width" if kind is int else "widths") for name, kind in meaning.widths})
        assignment[meaning.eps] = Role("eps")
        if meaning.weight is not None:
            assignment[meaning.weight] = Role("weight")
        if meaning.gain is not None:
            assignment[meaning.gain] = Role("gain")
        return assignment

    def _note(self, depth: int, reason: str) -> None:
        """Keep the reason that says most: an attempt that ran, then the one that got furthest."""
        rank = (0 if reason.startswith("fails") else 1 if reason.startswith("depends") else 2, depth)
        if rank > self._rank:
            self._rank, self.reason = rank, reason

    def _try(self, assignment: Mapping[str, Any], default_eps: str | None = None) -> NormMeaning:
        """The meaning under one assignment.

        Raises:
            NotRecognised: under it, the forward fails or computes something unknown.
            UnknownAttribute: it reads an attribute that has no value yet.
        """
        alive = list(self.formulas)
        read: set[str] = set()
        methods: dict[str, Any] = {}
        watch = Watch(self.cls.__module__)
        results: dict[tuple[torch.dtype, torch.dtype], torch.dtype] = {}
        for probe in self.probes():
            eps = {None: probe.eps, "x": torch.finfo(probe.x.dtype).eps, "float32": torch.finfo(torch.float32).eps}
            values = {name: v.value(probe) if isinstance(v, Role) else v for name, v in assignment.items()}
            stand_in = StandIn(self.cls, values)
            try:
                y = self._run(stand_in, probe, watch)
            except NotRecognised:
                if not probe.mixed:
                    raise
                continue
            seen, used = record(stand_in)
            read |= seen
            methods.update(used)
            if probe.mixed:
                if any(_close(y, probe.expect(name, eps[default_eps]).y) for name in alive):
                    results[probe.x.dtype, probe.weight.dtype] = y.dtype
                continue
            gradients = probe.gradients(y)
            alive = [name for name in alive if _agrees(y, gradients, probe, probe.expect(name, eps[default_eps]))]
            if not alive:
                raise NotRecognised("computes no known norm")
            results[probe.x.dtype, probe.weight.dtype] = y.dtype
        meaning = meaning_of(alive[0], assignment, read, methods, results)
        check_branches(watch, self._settled(meaning, read))
        own = (Part(self.cls, name, function) for name, function in meaning.methods)
        return replace(meaning, parts=joined((*own, *parts_of(watch))))

    def _settled(self, meaning: NormMeaning, read: set[str]) -> Settled:
        """What a replacement makes sure of: the conditions, and that weight, epsilon and gate are there or not."""
        code = self.forward.__code__
        return Settled(
            values=frozenset(name for name, _ in meaning.conditions),
            presence=frozenset(read),
            methods=frozenset((code, *(method.__code__ for _, method in meaning.methods))),
            parameters=frozenset((code,)),
        )

    def _run(self, stand_in: StandIn, probe: Probe, watch: Watch) -> torch.Tensor:
        tensors = (*probe.arguments, probe.weight)
        versions = [t._version for t in tensors]
        try:
            with torch.set_grad_enabled(probe.records):
                y = watch.run(self.forward, stand_in, *probe.arguments)
        except Refused as refused:
            raise NotRecognised(str(refused)) from None
        except BaseException as error:
            if isinstance(error, TypeError) and "not callable" in str(error):
                raise NotRecognised("calls other modules") from None
            raise failure(error) from None
        if [t._version for t in tensors] != versions:
            forget()
            raise NotRecognised("modifies its input")
        if not isinstance(y, torch.Tensor):
            raise NotRecognised(f"returns a {type(y).__name__}")
        if y.shape != probe.x.shape:
            raise NotRecognised(f"returns {tuple(y.shape)} for {tuple(probe.x.shape)}")
        return y


class _GainSearch(Search):
    formulas = (*FORMULAS, GAIN)

    def options(self, name: str) -> Iterator[tuple[Any, ...]]:
        if any(word in name.lower() for word in ("gain", "center", "offset", "shift")):
            yield (Role("gain"),)
        yield from options(name)


def _agrees(y: torch.Tensor, gradients: Gradients, probe: Probe, expected: Expected) -> bool:
    if probe.extreme:
        return torch.equal(y.isnan(), expected.y.isnan()) and same(y.nan_to_num(), expected.y.nan_to_num())
    if not same(y, expected.y):
        return False
    if not probe.backward:
        return True
    for ours, theirs in zip(gradients, expected.gradients, strict=True):
        if ours is None or theirs is None:
            if ours is not theirs:
                return False
        elif not same(ours, theirs, loose=True):
            return False
    return True


def _close(y: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal up to one rounding to a half type: dtype pairs in which formulas may round at different places."""
    a, b = y.detach().float(), expected.float()
    return y.shape == expected.shape and bool(((a - b).abs() <= 0.01 * b.abs() + 1e-6).all())


def meaning_of(
    formula: str,
    assignment: Mapping[str, Any],
    read: set[str],
    methods: Mapping[str, Any],
    results: Mapping[tuple[torch.dtype, torch.dtype], torch.dtype],
) -> NormMeaning:
    """Names weight, epsilon and the rest from what was read.

    Raises:
        NotRecognised: it reads no epsilon, or two attributes for one thing.
    """
    roles: dict[str, list[str]] = {}
    for name in sorted(read):
        value = assignment[name]
        roles.setdefault(value.kind if isinstance(value, Role) else "value", []).append(name)
    eps = roles.get("eps", []) + roles.get("no eps", [])
    weight = roles.get("weight", [])
    if len(eps) != 1 or len(weight) > 1:
        raise NotRecognised("reads no epsilon" if not eps else f"reads {', '.join(eps + weight)} for one thing")
    gain = roles.get("gain", [])
    if len(gain) != (formula == GAIN):
        raise NotRecognised("reads a gain that does nothing")
    if (formula == "none") == bool(weight):
        raise NotRecognised("reads a weight that does nothing" if weight else "applies a weight that it does not read")
    return NormMeaning(
        formula=formula,
        weight=weight[0] if weight else None,
        eps=eps[0],
        results=dict(results),
        conditions=tuple((name, assignment[name]) for name in roles.get("value", [])),
        widths=tuple((n, int) for n in roles.get("width", [])) + tuple((n, tuple) for n in roles.get("widths", [])),
        groups=tuple((n, kind) for kind in ("groups", "group size") for n in roles.get(kind, [])),
        gain=gain[0] if gain else None,
        methods=tuple(sorted(methods.items())),
    )
