"""Recognise gated MLPs by what their forward computes, and activations by their values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .bracket import NotRecognised, foreign_code, no_random_draws, plain, quiet, same
from .branches import Settled, check_branches
from .mlp_parts import Probe, Run, between_module, execute, probes
from .outside import Part, parts_of
from .watch import Watch

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
        parts: other functions of the library that took part.
    """

    projections: tuple[str, ...]
    gate: int
    activation: str | None
    function: str | None
    between: tuple[str, ...]
    down: str
    parts: tuple[Part, ...] = field(default=(), compare=False)

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


@foreign_code()
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
        watch = Watch(str(forward.__module__))
        watched = functools.partial(watch.run, forward)
        meaning = _find(cls, forward)
        _check_that_all_are_needed(cls, forward, meaning)
        for probe in probes():
            for activation in (torch.sin, F.silu):
                _compare(cls, watched, meaning, probe, activation)
        check_branches(watch, Settled())
        return replace(meaning, parts=parts_of(watch))


def _find(cls: type, forward: Callable[..., Any]) -> GatedMeaning:
    reasons: dict[bool, str] = {}
    gated = False
    for packed in (True, False):
        for between in (0, 1, 2):
            run = Run(probes()[0], packed, between, torch.sin)
            try:
                execute(cls, forward, run)
                return _meaning(run)
            except NotRecognised as error:
                reasons[packed] = str(error)
            # Two projections of one input, or the halves of one that are activated and multiplied.
            gated = gated or (len(run.projections) == 2 if not packed else run.activated is not None)
            if len(run.later) <= between + 1:
                break  # more modules after the product would change nothing
    kind = NotRecognised if gated else NotGated
    raise kind(reasons[False] if len(run.projections) == 2 else reasons[True])


def _meaning(run: Run) -> GatedMeaning:
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
    cls: type, forward: Callable[..., Any], meaning: GatedMeaning, probe: Probe, activation: Callable[[Tensor], Tensor]
) -> None:
    """Forward and backward of the class against the formula.

    Raises:
        NotRecognised: they differ.
    """
    run = Run(probe, meaning.packed, len(meaning.between), activation)
    y = execute(cls, forward, run)
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
        product = between_module(product)
    expected = F.linear(product, probe.down)
    if not same(y, expected) or not y.requires_grad:
        raise NotRecognised("computes no gated MLP")
    leaves = probe.leaves(meaning.packed)
    found = torch.autograd.grad(y, leaves, probe.gradient, allow_unused=True)
    wanted = torch.autograd.grad(expected, leaves, probe.gradient)
    for ours, theirs in zip(found, wanted, strict=True):
        if ours is None or not same(ours, theirs, loose=True):
            raise NotRecognised("its gradient is not that of a gated MLP")


def _check_that_all_are_needed(cls: type, forward: Callable[..., Any], meaning: GatedMeaning) -> None:
    """A forward that asks whether a sub-module is None has another meaning on instances where it is."""
    for name in filter(None, (*meaning.projections, meaning.activation, *meaning.between, meaning.down)):
        run = Run(probes()[0], meaning.packed, len(meaning.between), torch.sin)
        try:
            execute(cls, forward, run, none=name)
        except NotRecognised as error:
            if "TypeError: 'NoneType' object is not callable" in str(error):
                continue
        raise NotRecognised(f"does something else where {name} is None")
