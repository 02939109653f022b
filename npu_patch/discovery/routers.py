"""Recognise the routers of mixtures of experts by what their forward computes."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .bracket import NotRecognised, failure, foreign_code, no_random_draws, plain, quiet
from .branches import Settled, check_branches
from .outside import Part, joined, parts_of
from .routers_probes import Probe, probes, ungrouped
from .routers_reading import Reading, RouterMeaning, Run, Seen
from .routers_roles import CONSTANTS, MAX_FAILURES, Held, options, value_of
from .standin import Refused, StandIn, UnknownAttribute, record
from .watch import Watch

__all__ = ["RouterMeaning", "recognise_router"]


@foreign_code()
def recognise_router(cls: type) -> RouterMeaning:
    """What `cls.forward` computes, found by running it on stand-ins for instances, forward and backward.

    Raises:
        NotRecognised: nothing that is known.
    """
    forward = plain(next((vars(one)["forward"] for one in cls.__mro__ if "forward" in vars(one)), None))
    code = forward.__code__
    if code.co_argcount not in (2, 3) or code.co_kwonlyargcount or code.co_flags & 0x0C:
        raise NotRecognised("takes more than tokens and a bias")
    with quiet(), no_random_draws():
        search = _Search(cls, forward)
        for dims in (3, 2):
            search.dims = dims
            meaning = search.explore({})
            if meaning is not None:
                return meaning
        raise NotRecognised(search.reason)


class _Search:
    """Finds what the attributes stand for, and what is computed from them."""

    def __init__(self, cls: type, forward: types.FunctionType) -> None:
        self.cls, self.forward = cls, forward
        self.takes = forward.__code__.co_argcount == 3
        self.optional = self.takes and (forward.__defaults__ or (0,))[-1] is None
        self.dims = 3
        self.failures = 0
        self.reason = "computes no known choice of experts"
        self._depth = -1

    def explore(self, assignment: dict[str, str]) -> RouterMeaning | None:
        """The meaning that is reached by giving roles to more attributes."""
        try:
            return self._try(assignment)
        except UnknownAttribute as unknown:
            name = unknown.name
        except NotRecognised as error:
            self.failures += 1
            if len(assignment) > self._depth:
                self._depth, self.reason = len(assignment), str(error)
            return None
        for role in options(name):
            if role not in CONSTANTS and role != "held" and role in assignment.values():
                continue
            if self.failures > MAX_FAILURES:
                return None
            found = self.explore({**assignment, name: role})
            if found is not None:
                return found
        return None

    # ---- running -----------------------------------------------------------------------------------------------------

    def _try(self, assignment: dict[str, str]) -> RouterMeaning:
        watch = Watch(self.cls.__module__)
        seen = Seen()
        runs = [self._run(probe, assignment, watch, seen) for probe in probes(self.dims)]
        if runs[0].failed:
            raise NotRecognised(seen.error)
        without = probes(self.dims)[:2] if self.optional else ()
        bare = [self._run(probe, assignment, watch, seen, given=False) for probe in without]
        roles = {role: name for name, role in assignment.items() if role not in (*CONSTANTS, "held")}
        loose = [self._run(ungrouped(self.dims), assignment, watch, seen)] if "groups" in roles else []
        if "limited" in roles:
            self._run(probes(self.dims)[0], assignment, watch, seen, limited="neither")
        meaning = Reading(assignment, roles, seen, self.takes, self.optional).meaning(runs, bare, loose)
        settled = Settled(
            values=frozenset(name for name, _ in meaning.conditions),
            methods=frozenset((self.forward.__code__, *(one.__code__ for _, one in seen.methods.items()))),
            parameters=frozenset(() if self.takes else (self.forward.__code__,)),
        )
        check_branches(watch, settled)
        own = (Part(self.cls, name, function) for name, function in seen.methods.items())
        return replace(
            meaning,
            dims=self._dims(assignment, meaning),
            methods=tuple(sorted(seen.methods.items())),
            parts=joined((*own, *parts_of(watch))),
        )

    def _dims(self, assignment: dict[str, str], meaning: RouterMeaning) -> tuple[int, ...]:
        """The dimensions that x may have: other ones, if they give the same meaning."""
        found = [self.dims]
        for dims in {2, 3} - {self.dims}:
            seen = Seen()
            try:
                runs = [self._run(probe, assignment, Watch(self.cls.__module__), seen) for probe in probes(dims)]
                if Reading(assignment, dict(meaning.roles), seen, self.takes, self.optional).holds(meaning, runs):
                    found.append(dims)
            except (NotRecognised, UnknownAttribute):
                continue
        return tuple(sorted(found))

    def _run(
        self,
        probe: Probe,
        assignment: dict[str, str],
        watch: Watch,
        seen: Seen,
        given: bool = True,
        limited: str | None = None,
    ) -> Run:
        values: dict[str, Any] = {}
        for name, role in assignment.items():
            if "." not in name:
                values[name] = Held(name, assignment, probe, seen) if role == "held" else value_of(role, probe, limited)
        stand_in = StandIn(self.cls, values)
        seen.methods.update(_give_wrapped(self.cls, stand_in, values))
        arguments = (probe.x, probe.correction) if self.takes and given else (probe.x,)
        tensors = (probe.x, probe.weight, probe.bias, probe.correction)
        versions = [t._version for t in tensors]
        own, softmax = Watch(self.cls.__module__), _Softmax()
        try:
            with softmax, torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
                outputs = own.run(self.forward, stand_in, *arguments)
        except Refused as refused:
            raise NotRecognised(str(refused)) from None
        except UnknownAttribute:
            raise
        except BaseException as error:
            seen.error = seen.error or str(failure(error))
            if limited is not None:
                _add(watch, own)
            return Run(probe, failed=True)
        finally:
            seen.methods.update(record(stand_in)[1])
        _add(watch, own)
        if probe.top_k in softmax.widths:
            raise NotRecognised("takes the softmax of chosen logits alone: fused, that launches as much")
        if [t._version for t in tensors] != versions:
            probes.cache_clear()
            raise NotRecognised("modifies its input")
        if not isinstance(outputs, tuple) or not all(isinstance(one, Tensor) for one in outputs):
            raise NotRecognised("returns no tuple of tensors")
        return Run(probe, outputs)


def _add(watch: Watch, other: Watch) -> None:
    for code, steps in other.steps.items():
        watch.steps[code] |= steps
    for code, where in other.entered.items():
        watch.entered.setdefault(code, where)


def _give_wrapped(cls: type, stand_in: StandIn, values: dict[str, Any]) -> dict[str, types.FunctionType]:
    """Methods under `torch.no_grad()` are wrappers, which a stand-in would refuse to call: they become its values."""
    given: dict[str, types.FunctionType] = {}
    for owner in reversed(cls.__mro__):
        for name, value in vars(owner).items():
            if owner.__module__ == cls.__module__ and _without_grad(value):
                values[name] = types.MethodType(value, stand_in)
                given[name] = value
    return given


class _Softmax(TorchDispatchMode):
    """Takes down over how many numbers softmax was computed; counts integers, which the CPU cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._softmax.default:
            self.widths.add(args[0].shape[-1])
        if func is torch.ops.aten.histc.default and not args[0].is_floating_point():
            return func(args[0].double(), *args[1:], **(kwargs or {})).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


def _without_grad(value: Any) -> bool:
    inner = getattr(value, "__wrapped__", None)
    if not isinstance(value, types.FunctionType) or not isinstance(inner, types.FunctionType):
        return False
    return value.__globals__.get("__name__") == "torch.utils._contextlib"
