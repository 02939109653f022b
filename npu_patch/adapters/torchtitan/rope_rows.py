"""The rows of the rotary tables that a call needs, made once for all layers of a step.

Every layer of a model owns a rotary module with a table of its own.  The tables are compared by value, once per table
tensor; layers with equal tables share what is gathered from them, once per positions tensor.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...ops import rope as op
from ...ops.guards import keep
from ...ops.per_tensor import PerTensor
from .aside import aside
from .positions import Facts, facts
from .rope_meaning import FULL_WIDTH


class Tables:
    """Full-width cos and sin, (P, D) float32, of one or several rotary modules."""

    def __init__(self, cache: Tensor, mode: str) -> None:
        with aside():
            self.cos, self.sin = FULL_WIDTH[mode](cache)
        self.mode = mode

    def equals(self, other: Tables) -> bool:
        """Whether the values are the same; waits for the device."""
        with aside():
            return (
                self.mode == other.mode
                and self.cos.device == other.cos.device
                and self.cos.shape == other.cos.shape
                and torch.equal(self.cos, other.cos)
                and torch.equal(self.sin, other.sin)
            )


class Rows:
    """The rows of the tables that a call needs, as (1, S, 1, D): S is L for all samples together, or B * L."""

    def __init__(self, cos: Tensor, sin: Tensor, mode: str, adjoint: Callable[[], Tensor]) -> None:
        self.cos, self.sin, self.mode = cos, sin, mode
        self.plans: dict[tuple[Any, ...], Any] = {}  # the adapter's, by shapes, types and devices
        self._make_adjoint = adjoint
        self._adjoint: Tensor | None = None

    def set_adjoint(self, adjoint: Tensor) -> None:
        self._adjoint = adjoint

    def adjoint(self) -> Tensor:
        """The sine of the backward rotation, made when first needed."""
        if self._adjoint is None:
            with aside():
                self._adjoint = self._make_adjoint()
        return self._adjoint


_tables: PerTensor[Tables] = PerTensor()
_distinct: weakref.WeakSet[Tables] = weakref.WeakSet()

known_tables = _tables.get
"""The tables of a cache that was seen before, or None."""


def tables_of(cache: Tensor, mode: str) -> Tables:
    """The tables of a rotary module's cache, the same object for caches with the same values.

    Sharing is safe because nothing is taken on trust: a cache joins a group only after its values were compared, and
    its membership ends when the tensor object, its storage or its version changes (`PerTensor`).  The comparison waits
    for the device once in the life of a cache, not once per step.
    """
    known = _tables.get(cache) or _tables.find(cache)
    if known is not None and known.mode == mode:
        return known
    built = Tables(cache, mode)
    if not keep(built.cos):
        return built
    shared = next((other for other in list(_distinct) if other.equals(built)), built)
    _distinct.add(shared)
    return _tables.put(cache, shared)


def shared_rows(cache: Tensor, shape: torch.Size, positions: Tensor | None, mode: str) -> Rows | None:
    """The rows for a call of a rotary forward; None where the original has to gather them (or to raise its error).

    Args:
        shape: of the query.
    """
    if type(cache) is not Tensor or cache.is_inference() or cache.requires_grad or len(shape) != 4:
        return None
    length = shape[1]
    if positions is None:
        if length > cache.shape[0]:
            return None
        tables = tables_of(cache, mode)
        return _prefix(tables, length)
    known = facts(positions)
    if known is None or known.length != length or known.batch not in (1, shape[0]):
        return None
    if known.low < 0 or known.high >= cache.shape[0]:  # the check of `_maybe_check_max_pos`: let the original raise
        return None
    tables = tables_of(cache, mode)
    rows = known.ready.get(tables)
    if rows is None:
        rows = _prefix(tables, length) if known.pattern == "range" else _gathered(tables, positions, known)
        if keep(rows.cos):
            known.ready[tables] = rows
    return rows


def _prefix(tables: Tables, length: int) -> Rows:
    def view(table: Tensor) -> Tensor:
        return table[:length].unsqueeze(0).unsqueeze(2)

    mode = tables.mode
    return Rows(view(tables.cos), view(tables.sin), mode, lambda: view(op.adjoint_sine(tables.sin, mode)))


def _gathered(tables: Tables, positions: Tensor, known: Facts) -> Rows:
    """Rows by position: (1, L, 1, D) where the samples agree, else (1, B * L, 1, D).

    In interleave mode the operator takes no tables that differ between samples.  With the batch folded into the
    sequence both modes take them, without a copy of query or key.
    """
    shared = known.pattern == "shared"

    def gather(table: Tensor, index: Tensor) -> Tensor:
        with aside():
            index = index[0] if shared else index.reshape(-1)
            return table.index_select(0, index).unsqueeze(0).unsqueeze(2)

    def later() -> Tensor:
        # From the host: what is remembered for the positions must not keep them alive.
        return gather(op.adjoint_sine(tables.sin, tables.mode), host.to(tables.sin.device))

    host = known.host
    rows = Rows(gather(tables.cos, positions), gather(tables.sin, positions), tables.mode, later)
    if torch.is_grad_enabled():
        rows.set_adjoint(gather(op.adjoint_sine(tables.sin, tables.mode), positions))
    return rows


_given: PerTensor[Rows] = PerTensor()


def given_rows(rope_cache: Tensor, mode: str) -> Rows:
    """The rows in a table that the caller has gathered, (1 or B, L, 1, width); made once per tensor."""
    tracing = is_compiling()
    known = None if tracing else _given.find(rope_cache)
    if known is not None and known.mode == mode:
        return known
    with contextlib.nullcontext() if tracing else aside():
        cos, sin = FULL_WIDTH[mode](rope_cache)
        cos, sin = (table.reshape(1, -1, 1, table.shape[-1]) for table in (cos, sin))
    rows = Rows(cos, sin, mode, lambda: op.adjoint_sine(sin, mode))
    if not tracing and keep(cos):
        _given.put(rope_cache, rows)
    return rows
