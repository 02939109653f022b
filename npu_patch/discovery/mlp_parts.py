"""Running the forward of an MLP on parts that take down what they are called on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .bracket import NotRecognised, failure
from .standin import Refused, StandIn, UnknownAttribute, record

_HIDDEN, _INNER = 6, 5


@dataclass
class Probe:
    x: Tensor
    gradient: Tensor
    projections: tuple[Tensor, Tensor]
    down: Tensor
    packed: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.packed = torch.cat(self.projections).detach().requires_grad_()

    def leaves(self, packed: bool) -> tuple[Tensor, ...]:
        return (self.x, self.packed, self.down) if packed else (self.x, *self.projections, self.down)


@functools.cache
def probes() -> tuple[Probe, ...]:
    return (
        _probe((2, 7, _HIDDEN), torch.float32, 1e3),
        _probe((9, _HIDDEN), torch.bfloat16, 1e3),
        _probe((3, 5, _HIDDEN), torch.float16, 20.0),
    )


def _probe(shape: tuple[int, ...], dtype: torch.dtype, largest: float) -> Probe:
    generator = torch.Generator().manual_seed(11)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    x = draw(*shape)
    rows = x.view(-1, shape[-1])
    for row, scale in enumerate((0.0, 1e-4, largest, 8.0)):
        rows[row] *= scale
    return Probe(
        x.to(dtype).requires_grad_(),
        draw(*shape).to(dtype),
        (draw(_INNER, _HIDDEN).to(dtype).requires_grad_(), draw(_INNER, _HIDDEN).to(dtype).requires_grad_()),
        draw(_HIDDEN, _INNER).to(dtype).requires_grad_(),
    )


# ---- running the forward on parts ------------------------------------------------------------------------------------


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(a.detach(), b.detach())


class _Part:
    """Stands for a sub-module: it can be called with one tensor, and nothing else."""

    __slots__ = ("_name", "_run")

    def __init__(self, run: Run, name: str) -> None:
        object.__setattr__(self, "_run", run)
        object.__setattr__(self, "_name", name)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        run: Run = object.__getattribute__(self, "_run")
        name: str = object.__getattribute__(self, "_name")
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            raise Refused(f"calls {name} with more than a tensor")
        return run.call(name, args[0])

    def __getattribute__(self, attribute: str) -> Any:
        raise Refused(f"reads {object.__getattribute__(self, '_name')}.{attribute}")

    def __bool__(self) -> bool:
        raise Refused(f"depends on {object.__getattribute__(self, '_name')}")

    def __iter__(self) -> Any:
        raise Refused(f"goes through {object.__getattribute__(self, '_name')}")

    def __eq__(self, other: object) -> bool:
        raise Refused(f"compares {object.__getattribute__(self, '_name')}")

    __hash__ = object.__hash__


class Run:
    """One run of a forward: which attribute was called on what."""

    def __init__(self, probe: Probe, packed: bool, between: int, activation: Callable[[Tensor], Tensor]) -> None:
        self.probe, self.packed, self.between, self.function = probe, packed, between, activation
        self.projections: list[tuple[str, Tensor]] = []
        self.activated: tuple[str, int] | None = None
        self.product: Tensor | None = None
        self.later: list[str] = []
        self.result: Tensor | None = None

    def sides(self) -> tuple[Tensor, ...]:
        """Gate and up, in the order of halves or calls."""
        if self.packed:
            return self.projections[0][1].chunk(2, -1) if self.projections else ()
        return tuple(out for _, out in self.projections)

    def call(self, name: str, t: Tensor) -> Tensor:
        if _equal(t, self.probe.x):
            if len(self.projections) == (1 if self.packed else 2):
                raise Refused(f"calls {name} on its input, too")
            weight = self.probe.packed if self.packed else self.probe.projections[len(self.projections)]
            out = F.linear(t, weight)
            self.projections.append((name, out))
            return out
        for i, side in enumerate(self.sides()):
            if _equal(t, side):
                if self.activated is not None or self.later:
                    raise Refused(f"calls {name} on what is activated or multiplied already")
                self.activated = (name, i)
                return self.function(t)
        if self.product is None:
            self.product = t
        self.later.append(name)
        if len(self.later) <= self.between:
            return between_module(t)
        if len(self.later) > self.between + 1:
            raise Refused(f"calls {name} on the result of {self.later[-2]}")
        self.result = F.linear(t, self.probe.down)
        return self.result


def between_module(t: Tensor) -> Tensor:
    return t * 0.75


class _Values(Mapping[str, Any]):
    """Every attribute is a part, but for one that is None."""

    def __init__(self, cls: type, run: Run, none: str | None) -> None:
        self._cls, self._run, self._none = cls, run, none
        self._parts: dict[str, _Part] = {}

    def __contains__(self, name: object) -> bool:
        # What the class itself defines, a method or a constant, is no part.
        return not any(name in vars(owner) for owner in self._cls.__mro__) or name in nn.Module.__annotations__

    def __getitem__(self, name: str) -> Any:
        if name == self._none:
            return None
        return self._parts.setdefault(name, _Part(self._run, name))

    def __iter__(self) -> Any:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def execute(cls: type, forward: Callable[..., Any], run: Run, none: str | None = None) -> Tensor:
    """The result of a forward whose every attribute is a part, or None for the one named `none`.

    Raises:
        NotRecognised: it fails, reads more than parts, or returns something else than the last one's result.
    """
    stand_in = StandIn(cls, _Values(cls, run, none))
    version = run.probe.x._version
    try:
        y = forward(stand_in, run.probe.x)
    except Refused as refused:
        raise NotRecognised(str(refused)) from None
    except UnknownAttribute as unknown:
        raise NotRecognised(f"reads {unknown.name} of its class") from None
    except BaseException as error:
        raise failure(error) from None
    if run.probe.x._version != version:
        probes.cache_clear()
        raise NotRecognised("modifies its input")
    read, methods = record(stand_in)
    called = {name for name, _ in run.projections} | set(run.later)
    called |= {run.activated[0]} if run.activated else set()
    if methods:
        raise NotRecognised(f"calls its method {min(methods)}")
    if read - called:
        raise NotRecognised(f"reads {min(read - called)}")
    if not isinstance(y, Tensor) or run.result is None or not _equal(y, run.result):
        raise NotRecognised("returns something else than the result of its last projection")
    return y
