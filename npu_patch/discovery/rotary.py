"""Recognise rotary position embeddings by what the function computes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .bracket import NotRecognised, no_random_draws, plain, quiet, same

Dtypes = tuple[torch.dtype, torch.dtype]


@dataclass(frozen=True)
class RotaryMeaning:
    """What `function(q, k, cos, sin, …)` or `function(x, cos, sin, …)` computes.

    Args:
        mode: "half" (first half against second), "interleave" (neighbours), or "deinterleave" (neighbours, and the
            result in half order).
        table: how the full-width tables come from the given ones: "given", "first half twice" (cat of the first half
            with itself), "first half repeated" (each number of the first half twice), "twice", "repeated" (the same
            from tables of half the width).
        partial: whether it also takes tables narrower than the heads and passes the rest of each head through.
        tensors: how many tensors are rotated, 1 or 2.
        parameters: how many positional parameters the function has.
        unsqueeze: position of the parameter that says where the tables get a dimension, or None.
        dims: the dimensions that were tried there; without such a parameter, the one dimension that it inserts.
        nones: positions of parameters that must be None.
        results: (dtype of the tensors, dtype of the tables) → dtype of the result.
    """

    mode: str
    table: str
    partial: bool
    tensors: int
    parameters: int
    unsqueeze: int | None
    dims: tuple[int, ...]
    nones: tuple[int, ...]
    results: Mapping[Dtypes, torch.dtype] = field(compare=False)

    def __str__(self) -> str:
        text = {"half": "half", "interleave": "interleaved", "deinterleave": "interleaved in, half out"}[self.mode]
        return text + (", partial" if self.partial else "") + ("" if self.table == "given" else f", table {self.table}")


def recognise_rotary(function: object) -> RotaryMeaning:
    """The meaning of a function, tried in three dtypes with tables of unequal halves that differ by sample.

    Raises:
        NotRecognised: it equals no known rotation.
    """
    original = plain(function)
    code = original.__code__
    if code.co_flags & 0x0C or code.co_kwonlyargcount:
        raise NotRecognised("collects arguments")
    names = code.co_varnames[: code.co_argcount]
    defaults = dict(zip(reversed(names), reversed(original.__defaults__ or ()), strict=False))
    with quiet(), no_random_draws():
        reasons = []
        for call in _calls(names, defaults):
            try:
                return _recognise(original, call)
            except NotRecognised as error:
                reasons.append(str(error))
    known = [reason for reason in reasons if not reason.startswith("fails")]
    raise NotRecognised((known or reasons or [f"takes ({', '.join(names)})"])[0])


@dataclass(frozen=True)
class _Call:
    """A guess at the parameters: `tensors` rotated tensors, cos, sin, then the rest."""

    tensors: int
    parameters: int
    unsqueeze: int | None
    nones: tuple[int, ...]


def _calls(names: tuple[str, ...], defaults: Mapping[str, Any]) -> Iterator[_Call]:
    for tensors in (2, 1):
        first = tensors + 2
        rest = range(first, len(names))
        if len(names) < first or any(names[i] not in defaults for i in rest):
            continue
        numbers = [i for i in rest if type(defaults[names[i]]) is int]
        nones = tuple(i for i in rest if defaults[names[i]] is None)
        if len(numbers) > 1 or len(numbers) + len(nones) != len(rest):
            continue
        yield _Call(tensors, len(names), numbers[0] if numbers else None, nones)


# ---- the known rotations ---------------------------------------------------------------------------------------------


def _halves(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _neighbours(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def deinterleaved(x: torch.Tensor) -> torch.Tensor:
    """Even channels first, then odd ones."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


TABLES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "given": lambda t: t,
    "first half twice": lambda t: torch.cat((t[..., : t.shape[-1] // 2],) * 2, -1),
    "first half repeated": lambda t: t[..., : t.shape[-1] // 2].repeat_interleave(2, -1),
    "twice": lambda t: torch.cat((t, t), -1),
    "repeated": lambda t: t.repeat_interleave(2, -1),
}
HALF_WIDTH = ("twice", "repeated")
MODES = ("half", "interleave", "deinterleave")


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: str) -> torch.Tensor:
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if mode == "deinterleave":
        turned = deinterleaved(turned)
    y = turned * cos + (_neighbours if mode == "interleave" else _halves)(turned) * sin
    return torch.cat((y, rest.to(y.dtype)), -1) if rest.shape[-1] else y


# ---- inputs ----------------------------------------------------------------------------------------------------------

_HEAD = 12
_UNSQUEEZED = (1, 2)
_DTYPES: tuple[Dtypes, ...] = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float32),
)


class _Probe:
    """Tensors of one layout: q with 3 heads, k with 2, and tables of one width."""

    def __init__(self, dim: int, width: int, dtypes: Dtypes) -> None:
        generator = torch.Generator().manual_seed(100 * width + dim)
        shapes: dict[int, list[tuple[int, ...]]] = {
            1: [(2, n, 5, _HEAD) for n in (3, 2)],
            2: [(2, 5, n, _HEAD) for n in (3, 2)],
        }
        shapes[-2] = [(5, n, _HEAD) for n in (3, 2)]
        table = (5, width) if dim == -2 else (2, 5, width)
        self.dim = dim
        self.tensors = [torch.randn(s, generator=generator).to(dtypes[0]).requires_grad_() for s in shapes[dim]]
        self.cos = (torch.rand(table, generator=generator) * 2.4 - 1.2).to(dtypes[1])
        self.sin = (torch.rand(table, generator=generator) * 2.4 - 1.2).to(dtypes[1])
        self.gradients = [torch.randn(s, generator=generator) for s in shapes[dim]]
        self._expected: dict[tuple[str, str, bool], list[torch.Tensor]] = {}

    def expected(self, mode: str, table: str, wide: bool) -> list[torch.Tensor]:
        """The rotation of each tensor; `wide`: computed in float32."""
        if (mode, table, wide) not in self._expected:
            cos, sin = (TABLES[table](t).unsqueeze(self.dim) for t in (self.cos, self.sin))
            if wide:
                cos, sin = cos.float(), sin.float()
            tensors = [x.detach().float() if wide else x for x in self.tensors]
            self._expected[mode, table, wide] = [_rotate(x, cos, sin, mode) for x in tensors]
        return self._expected[mode, table, wide]


@functools.cache
def _probe(dim: int, width: int, dtypes: Dtypes) -> _Probe:
    return _Probe(dim, width, dtypes)


# ---- matching --------------------------------------------------------------------------------------------------------


def _recognise(original: Callable[..., Any], call: _Call) -> RotaryMeaning:
    layouts = (_UNSQUEEZED,) if call.unsqueeze is not None else ((1,), (-2,))
    for dims in layouts:
        for width in (_HEAD, _HEAD // 2):
            names = [name for name in TABLES if (name in HALF_WIDTH) == (width != _HEAD)]
            known = [(mode, table) for mode in MODES for table in names]
            try:
                outputs = _run(original, call, _probe(dims[0], width, _DTYPES[0]))
            except _Fails as error:
                reason = str(error)
                continue
            known = [pair for pair in known if _equal(outputs, _probe(dims[0], width, _DTYPES[0]), *pair)]
            if known:
                return _confirm(original, call, dims, width, known)
            raise NotRecognised("computes no known rotation")
    raise NotRecognised(reason)


class _Fails(NotRecognised):
    """The function raised: it does not take such shapes."""


def _confirm(
    original: Callable[..., Any], call: _Call, dims: tuple[int, ...], width: int, known: list[tuple[str, str]]
) -> RotaryMeaning:
    """Narrow the candidates down in every dtype and layout.

    Raises:
        NotRecognised: none is left, or the gradient is not a rotation's.
    """
    results: dict[Dtypes, torch.dtype] = {}
    for dtypes in _DTYPES:
        for dim in dims if dtypes[0] is dtypes[1] else dims[:1]:
            probe = _probe(dim, width, dtypes)
            try:
                outputs = _run(original, call, probe)
            except _Fails:
                if dtypes[0] is dtypes[1]:
                    raise
                break
            known = [pair for pair in known if _equal(outputs, probe, *pair)]
            if not known:
                raise NotRecognised("computes no known rotation")
            if len({y.dtype for y in outputs}) != 1:
                raise NotRecognised("rotates its tensors in different dtypes")
            results[dtypes] = outputs[0].dtype
    mode, table = known[0]
    _check_gradients(original, call, _probe(dims[0], width, _DTYPES[0]), mode, table)
    narrow = _probe(dims[0], width - 4 if width == _HEAD else 4, _DTYPES[0])
    try:
        partial = _equal(_run(original, call, narrow), narrow, mode, table)
    except _Fails:
        partial = False
    return RotaryMeaning(mode, table, partial, call.tensors, call.parameters, call.unsqueeze, dims, call.nones, results)


def _run(original: Callable[..., Any], call: _Call, probe: _Probe) -> tuple[torch.Tensor, ...]:
    tensors = probe.tensors[: call.tensors]
    args: list[Any] = [*tensors, probe.cos, probe.sin]
    for i in range(call.tensors + 2, call.parameters):
        args.append(probe.dim if i == call.unsqueeze else None)
    versions = [x._version for x in args[: call.tensors + 2]]
    try:
        result = original(*args)
    except Exception as error:
        raise _Fails(f"fails on a small input: {type(error).__name__}: {str(error)[:80]}") from None
    if [x._version for x in args[: call.tensors + 2]] != versions:
        _probe.cache_clear()
        raise NotRecognised("modifies its input")
    outputs = (result,) if call.tensors == 1 else result
    if not isinstance(outputs, tuple) or len(outputs) != call.tensors:
        raise NotRecognised(f"returns a {type(result).__name__}")
    if not all(isinstance(y, torch.Tensor) for y in outputs):
        raise NotRecognised("returns something that is not a tensor")
    return outputs


def _equal(outputs: tuple[torch.Tensor, ...], probe: _Probe, mode: str, table: str) -> bool:
    """Whether the outputs are this rotation, computed in the promoted dtype or in float32."""
    for wide in (False, True):
        expected = probe.expected(mode, table, wide)
        if all(same(y, x.to(y.dtype)) for y, x in zip(outputs, expected, strict=False)):
            return True
    return False


def _check_gradients(original: Callable[..., Any], call: _Call, probe: _Probe, mode: str, table: str) -> None:
    tensors, heads = probe.tensors[: call.tensors], probe.gradients[: call.tensors]
    ours = _run(original, call, probe)
    if not all(y.requires_grad for y in ours):
        raise NotRecognised("has no gradient")
    expected = probe.expected(mode, table, False)[: call.tensors]
    found = torch.autograd.grad(ours, tensors, heads, allow_unused=True)
    wanted = torch.autograd.grad(expected, tensors, heads, retain_graph=True)
    for x, y in zip(found, wanted, strict=True):
        if x is None or not same(x, y, loose=True):
            raise NotRecognised("its gradient is not a rotation's")
