"""Rotary functions: torchtitan 0.2.2 has one per family, each with a signature of its own; flux has one in both
generations, with a 2 x 2 matrix per pair of neighbours."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...discovery.bracket import NotRecognised, no_random_draws, plain, quiet, reason_of
from ...ops.guards import subclass_reason
from ...registry import Target, Unrecognised
from ...sites import Site
from . import LIBRARY, dtensors
from .rope_meaning import DTYPES, HEADS, B, D, L, agrees, sample_cache
from .rope_rotation import Plan, Tensors, call_reason, plan, rotate, rotate_traced
from .rope_rows import Rows, given_rows, handed_rows
from .rope_tables import FULL_WIDTH, MODES

_OP = "rope"
_NAMES = re.compile(r"apply_(rotary|rope)")


@dataclass(frozen=True)
class RotaryFunction:
    """What a function takes and computes.

    Args:
        kind: of its table, a key of `FULL_WIDTH`.
        tensors: 2 for query and key, 1 for one tensor.
        positions: it has a last parameter for positions, None by default.
        given: it takes rows, broadcast to the tensors; else a whole cache, of which it picks rows.
        wide: it rotates in float32; else in the type of its input.
    """

    kind: str
    tensors: int
    positions: bool
    given: bool
    wide: bool

    def __str__(self) -> str:
        what = "a 2 x 2 matrix per pair" if self.kind == "matrices" else MODES[self.kind]
        rows = "rows as given" if self.given else "rows of the table" + (" by position" if self.positions else "")
        return f"{what}, in {'float32' if self.wide else 'the input type'}, {rows}"


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The rotary functions that a module defines."""
    for name, value in list(vars(module).items()):
        if not isinstance(value, FunctionType) or not _NAMES.search(name) or value.__module__ != module.__name__:
            continue
        try:
            meaning = recognise(value)
        except Exception as error:  # foreign code was run
            reason = reason_of(error)
            yield Unrecognised(_OP, LIBRARY, module.__name__, name, reason)
            continue
        yield Target(_OP, LIBRARY, module.__name__, name, adapter(meaning), str(meaning), rebind=(LIBRARY,))


def recognise(function: Any) -> RotaryFunction:
    """What a function computes, found by running it on small CPU inputs, forward and backward.

    Raises:
        NotRecognised: it computes no known rotation, or takes its arguments in another way.
    """
    original = plain(function)
    parameters = list(inspect.signature(original).parameters.values())
    if any(p.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters):
        raise NotRecognised("takes other arguments than tensors, a table and positions")
    required = sum(p.default is inspect.Parameter.empty for p in parameters)
    optional = [p.default for p in parameters[required:]]
    if required not in (2, 3) or optional not in ([], [None]):
        raise NotRecognised(f"takes ({', '.join(p.name for p in parameters)})")
    candidates = [
        RotaryFunction(kind, required - 1, bool(optional), given, wide)
        for given in ((False,) if optional else (False, True))
        for kind in FULL_WIDTH
        for wide in (True, False)
    ]
    with quiet(), no_random_draws():
        for meaning in candidates:
            try:
                if all(_computes(original, meaning, dtype) for dtype in DTYPES):
                    return meaning
            except Exception:  # tables of another kind do not fit
                continue
    raise NotRecognised("computes no known rotation")


def _computes(function: Any, meaning: RotaryFunction, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(9)
    test = partial(agrees, mode=MODES[meaning.kind], dtype=dtype, count=meaning.tensors, wide=meaning.wide)
    if meaning.given:
        for front in ((B, L, 1), (1, L, 1), (B, 1, L)):
            table = sample_cache(meaning.kind, *front, generator=generator)
            shape = (B, L, HEADS, D) if front[2] == 1 else (B, HEADS, L, D)
            if not test(lambda *x, table=table: function(*x, table), *FULL_WIDTH[meaning.kind](table), shape=shape):
                return False
        return True
    cache = sample_cache(meaning.kind, 3 * L, generator=generator)
    cos, sin = FULL_WIDTH[meaning.kind](cache)
    rows = torch.randint(0, 3 * L, (B, L), generator=generator)
    for positions in (None, rows, rows[:1]) if meaning.positions else (None,):
        index = torch.arange(L) if positions is None else positions
        rest = (cache, positions) if meaning.positions else (cache,)
        tables = cos[index].unsqueeze(-2), sin[index].unsqueeze(-2)
        if not test(lambda *x, rest=rest: function(*x, *rest), *tables):
            return False
        if meaning.positions and positions is None and not test(lambda *x: function(*x, cache), *tables):
            return False
    return True


# ---- call sites, one per arrangement of parameters -------------------------------------------------------------------

Factory = Callable[[Any, Site], Callable[..., Any]]


def adapter(meaning: RotaryFunction) -> Factory:
    """A factory for one function."""
    return _ARRANGEMENTS[meaning.tensors, meaning.positions](meaning)


def _pair_by_position(meaning: RotaryFunction) -> Factory:
    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary_emb(xq: Tensor, xk: Tensor, cache: Tensor, positions: Tensor | None = None) -> Any:
            result = _rotated(meaning, (xq, xk), cache, positions, site)
            return original(xq, xk, cache, positions) if isinstance(result, str) else result

        return apply_rotary_emb

    return factory


def _pair(meaning: RotaryFunction) -> Factory:
    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary_emb(xq: Tensor, xk: Tensor, cache: Tensor) -> Any:
            result = _rotated(meaning, (xq, xk), cache, None, site)
            return original(xq, xk, cache) if isinstance(result, str) else result

        return apply_rotary_emb

    return factory


def _single_by_position(meaning: RotaryFunction) -> Factory:
    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary_emb(x: Tensor, cache: Tensor, positions: Tensor | None = None) -> Any:
            result = _rotated(meaning, (x,), cache, positions, site)
            return original(x, cache, positions) if isinstance(result, str) else result[0]

        return apply_rotary_emb

    return factory


def _single(meaning: RotaryFunction) -> Factory:
    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary_emb(x: Tensor, cache: Tensor) -> Any:
            result = _rotated(meaning, (x,), cache, None, site)
            return original(x, cache) if isinstance(result, str) else result[0]

        return apply_rotary_emb

    return factory


_ARRANGEMENTS: dict[tuple[int, bool], Callable[[RotaryFunction], Factory]] = {
    (2, True): _pair_by_position,
    (2, False): _pair,
    (1, True): _single_by_position,
    (1, False): _single,
}


def _rotated(meaning: RotaryFunction, tensors: Tensors, table: Any, positions: Any, site: Site) -> str | Tensors:
    """The tensors rotated, counted; or the reason, counted."""
    result = _attempt(meaning, tensors, table, positions, site)
    if isinstance(result, str):
        site.fallback(result)
    else:
        site.hit()
    return result


def _attempt(meaning: RotaryFunction, tensors: Tensors, table: Any, positions: Any, site: Site) -> str | Tensors:
    places = None
    if dtensors.is_distributed(tensors[0]):
        found = dtensors.heads(tensors, table)
        if isinstance(found, str):
            return found
        places, tensors, table = found
    if reason := call_reason(tensors) or _table_reason(tensors, table, positions):
        return reason
    swapped = meaning.given and table.shape[1] == 1 and table.shape[2] == tensors[0].shape[2]
    rows = _rows(meaning, tensors[0], table, positions, swapped)
    if isinstance(rows, str):
        return rows
    wide = meaning.wide and (site.options.get("tables") != "input" or len({x.dtype for x in tensors}) > 1)
    if is_compiling():
        result = rotate_traced(tensors, rows, wide) if not swapped else "heads before tokens under torch.compile"
    else:
        chosen = plan(tensors, rows, wide, swapped)
        result = rotate(tensors, chosen) if isinstance(chosen, Plan) else chosen
    if places is None or isinstance(result, str):
        return result
    return tuple(place.wrap(y) for place, y in zip(places, result, strict=True))


def _table_reason(tensors: Tensors, table: Any, positions: Any) -> str | None:
    """What the table and the positions must be before rows are made."""
    x = tensors[0]
    if reason := subclass_reason(table) or (None if positions is None else subclass_reason(positions)):
        return reason
    if table.requires_grad and torch.is_grad_enabled():
        return "gradient to the rotary cache"
    if table.device != x.device or (positions is not None and positions.device != x.device):
        return "the rotary cache or the positions are on another device"
    if x.dim() != 4:
        return "the input is not 4-D"
    return None


def _rows(meaning: RotaryFunction, x: Tensor, table: Tensor, positions: Tensor | None, swapped: bool) -> str | Rows:
    width = FULL_WIDTH_OF[meaning.kind]
    batch, length, size = x.shape[0], x.shape[2 if swapped else 1], x.shape[3]
    if meaning.given:
        front = (1, length) if swapped else (length, 1)
        if table.dim() < 4 or table.shape[0] not in (1, batch) or tuple(table.shape[1:3]) != front:
            return "the rotary table is not for these tensors"
        return given_rows(table, meaning.kind) if width(table.shape) == size else "the rotary table has another width"
    if table.dim() != 2 or width(table.shape) != size or table.shape[0] < length:
        return "the rotary cache is not (P, width) with P not below L"
    if positions is not None and (
        positions.dtype is not torch.int64 or tuple(positions.shape) not in ((1, length), (batch, length))
    ):
        return "the positions are not (1 or B, L) of type int64"
    return handed_rows(table, length, positions, meaning.kind)


FULL_WIDTH_OF: dict[str, Callable[[torch.Size], int]] = {
    "interleave": lambda shape: 2 * shape[-1],
    "half": lambda shape: shape[-1] // 2,
    "matrices": lambda shape: 2 * shape[-3],
}
"""Kind of table → width of cos and sin, from its shape."""
