"""The ways in which rope functions take their arguments.

A form is a guess at what the parameters of a function are.  It makes any such function look like one of tensors, cos
and sin (B, S, D) and the dimension to insert, so that what it computes is compared with the same formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .bracket import NotRecognised

Call = Callable[[Callable[..., Any], list[Tensor], Tensor, Tensor, int], Any]


@dataclass(frozen=True)
class Form:
    """One guess.

    Args:
        name: one of the names below.
        tensors: how many tensors are rotated.
        call: `call(function, tensors, cos, sin, dim)` calls a function of this form.
        layouts: groups of dimensions that the tables may get; in the first group that works, all must.
        shared: its tables have no batch.
        angles: cos and sin are made of angles, in float32.
    """

    name: str
    tensors: int
    call: Call
    layouts: tuple[tuple[int, ...], ...] = ((1, 2),)
    shared: bool = False
    angles: bool = False


def forms(names: tuple[str, ...], defaults: Mapping[str, Any], keywords: bool) -> Iterator[Form]:
    """The forms that a function with these parameters may have, likeliest first.

    Args:
        names: its positional parameters.
        defaults: those of them with a default.
        keywords: it collects keyword arguments, too.
    """
    kinds = tuple(_kind(name, defaults) for name in names)
    if keywords:
        if kinds == ("",) * 4:
            yield Form("patches", 2, _patches, ((1,),), shared=True)
        return
    for tensors in (2, 1):
        given, rest = kinds[: tensors + 2], kinds[tensors + 2 :]
        if len(given) < tensors + 2 or given[0] or not {*given} <= {"", "none"}:
            continue
        if rest == ("dim",):
            yield Form("dim", tensors, lambda f, x, cos, sin, dim: f(*x, cos, sin, dim))
        elif rest == ("none", "dim"):
            yield Form("unused positions, dim", tensors, lambda f, x, cos, sin, dim: f(*x, cos, sin, None, dim))
        elif rest == ("", "dim") and tensors == 2:
            yield Form("positions, dim", 2, _positions)
            yield Form("sections, dim", 2, _sections)
        elif rest == ():
            yield Form("tables", tensors, lambda f, x, cos, sin, dim: f(*x, cos, sin), ((1,), (-2,)))
        if rest == () and tensors == 2:
            yield Form("rows", 2, lambda f, x, cos, sin, dim: f(*x, cos[0], sin[0]), ((1,),), shared=True)
    if kinds == ("",) * 3:
        yield Form("ready tables", 1, lambda f, x, cos, sin, dim: f(*x, cos.unsqueeze(dim), sin.unsqueeze(dim)))
        yield Form("ready tables", 1, lambda f, x, cos, sin, dim: f(*x, cos.unsqueeze(1), sin.unsqueeze(1)), ((1,),))
        yield Form("sine first", 1, lambda f, x, cos, sin, dim: f(*x, sin, cos), ((1,), (2,)))
        yield Form("complex", 2, lambda f, x, cos, sin, dim: f(*x, _complex(cos, sin)), ((1,), (2,)))
        yield Form("complex rows", 2, _complex_rows, ((2,),), shared=True)
    elif kinds == ("",) * 2:
        yield Form("angles", 1, _angles, ((2,),), shared=True, angles=True)


def _kind(name: str, defaults: Mapping[str, Any]) -> str:
    if name not in defaults:
        return ""
    default = defaults[name]
    return "dim" if type(default) is int else "none" if default is None else "other"


def _complex(cos: Tensor, sin: Tensor) -> Tensor:
    return torch.complex(cos.float(), sin.float())


def _complex_rows(function: Callable[..., Any], x: list[Tensor], cos: Tensor, sin: Tensor, dim: int) -> Any:
    return function(*x, _complex(cos, sin)[0].unsqueeze(1))


def _angles(function: Callable[..., Any], x: list[Tensor], cos: Tensor, sin: Tensor, dim: int) -> Any:
    return function(*x, torch.atan2(sin, cos)[0])


def _positions(function: Callable[..., Any], x: list[Tensor], cos: Tensor, sin: Tensor, dim: int) -> Any:
    batch, length = cos.shape[:2]
    order = torch.arange(batch * length).flip(0)
    rows = (t.flatten(0, 1)[order] for t in (cos, sin))
    return function(*x, *rows, order.view(batch, length), dim)


def merge_sections(table: Tensor, sections: tuple[int, ...]) -> Tensor:
    """(3, B, S, D) → (B, S, D): channels of each section, twice over D, from the first, second and third in turn."""
    return torch.cat([part[i % 3] for i, part in enumerate(table.split(sections * 2, -1))], -1)


def _sections(function: Callable[..., Any], x: list[Tensor], cos: Tensor, sin: Tensor, dim: int) -> Any:
    half = cos.shape[-1] // 2
    last = half // 2
    middle = (half - last) // 2
    sections = (half - last - middle, middle, last)

    def spread(table: Tensor) -> Tensor:
        owner = torch.arange(3).repeat_interleave(torch.tensor(sections)).repeat(2)
        return torch.stack([torch.where(owner == i, table, table.roll(1, -1) + 0.5) for i in range(3)])

    return function(*x, spread(cos), spread(sin), list(sections), dim)


def _patches(function: Callable[..., Any], x: list[Tensor], cos: Tensor, sin: Tensor, dim: int) -> Any:
    """Tokens before the rows of the tables pass through."""
    before = [torch.full_like(t[..., :2, :], 0.25 + i) for i, t in enumerate(x)]
    outputs = function(*(torch.cat(pair, -2) for pair in zip(before, x, strict=True)), cos[0], sin[0])
    if not isinstance(outputs, tuple) or not all(isinstance(y, Tensor) and y.dim() == 4 for y in outputs):
        raise NotRecognised("returns something else than rotated tensors")
    for y, prefix in zip(outputs, before, strict=False):
        if not torch.equal(y[..., :2, :].detach(), prefix.to(y.dtype)):
            raise NotRecognised("changes tokens that its tables do not reach")
    return tuple(y[..., 2:, :] for y in outputs)
