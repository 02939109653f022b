"""How the operator rotates for one recognised rope function: which tables, which part of a head, which dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from ...discovery import RotaryMeaning
from ...discovery.rotary import HALF_WIDTH, TABLES, deinterleaved
from ...ops import rope as op
from ...ops.guards import FLOATS, FUNCTORCH, subclass_reason, transforming
from ...ops.per_tensor import DerivedPair
from ...ops.verdicts import Verdicts
from ...sites import Site


class _Tables:
    """The tables of the operator.

    Args:
        cos, sin: as the operator gets them.
        facts: shape, dtype and device index of those of the function.
        adjoint: the one for the backward, once it is made and kept.
    """

    __slots__ = ("adjoint", "cos", "facts", "sin")

    def __init__(self, cos: Tensor, sin: Tensor, facts: tuple[torch.Size, torch.dtype, int]) -> None:
        self.cos, self.sin, self.facts = cos, sin, facts
        self.adjoint: Tensor | None = None

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.cos, self.sin


class _Changes(NamedTuple):
    """What is done before and after the operator.

    Args:
        tables: whether the operator's tables are not those of the function.
        parts: what the operator rotates of the tensors.
        finish: what the function returns, made of the tensors and what the operator returned.
    """

    tables: bool
    parts: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
    finish: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Tensor, ...]]


class _Sizes(NamedTuple):
    """How tensors and results differ from what the operator gets and returns.

    Args:
        dtype: of the rotation, where it is not that of the tensors.
        result: dtype of the results where it is another.
        beside: dtype of the other parts, beside the results, where it is not that of the tensors.
        width: of the rotated part of each head.
        rests: the width of the other part, of the first and the last tensor.
    """

    dtype: torch.dtype | None
    result: torch.dtype | None
    beside: torch.dtype | None
    width: int
    rests: tuple[int, int]


class _Plan(NamedTuple):
    """How tensors of known shapes and types are rotated.

    Args:
        first_swap, last_swap: for the operator, of each tensor.
        changes: None where the operator gets everything as it is, and its results are the function's.
    """

    first_swap: bool
    last_swap: bool
    changes: _Changes | None


class Rotation:
    """One meaning, as the call."""

    def __init__(self, meaning: RotaryMeaning) -> None:
        self.mode = "interleave" if meaning.mode == "interleave" else "half"
        self.deinterleave = meaning.mode == "deinterleave"
        self.partial = meaning.partial
        self.dims = meaning.dims
        self.results = meaning.results
        self.scale = 2 if meaning.table in HALF_WIDTH else 1
        self.table = None if meaning.table == "given" else TABLES[meaning.table]
        self.negated = meaning.negated
        self.trailing = meaning.trailing
        self.tensors = meaning.tensors
        self._makes = self.table is not None or self.negated
        self._plans = Verdicts(self._judge)
        # By the type of the tensors.
        self._tables = {dtype: DerivedPair(partial(self._made, dtype), _Tables.tensors) for dtype in FLOATS}
        self._adjoint_of = op.ADJOINTS[self.mode]

    def _judge(
        self,
        first: Sequence[int],
        last: Sequence[int],
        dtype: torch.dtype,
        table: Sequence[int],
        table_dtype: torch.dtype,
        index: int,
        dim: int,
        learned: bool,
    ) -> str | _Plan:
        """The answer for tensors of these shapes and types, on one device; `first` and `last` may be the same."""
        # -1 is the host; beside it a process with an NPU has no other kind of device.
        device = torch.device("npu", index) if index >= 0 else torch.device("cpu")
        if dim not in self.dims:
            return f"unsqueeze_dim {dim}"
        width = table[-1] * self.scale
        for shape in (first, last):
            if width != shape[-1] and not (self.partial and width < shape[-1]):
                return "the tables' width is not the head size"
        result, given = None, dtype
        if dtype is not table_dtype:
            result = self.results.get((dtype, table_dtype))
            if result is None:
                return "a pair of dtypes that was not recognised"
            dtype = torch.promote_types(dtype, table_dtype)  # what multiplying the two gives
        wide = [*table[:-1], width]
        wide.insert(dim if dim >= 0 else dim + len(table) + 1, 1)
        parts = ([*first[:-1], width], [*last[:-1], width])
        for part in parts:
            if reason := op.judge(part, wide, dtype, device, self.mode, learned):
                return reason
        swaps = (op.is_bnsd(parts[0], wide), op.is_bnsd(parts[1], wide))
        rests = (first[-1] - width, last[-1] - width)
        tables = dtype is not table_dtype or self.table is not None or self.negated
        cast = None if dtype is given else dtype
        beside = dtype if result is None else result
        sizes = _Sizes(cast, result, None if beside is given else beside, width, rests)
        return _Plan(*swaps, self._changes(tables, sizes))

    def _changes(self, tables: bool, sizes: _Sizes) -> _Changes | None:
        typed = sizes.dtype is not None or sizes.result is not None or self.deinterleave
        if not typed and not any(sizes.rests):
            return _Changes(tables, _same, _as_returned) if tables else None
        if not typed and all(sizes.rests) and self.tensors == 2:
            return _Changes(tables, *_part_of_two(sizes.width, sizes.rests, self.trailing))
        return _Changes(tables, partial(self._parts, sizes), partial(self._finished, sizes))

    def apply(
        self, tensors: tuple[Tensor, ...], cos: Tensor, sin: Tensor, dim: int, site: Site
    ) -> tuple[str | None, tuple[Tensor, ...]]:
        """(reason, ()) or (None, rotated tensors), for tables (B, S, D) that get the dimension `dim`.

        It runs in every layer, so it is one function, and call sites hold it as a bound method: Python calls that
        without a look-up.
        """
        first, last = tensors[0], tensors[-1]
        eager = not is_compiling()
        plain = type(first) is type(last) is type(cos) is type(sin) is Tensor
        if not plain:
            if not isinstance(first, Tensor) or not isinstance(last, Tensor):
                return "a tensor is missing", ()
            if reason := subclass_reason(first, last, cos, sin):
                return reason, ()
        if transforming():
            return FUNCTORCH, ()
        dtype, index = first.dtype, first.get_device()
        if last.dtype is not dtype:
            return "query and key differ in type", ()
        made = self._tables.get(dtype) if self._makes and eager else None
        tables = None if made is None else made.kept(cos, sin)
        if tables is None:
            table, table_dtype, table_index = cos.shape, cos.dtype, cos.get_device()
            if sin.dtype is not table_dtype or sin.shape != table:
                return "cos and sin differ", ()
            same = sin.get_device() == table_index
        else:
            table, table_dtype, table_index = tables.facts
            same = True
        if not same or table_index != index or last.get_device() != index:
            return "query, key and tables are not on one device", ()
        recording = is_grad_enabled()
        learned = recording and (cos.requires_grad or sin.requires_grad)
        facts = (first.shape, last.shape, dtype, table, table_dtype, index, dim, learned)
        plan = self._plans[facts] if plain and eager else self._judge(*facts)
        if isinstance(plan, str):
            return plan, ()
        if eager:
            site.hits += 1
        else:
            site.hit()
        first_swap, last_swap, changes = plan
        parts = tensors
        if changes is not None:
            if changes.tables:
                if tables is None or learned:
                    tables = self._tables[dtype](cos, sin)
                cos, sin = tables.cos, tables.sin
            parts = changes.parts(tensors)
        adjoint: Tensor | None = None
        rotate: Callable[..., Tensor] = op.rotate_by_constants
        if learned:
            rotate = op.rotate
        elif recording and (first.requires_grad or last.requires_grad):
            if eager:
                adjoint = self._adjoint_of.get(sin) if tables is None else tables.adjoint
            if adjoint is None:
                adjoint = self._adjoint_of(sin)
                if eager and tables is not None:
                    tables.adjoint = self._adjoint_of.get(sin)
            adjoint, rotate = adjoint.unsqueeze(dim), op.Rotate.apply
        cos, sin = cos.unsqueeze(dim), sin.unsqueeze(dim)
        mode = self.mode
        output = rotate(parts[0], cos, sin, mode, adjoint, first_swap)
        outputs = (output,) if len(parts) == 1 else (output, rotate(parts[1], cos, sin, mode, adjoint, last_swap))
        return None, outputs if changes is None else changes.finish(tensors, outputs)

    def _made(self, dtype: torch.dtype, cos: Tensor, sin: Tensor) -> _Tables:
        """The operator's tables, for tensors of this dtype."""
        facts = cos.shape, cos.dtype, cos.get_device()
        dtype = torch.promote_types(dtype, cos.dtype)
        cos, sin = cos.to(dtype), sin.to(dtype)
        if self.table is not None:
            cos, sin = self.table(cos), self.table(sin)
        return _Tables(cos, sin.neg() if self.negated else sin, facts)

    def _parts(self, sizes: _Sizes, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if any(sizes.rests):
            start = -sizes.width if self.trailing else 0
            tensors = tuple(x.narrow(-1, start, sizes.width) for x in tensors)
        if sizes.dtype is not None:
            tensors = tuple(x.to(sizes.dtype) for x in tensors)
        return tuple(deinterleaved(x) for x in tensors) if self.deinterleave else tensors

    def _finished(self, sizes: _Sizes, tensors: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        finished = []
        for x, y, rest in zip(tensors, outputs, sizes.rests, strict=False):
            if sizes.result is not None:
                y = y.to(sizes.result)
            if rest:
                other = x.narrow(-1, 0 if self.trailing else sizes.width, rest)
                if sizes.beside is not None:
                    other = other.to(sizes.beside)
                y = torch.cat((other, y) if self.trailing else (y, other), -1)
            finished.append(y)
        return tuple(finished)


def _same(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tensors


def _as_returned(tensors: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs


def _part_of_two(width: int, rests: tuple[int, int], trailing: bool) -> tuple[Any, Any]:
    """`parts` and `finish` for a query and a key of one dtype, of both of which a part of each head is rotated.

    They run in every layer, where loops and questions would cost as much as all the rest.
    """
    start, rest = (-width, 0) if trailing else (0, width)
    of_first, of_last = rests

    def parts(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        first, last = tensors
        return first.narrow(-1, start, width), last.narrow(-1, start, width)

    def finish(tensors: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (first, last), (y, z) = tensors, outputs
        if trailing:
            y = torch.cat((first.narrow(-1, rest, of_first), y), -1)
            return y, torch.cat((last.narrow(-1, rest, of_last), z), -1)
        y = torch.cat((y, first.narrow(-1, rest, of_first)), -1)
        return y, torch.cat((z, last.narrow(-1, rest, of_last)), -1)

    return parts, finish
