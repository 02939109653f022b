"""Recognise rotary position embeddings by what the function computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from .bracket import NotRecognised, failure, foreign_code, no_random_draws, plain, quiet, same
from .branches import Settled, check_branches
from .outside import Part, parts_of
from .rotary_forms import Form, forms, merge_sections
from .rotary_probes import HALF_WIDTH, HEAD, TABLES, Dtypes, Formula, Probe, deinterleaved, formulas, probe
from .watch import Watch

__all__ = ["HALF_WIDTH", "TABLES", "RotaryMeaning", "deinterleaved", "merge_sections", "recognise_rotary"]


@dataclass(frozen=True)
class RotaryMeaning:
    """What a function of one or two tensors and rotary tables computes.

    Args:
        form: how it takes its arguments, one of the names in `rotary_forms`.
        mode: "half" (first half against second), "interleave" (neighbours), or "deinterleave" (neighbours, and the
            result in half order).
        table: how the full-width tables come from the given ones: "given", "first half twice" (cat of the first half
            with itself), "first half repeated" (each number of the first half twice), "twice", "repeated" (the same
            from tables of half the width).
        negated: whether it rotates the other way round, by -sin.
        partial: whether it also takes tables narrower than the heads and passes the rest of each head through.
        trailing: whether it is then the last channels of each head that are rotated, not the first.
        tensors: how many tensors are rotated, 1 or 2.
        dims: where the tables get a dimension: the values that were tried, or the only one.
        results: (dtype of the tensors, dtype of the tables) → dtype of the result.
        parts: other functions of the library that took part.
    """

    form: str
    mode: str
    table: str
    negated: bool
    partial: bool
    trailing: bool
    tensors: int
    dims: tuple[int, ...]
    results: Mapping[Dtypes, torch.dtype] = field(compare=False)
    parts: tuple[Part, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        text = {"half": "half", "interleave": "interleaved", "deinterleave": "interleaved in, half out"}[self.mode]
        if self.partial:
            text += ", last channels" if self.trailing else ", partial"
        if self.table != "given":
            text += f", table {self.table}"
        if self.negated:
            text += ", sine negated"
        return text + _FORMS.get(self.form, "")


_FORMS = {
    "positions, dim": ", rows by position",
    "sections, dim": ", tables in sections",
    "complex": ", complex table",
    "complex rows": ", complex table",
    "angles": ", from angles",
    "patches": ", last tokens",
}


@foreign_code()
def recognise_rotary(function: object) -> RotaryMeaning:
    """The meaning of a function, tried in three dtypes with tables of unequal halves that differ by sample.

    What it branches on must go both ways, or be a parameter that is None or not.

    Raises:
        NotRecognised: it equals no known rotation.
    """
    original = plain(function)
    code = original.__code__
    if code.co_flags & 0x04 or code.co_kwonlyargcount:
        raise NotRecognised("collects arguments")
    names = code.co_varnames[: code.co_argcount]
    defaults = dict(zip(reversed(names), reversed(original.__defaults__ or ()), strict=False))
    with quiet(), no_random_draws():
        reasons = []
        for form in forms(names, defaults, keywords=bool(code.co_flags & 0x08)):
            try:
                watch = Watch(str(original.__module__))
                meaning = _recognise(partial(watch.run, original), form)
                check_branches(watch, Settled(parameters=frozenset((code,))))
                return replace(meaning, parts=parts_of(watch))
            except NotRecognised as error:
                reasons.append(str(error))
    known = [reason for reason in reasons if not reason.startswith("fails")]
    raise NotRecognised((known or reasons or [f"takes ({', '.join(names)})"])[0])


_FULL, _BRAIN, _HALF = torch.float32, torch.bfloat16, torch.float16
_DTYPES: tuple[Dtypes, ...] = (
    (_FULL, _FULL),
    (_BRAIN, _BRAIN),
    (_HALF, _HALF),
    (_BRAIN, _FULL),
    (_FULL, _BRAIN),
    (_HALF, _FULL),
)


class _Fails(NotRecognised):
    """The function raised: it does not take such shapes."""


def _probe(form: Form, dim: int, width: int, dtypes: Dtypes = _DTYPES[0], wide: bool = False) -> Probe:
    return probe(dim, width, dtypes, form.shared, form.angles, wide)


def _recognise(original: Callable[..., Any], form: Form) -> RotaryMeaning:
    reason = "computes no known rotation"
    for dims in form.layouts:
        for width in (HEAD, HEAD // 2):
            inputs = _probe(form, dims[0], width)
            try:
                outputs = _run(original, form, inputs)
            except _Fails as error:
                reason = str(error)
                continue
            known = [formula for formula in formulas(width == HEAD) if _equal(outputs, inputs, formula)]
            if known:
                return _confirm(original, form, dims, width, known)
            raise NotRecognised("computes no known rotation")
    raise NotRecognised(reason)


def _confirm(
    original: Callable[..., Any], form: Form, dims: tuple[int, ...], width: int, known: list[Formula]
) -> RotaryMeaning:
    """Narrow the candidates down in every dtype and layout.

    Raises:
        NotRecognised: none is left, or the gradient is not a rotation's.
    """
    results: dict[Dtypes, torch.dtype] = {}
    for dtypes in _DTYPES:
        if form.angles and dtypes[1] is not _FULL:
            continue
        for dim in dims if dtypes[0] is dtypes[1] else dims[:1]:
            inputs = _probe(form, dim, width, dtypes)
            try:
                outputs = _run(original, form, inputs)
            except _Fails:
                if dtypes[0] is dtypes[1]:
                    raise
                break
            known = [formula for formula in known if _equal(outputs, inputs, formula)]
            if not known:
                raise NotRecognised("computes no known rotation")
            if len({y.dtype for y in outputs}) != 1:
                raise NotRecognised("rotates its tensors in different dtypes")
            results[dtypes] = outputs[0].dtype
    formula = known[0]
    with torch.no_grad():
        wide = _probe(form, dims[0], width, wide=True)
        if not _equal(_run(original, form, wide), wide, formula):
            raise NotRecognised("computes something else for wide heads, large numbers or without a gradient")
    _check_gradients(original, form, _probe(form, dims[0], width), formula)
    if _in_float64(_run(original, form, _probe(form, dims[0], width)), _probe(form, dims[0], width), formula):
        raise NotRecognised("computes in float64")
    narrow = _probe(form, dims[0], width - 4 if width == HEAD else 4)
    partial = trailing = False
    try:
        outputs = _run(original, form, narrow)
        partial = _equal(outputs, narrow, formula)
        trailing = not partial and _equal(outputs, narrow, replace(formula, trailing=True))
    except _Fails:
        pass
    return RotaryMeaning(
        form=form.name,
        mode=formula.mode,
        table=formula.table,
        negated=formula.negated,
        partial=partial or trailing,
        trailing=trailing,
        tensors=form.tensors,
        dims=dims,
        results=results,
    )


def _run(original: Callable[..., Any], form: Form, inputs: Probe) -> tuple[torch.Tensor, ...]:
    tensors = inputs.tensors[: form.tensors]
    args = [*tensors, inputs.cos, inputs.sin]
    versions = [x._version for x in args]
    try:
        result = form.call(original, tensors, inputs.cos, inputs.sin, inputs.dim)
    except BaseException as error:
        raise _Fails(str(failure(error))) from None
    if [x._version for x in args] != versions:
        probe.cache_clear()
        raise NotRecognised("modifies its input")
    outputs = (result,) if form.tensors == 1 else result
    if not isinstance(outputs, tuple) or len(outputs) != form.tensors:
        raise NotRecognised(f"returns a {type(result).__name__}")
    if not all(isinstance(y, torch.Tensor) for y in outputs):
        raise NotRecognised("returns something that is not a tensor")
    return outputs


def _equal(outputs: tuple[torch.Tensor, ...], inputs: Probe, formula: Formula) -> bool:
    """Whether the outputs are this rotation, computed in the promoted dtype or in float32."""
    for wide in (False, True):
        expected = inputs.expected(formula, wide)
        if all(same(y, x.to(y.dtype), loose=inputs.wide) for y, x in zip(outputs, expected, strict=False)):
            return True
    return False


def _in_float64(outputs: tuple[torch.Tensor, ...], inputs: Probe, formula: Formula) -> bool:
    """Whether float32 results are those of float64, which float32 arithmetic does not give."""
    cos, sin = (TABLES[formula.table](t.double()).unsqueeze(inputs.dim) for t in (inputs.cos, inputs.sin))
    exact = [formula(x.detach().double(), cos, sin).float() for x in inputs.tensors[: len(outputs)]]
    if not all(torch.equal(y, x) for y, x in zip(outputs, exact, strict=True)):
        return False
    return not all(torch.equal(y, x) for y, x in zip(inputs.expected(formula, False), exact, strict=False))


def _check_gradients(original: Callable[..., Any], form: Form, inputs: Probe, formula: Formula) -> None:
    tensors, heads = inputs.tensors[: form.tensors], inputs.gradients[: form.tensors]
    ours = _run(original, form, inputs)
    if not all(y.requires_grad for y in ours):
        raise NotRecognised("has no gradient")
    expected = inputs.expected(formula, False)[: form.tensors]
    found = torch.autograd.grad(ours, tensors, heads, allow_unused=True)
    wanted = torch.autograd.grad(expected, tensors, heads, retain_graph=True)
    for x, y in zip(found, wanted, strict=True):
        if x is None or not same(x, y, loose=True):
            raise NotRecognised("its gradient is not a rotation's")
