"""Recognise gated MLPs by what their forward computes, and activations by their values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .bracket import NotRecognised, no_random_draws, plain, quiet, same
from .standin import Refused, StandIn, UnknownAttribute, record

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True)
class GatedMeaning:
    """`down(between(activation(gate) * up))`, where gate and up are projections of the input.

    Args:
        projections: attributes of the modules that are called on the input, in the order in which they are called: one
            whose result is split into two halves, or two.
        gate: which half, or which projection, is activated: 0 or 1.
        activation: attribute of the activation, or None.
        function: the activation where it is no attribute: "silu", "gelu", "gelu_tanh".
        between: attributes of modules that are called on the product.
        down: attribute of the module whose result is returned.
    """

    projections: tuple[str, ...]
    gate: int
    activation: str | None
    function: str | None
    between: tuple[str, ...]
    down: str

    @property
    def packed(self) -> bool:
        return len(self.projections) == 1

    def __str__(self) -> str:
        text = f"{self.activation or self.function} of " + (
            f"the {('first', 'second')[self.gate]} half of {self.projections[0]}"
            if self.packed
            else self.projections[self.gate]
        )
        return text + "".join(f", then {name}" for name in self.between)


class NotGated(NotRecognised):
    """It is no gated MLP at all, so that not recognising it is not worth saying."""


def recognise_activation(function: Callable[[Tensor], Tensor]) -> str | None:
    """What a function of one tensor equals in float32 and bfloat16: "silu", "gelu" (erf), "gelu_tanh" or None."""
    with quiet():
        x = torch.cat((torch.linspace(-12, 12, 385), torch.tensor([0.0, 1e-4, -1e-4, 1e3, -1e3])))
        try:
            values = [(dtype, function(x.to(dtype))) for dtype in (torch.float32, torch.bfloat16)]
        except Exception:
            return None
        for name, known in _ACTIVATIONS.items():
            if all(isinstance(y, Tensor) and same(y, known(x.to(dtype))) for dtype, y in values):
                return name
    return None


def recognise_gated_mlp(cls: type) -> GatedMeaning:
    """What `cls.forward` computes, found by running it on a stand-in whose sub-modules take down what they get.

    Forward and backward are compared with the formula in three dtypes, on 2-D and 3-D inputs with rows of 0, 1e-4 and
    large values, and with activations that no model has.

    Raises:
        NotGated: the forward does not look like that of a gated MLP.
        NotRecognised: it does, and computes something else.
    """
    try:
        forward = plain(vars(cls).get("forward"))
    except NotRecognised as error:
        raise NotGated(str(error)) from None
    code = forward.__code__
    if code.co_argcount != 2 or code.co_kwonlyargcount or code.co_flags & 0x2C or not 3 <= len(code.co_names) <= 24:
        raise NotGated("its forward takes more than one tensor")
    with quiet(), no_random_draws():
        meaning = _find(cls, forward)
        for probe in _probes():
            for activation in (torch.sin, F.silu):
                _compare(cls, forward, meaning, probe, activation)
    return meaning


# ---- inputs ----------------------------------------------------------------------------------------------------------

_HIDDEN, _INNER = 6, 5


@dataclass
class _Probe:
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
def _probes() -> tuple[_Probe, ...]:
    return (
        _probe((2, 7, _HIDDEN), torch.float32, 1e3),
        _probe((9, _HIDDEN), torch.bfloat16, 1e3),
        _probe((3, 5, _HIDDEN), torch.float16, 20.0),
    )


def _probe(shape: tuple[int, ...], dtype: torch.dtype, largest: float) -> _Probe:
    generator = torch.Generator().manual_seed(11)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    x = draw(*shape)
    rows = x.view(-1, shape[-1])
    for row, scale in enumerate((0.0, 1e-4, largest, 8.0)):
        rows[row] *= scale
    return _Probe(
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

    def __init__(self, run: _Run, name: str) -> None:
        object.__setattr__(self, "_run", run)
        object.__setattr__(self, "_name", name)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        run: _Run = object.__getattribute__(self, "_run")
        name: str = object.__getattribute__(self, "_name")
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            raise Refused(f"calls {name} with more than a tensor")
        return run.call(name, args[0])

    def __getattribute__(self, attribute: str) -> Any:
        if attribute in ("__class__", "__call__"):
            return object.__getattribute__(self, attribute)
        raise Refused(f"reads {object.__getattribute__(self, '_name')}.{attribute}")

    def __bool__(self) -> bool:
        raise Refused(f"depends on {object.__getattribute__(self, '_name')}")

    def __iter__(self) -> Any:
        raise Refused(f"goes through {object.__getattribute__(self, '_name')}")

    def __eq__(self, other: object) -> bool:
        raise Refused(f"compares {object.__getattribute__(self, '_name')}")

    __hash__ = object.__hash__


class _Run:
    """One run of a forward: which attribute was called on what."""

    def __init__(self, probe: _Probe, packed: bool, between: int, activation: Callable[[Tensor], Tensor]) -> None:
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
            return _between(t)
        if len(self.later) > self.between + 1:
            raise Refused(f"calls {name} on the result of {self.later[-2]}")
        self.result = F.linear(t, self.probe.down)
        return self.result


def _between(t: Tensor) -> Tensor:
    return t * 0.75


class _Values(Mapping[str, Any]):
    """Every attribute is a part."""

    def __init__(self, cls: type, run: _Run) -> None:
        self._cls, self._run = cls, run
        self._parts: dict[str, _Part] = {}

    def __contains__(self, name: object) -> bool:
        # What the class itself defines, a method or a constant, is no part.
        return not any(name in vars(owner) for owner in self._cls.__mro__) or name in nn.Module.__annotations__

    def __getitem__(self, name: str) -> Any:
        return self._parts.setdefault(name, _Part(self._run, name))

    def __iter__(self) -> Any:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _execute(cls: type, forward: Callable[..., Any], run: _Run) -> Tensor:
    stand_in = StandIn(cls, _Values(cls, run))
    version = run.probe.x._version
    try:
        y = forward(stand_in, run.probe.x)
    except Refused as refused:
        raise NotRecognised(str(refused)) from None
    except UnknownAttribute as unknown:
        raise NotRecognised(f"reads {unknown.name} of its class") from None
    except Exception as error:
        raise NotRecognised(f"fails on a small input: {type(error).__name__}: {str(error)[:80]}") from None
    if run.probe.x._version != version:
        _probes.cache_clear()
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


def _find(cls: type, forward: Callable[..., Any]) -> GatedMeaning:
    reasons: dict[bool, str] = {}
    gated = False
    for packed in (True, False):
        for between in (0, 1, 2):
            run = _Run(_probes()[0], packed, between, torch.sin)
            try:
                _execute(cls, forward, run)
                return _meaning(run)
            except NotRecognised as error:
                reasons[packed] = str(error)
            # Two projections of one input, or the halves of one that are activated and multiplied.
            gated = gated or (len(run.projections) == 2 if not packed else run.activated is not None)
            if len(run.later) <= between + 1:
                break  # more modules after the product would change nothing
    kind = NotRecognised if gated else NotGated
    raise kind(reasons[False] if len(run.projections) == 2 else reasons[True])


def _meaning(run: _Run) -> GatedMeaning:
    sides = run.sides()
    if len(sides) != 2 or run.product is None or len(run.later) != run.between + 1:
        raise NotRecognised("multiplies no two projections of its input")
    down, between = run.later[-1], tuple(run.later[:-1])
    names = tuple(name for name, _ in run.projections)
    if len({*names, *run.later, *(run.activated or ("",))[:1]}) != len(names) + len(run.later) + 1:
        raise NotRecognised("uses one module for two things")
    gates = (run.activated[1],) if run.activated else (0, 1)
    functions: Mapping[Any, Callable[[Tensor], Tensor]] = {None: run.function} if run.activated else _ACTIVATIONS
    for gate in gates:
        for name, function in functions.items():
            if same(run.product, function(sides[gate]) * sides[1 - gate]):
                return GatedMeaning(names, gate, run.activated[0] if run.activated else None, name, between, down)
    raise NotRecognised("does not multiply an activated projection by the other one")


def _compare(
    cls: type, forward: Callable[..., Any], meaning: GatedMeaning, probe: _Probe, activation: Callable[[Tensor], Tensor]
) -> None:
    """Forward and backward of the class against the formula.

    Raises:
        NotRecognised: they differ.
    """
    run = _Run(probe, meaning.packed, len(meaning.between), activation)
    y = _execute(cls, forward, run)
    if _meaning(run) != meaning:
        raise NotRecognised("computes different things in different dtypes")
    if meaning.packed:
        sides = F.linear(probe.x, probe.packed).chunk(2, -1)
    else:
        first, second = (F.linear(probe.x, weight) for weight in probe.projections)
        sides = (first, second)
    function = _ACTIVATIONS[meaning.function] if meaning.function else activation
    product = function(sides[meaning.gate]) * sides[1 - meaning.gate]
    for _ in meaning.between:
        product = _between(product)
    expected = F.linear(product, probe.down)
    if not same(y, expected) or not y.requires_grad:
        raise NotRecognised("computes no gated MLP")
    leaves = probe.leaves(meaning.packed)
    found = torch.autograd.grad(y, leaves, probe.gradient, allow_unused=True)
    wanted = torch.autograd.grad(expected, leaves, probe.gradient)
    for ours, theirs in zip(found, wanted, strict=True):
        if ours is None or not same(ours, theirs, loose=True):
            raise NotRecognised("its gradient is not that of a gated MLP")
