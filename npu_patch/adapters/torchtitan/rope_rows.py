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
from .rope_tables import FULL_WIDTH, MODES


class Tables:
    """Full-width cos and sin, (P, D) float32, of one or several rotary modules."""

    def __init__(self, cache: Tensor, kind: str) -> None:
        with aside():
            self.cos, self.sin = FULL_WIDTH[kind](cache)
        self.kind = kind

    def equals(self, other: Tables) -> bool:
        """Whether the values are the same; waits for the device."""
        with aside():
            return (
                self.kind == other.kind
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
        self._others: dict[torch.dtype, Rows] = {}

    def set_adjoint(self, adjoint: Tensor) -> None:
        self._adjoint = adjoint

    def adjoint(self) -> Tensor:
        """The sine of the backward rotation, made when first needed."""
        if self._adjoint is None:
            with aside():
                self._adjoint = self._make_adjoint()
        return self._adjoint

    def cast(self, dtype: torch.dtype) -> Rows:
        """The same rows in another type."""
        if self.cos.dtype is dtype:
            return self
        other = self._others.get(dtype)
        if other is None:
            with aside():
                cos, sin = self.cos.to(dtype), self.sin.to(dtype)
            other = Rows(cos, sin, self.mode, lambda: self.adjoint().to(dtype))
            if keep(cos):
                self._others[dtype] = other
        return other


_tables: PerTensor[Tables] = PerTensor()
_distinct: weakref.WeakSet[Tables] = weakref.WeakSet()

known_tables = _tables.get
"""The tables of a cache that was seen before, or None."""


def tables_of(cache: Tensor, kind: str, shared: bool = True) -> Tables:
    """The tables of a rotary module's cache, the same object for caches with the same values.

    Sharing is safe because nothing is taken on trust: a cache joins a group only after its values were compared, and
    its membership ends when the tensor object, its storage or its version changes (`PerTensor`).  The comparison waits
    for the device once in the life of a cache, not once per step.

    Args:
        cache: of a module, or one that is handed from layer to layer.
        kind: a key of `FULL_WIDTH`.
        shared: compare it with others; not for caches that live no longer than a step.
    """
    known = _tables.get(cache) or _tables.find(cache)
    if known is not None and known.kind == kind:
        return known
    built = Tables(cache, kind)
    if not keep(built.cos):
        return built
    if shared:
        built = next((other for other in list(_distinct) if other.equals(built)), built)
        _distinct.add(built)
    return _tables.put(cache, built)


def shared_rows(cache: Tensor, batch: int, length: int, positions: Tensor | None, kind: str) -> Rows | None:
    """The rows for a call of a rotary forward; None where the original has to gather them (or to raise its error).

    Args:
        cache: of the module.
        batch, length: of the query.
        positions: (1, L), (B, L), or (L,) for a packed layout.
        kind: a key of `FULL_WIDTH`.
    """
    if type(cache) is not Tensor or cache.is_inference() or cache.requires_grad:
        return None
    if positions is None:
        if length > cache.shape[0]:
            return None
        return prefix_rows(tables_of(cache, kind), length)
    known = facts(positions)
    if known is None or known.length != length or known.batch not in (1, batch):
        return None
    if known.low < 0 or known.high >= cache.shape[0]:  # the check of `_maybe_check_max_pos`: let the original raise
        return None
    tables = tables_of(cache, kind)
    rows = known.ready.get(tables)
    if rows is None:
        rows = prefix_rows(tables, length) if known.pattern == "range" else _gathered(tables, positions, known)
        if keep(rows.cos):
            known.ready[tables] = rows
    return rows


def prefix_rows(tables: Tables, length: int) -> Rows:
    """The first rows, for positions 0, 1, 2, …"""

    def view(table: Tensor) -> Tensor:
        return table[:length].unsqueeze(0).unsqueeze(2)

    mode = MODES[tables.kind]
    return Rows(view(tables.cos), view(tables.sin), mode, lambda: view(op.adjoint_sine(tables.sin, mode)))


def _gathered(tables: Tables, positions: Tensor, known: Facts) -> Rows:
    """Rows by position: (1, L, 1, D) where the samples agree, else (1, B * L, 1, D).

    In interleave mode the operator takes no tables that differ between samples.  With the batch folded into the
    sequence both modes take them, without a copy of query or key.
    """
    shared = known.pattern == "shared"
    mode = MODES[tables.kind]

    def gather(table: Tensor, index: Tensor) -> Tensor:
        with aside():
            index = index.reshape(known.batch, -1)[0] if shared else index.reshape(-1)
            return table.index_select(0, index).unsqueeze(0).unsqueeze(2)

    def later() -> Tensor:
        # From the host: what is remembered for the positions must not keep them alive.
        return gather(op.adjoint_sine(tables.sin, mode), host.to(tables.sin.device))

    host = known.host
    rows = Rows(gather(tables.cos, positions), gather(tables.sin, positions), mode, later)
    if torch.is_grad_enabled():
        rows.set_adjoint(gather(op.adjoint_sine(tables.sin, mode), positions))
    return rows


_given: PerTensor[dict[str, Rows]] = PerTensor()


def given_rows(table: Tensor, kind: str) -> Rows:
    """The rows in a table that the caller has gathered, (1 or B, L, 1, …); made once per tensor."""
    tracing = is_compiling()
    known = None if tracing else _given.find(table)
    if known is not None and kind in known:
        return known[kind]
    mode = MODES[kind]
    with contextlib.nullcontext() if tracing else aside():
        cos, sin = (one.reshape(1, -1, 1, one.shape[-1]) for one in FULL_WIDTH[kind](table))
    rows = Rows(cos, sin, mode, lambda: op.adjoint_sine(sin, mode))
    if not tracing and keep(cos):
        _given.put(table, {**(known or {}), kind: rows})
    return rows


_own: PerTensor[list[tuple[Any, Rows]]] = PerTensor()


def own_rows(module: Any, query: Tensor, positions: Tensor, kind: str) -> Rows | None:
    """The rows that a rotary module chooses in a way of its own; made once for all layers that choose alike.

    Layers choose alike that are of one class, have tables of equal values, and nothing else but equal settings.

    Args:
        module: its `_reshape_cache(query, positions)` gives the rows, and checks the positions.
        query: (B, L, N, D).
        positions: of any form.
        kind: a key of `FULL_WIDTH`.
    """
    cache = module.cache
    if type(cache) is not Tensor or cache.is_inference() or cache.requires_grad:
        return None
    if type(positions) is not Tensor or set(module._buffers) != {"cache"} or module._parameters or module._modules:
        return None
    settings = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    alike = (type(module), tables_of(cache, kind), query.shape, query.dtype, query.device, settings)
    known = _own.get(positions) or _own.find(positions)
    for other, rows in known or ():
        if other == alike:
            return rows
    with aside():
        table: Tensor = module._reshape_cache(query, positions)
        if table.dim() != 4 or table.shape[0] not in (1, query.shape[0]) or table.shape[1:3] != (query.shape[1], 1):
            return None
        rows = given_rows(table, kind)
    if keep(rows.cos):
        _own.put(positions, [*(known or ()), (alike, rows)])
    return rows


_by_position: PerTensor[dict[Any, Rows]] = PerTensor()


def handed_rows(cache: Tensor, length: int, positions: Tensor | None, kind: str) -> Rows:
    """The rows of a cache that a model hands to every layer, for a function that gathers them there.

    Nothing is asked of the device: positions outside of the cache fail where the original's do, in the operator.

    Args:
        cache: (P, …).
        length: of the query; not above P.
        positions: None for the first rows, or (1, L) or (B, L).
        kind: a key of `FULL_WIDTH`.
    """
    if is_compiling():
        picked = cache[:length] if positions is None else cache[positions.reshape(-1)]
        return given_rows(picked.unsqueeze(0).unsqueeze(2), kind)
    tables, mode = tables_of(cache, kind, shared=False), MODES[kind]
    question = (tables, length)
    holder = cache if positions is None else positions
    known = _by_position.get(holder) or _by_position.find(holder)
    if known is not None and question in known:
        return known[question]
    if positions is None:
        rows = prefix_rows(tables, length)
    else:

        def gather(table: Tensor) -> Tensor:
            return table.index_select(0, index).unsqueeze(0).unsqueeze(2)

        with aside():
            index = positions.reshape(-1)
            cos, sin = gather(tables.cos), gather(tables.sin)
            adjoint = gather(op.adjoint_sine(tables.sin, mode))
        rows = Rows(cos, sin, mode, lambda: adjoint)
    if keep(rows.cos):
        if known is None:
            known = _by_position.put(holder, {})
        known[question] = rows
    return rows
