"""torchtitan's rotary embeddings: `ComplexRoPE` (neighbouring pairs, complex) and `CosSinRoPE` (halves, cos and sin).

torchtitan rotates in float32 whatever the model's type.  So do these functions: query and key are cast up into one
buffer, rotated by one operator and cast back, with float32 tables.

Every layer of a model owns a rotary module with a table of its own.  The tables are compared by value, once per table
tensor; layers with equal tables share what is gathered from them, once per positions tensor.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ...ops import rope as op
from ...ops._guards import keep, subclass_reason
from ...registry import Target, Unrecognised
from ...sites import Site
from .aside import PerTensor, aside
from .positions import Facts, facts
from .rope_meaning import FULL_WIDTH, NotRecognised, recognise_forward, recognise_rotation
from .typecheck import TYPE_CHECKING_REASON, type_checking

_OP, _LIBRARY = "rope", "torchtitan"
_INPUTS = frozenset((torch.float32, torch.bfloat16, torch.float16))


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The rotary classes of a module that have a rotation of their own."""
    for name, cls in list(vars(module).items()):
        if not (isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == module.__name__):
            continue
        if not isinstance(vars(cls).get("apply_rotary_emb"), staticmethod):
            continue
        rotation, forward = f"{name}.apply_rotary_emb", f"{name}.forward"
        try:
            mode = recognise_rotation(cls)
        except NotImplementedError:  # the abstract base
            continue
        except NotRecognised as error:
            yield Unrecognised(_OP, _LIBRARY, module.__name__, rotation, str(error))
            continue
        yield Target(_OP, _LIBRARY, module.__name__, rotation, _rotation_adapter(mode), f"{mode}, in float32")
        try:
            recognise_forward(cls, mode)
        except NotRecognised as error:
            yield Unrecognised(_OP, _LIBRARY, module.__name__, forward, str(error))
            continue
        meaning = f"{mode}, in float32, rows of the table by position"
        yield Target(_OP, _LIBRARY, module.__name__, forward, _forward_adapter(cls, mode), meaning)


# ---- tables ----------------------------------------------------------------------------------------------------------


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
        self._make_adjoint = adjoint
        self._adjoint: Tensor | None = None

    def adjoint(self) -> Tensor:
        """The sine of the backward rotation, made when first needed."""
        if self._adjoint is None:
            with aside():
                self._adjoint = self._make_adjoint()
        return self._adjoint


_tables: PerTensor[Tables] = PerTensor()
_distinct: weakref.WeakSet[Tables] = weakref.WeakSet()


def tables_of(cache: Tensor, mode: str) -> Tables:
    """The tables of a rotary module's cache, the same object for caches with the same values.

    Sharing is safe because nothing is taken on trust: a cache joins a group only after its values were compared, and
    its membership ends when the tensor object, its storage or its version changes (`PerTensor`).  The comparison waits
    for the device once in the life of a cache, not once per step.
    """
    known = _tables.get(cache)
    if known is not None and known.mode == mode:
        return known
    built = Tables(cache, mode)
    if not keep(built.cos):
        return built
    shared = next((other for other in list(_distinct) if other.equals(built)), built)
    _distinct.add(shared)
    return _tables.put(cache, shared)


def _shared_rows(cache: Tensor, query: Tensor, positions: Tensor | None, mode: str) -> Rows | None:
    """The rows for a call of a rotary forward; None where the original has to gather them (or to raise its error)."""
    if type(cache) is not Tensor or cache.is_inference() or cache.requires_grad or query.dim() != 4:
        return None
    batch, length = query.shape[:2]
    if positions is None:
        if length > cache.shape[0]:
            return None
        tables = tables_of(cache, mode)
        return _prefix(tables, length)
    known = facts(positions)
    if known is None or known.host.shape[1] != length or known.host.shape[0] not in (1, batch):
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
    index = (positions[0] if known.pattern == "shared" else positions.reshape(-1)).detach()

    def gather(table: Tensor) -> Tensor:
        with aside():
            return table.index_select(0, index).unsqueeze(0).unsqueeze(2)

    mode = tables.mode
    return Rows(gather(tables.cos), gather(tables.sin), mode, lambda: gather(op.adjoint_sine(tables.sin, mode)))


_given: PerTensor[Rows] = PerTensor()


def _given_rows(rope_cache: Tensor, mode: str) -> Rows:
    """The rows in a table that the caller has gathered, (1 or B, L, 1, width); made once per tensor."""
    tracing = is_compiling()
    known = None if tracing else _given.get(rope_cache)
    if known is not None and known.mode == mode:
        return known
    with contextlib.nullcontext() if tracing else aside():
        cos, sin = FULL_WIDTH[mode](rope_cache)
        cos, sin = (table.reshape(1, -1, 1, table.shape[-1]) for table in (cos, sin))
    rows = Rows(cos, sin, mode, lambda: op.adjoint_sine(sin, mode))
    if not tracing and keep(cos):
        _given.put(rope_cache, rows)
    return rows


# ---- rotation --------------------------------------------------------------------------------------------------------


def _unsupported(query: Tensor, key: Tensor) -> str | None:
    """What the pair must be before anything is made for it."""
    if query.device.type != "npu":
        return "not on an NPU"
    if reason := subclass_reason(query, key):
        return reason
    if query.dim() != 4 or key.dim() != 4 or query.shape[:2] != key.shape[:2] or query.shape[3] != key.shape[3]:
        return "query and key are not (B, L, N, D) with the same B, L and D"
    if query.dtype not in _INPUTS or key.dtype not in _INPUTS:
        return "query or key is neither float32, bfloat16 nor float16"
    if query.numel() == 0 or key.numel() == 0:
        return "the input is empty"
    return TYPE_CHECKING_REASON if type_checking() else None


def _fold(x: Tensor, rows: Rows) -> Tensor:
    """x as (1, B * L, N, D) where the rows are per sample."""
    batch, length, heads, size = x.shape
    return x if rows.cos.shape[1] == length or batch == 1 else x.reshape(1, batch * length, heads, size)


def _buffer(query: Tensor, key: Tensor, rows: Rows) -> Tensor:
    """Room for query and key side by side, in float32."""
    batch, length, heads, size = query.shape
    shape = (batch, length, heads + key.shape[2], size)
    return _fold(query.new_empty(shape, dtype=torch.float32), rows)


def _turn(query: Tensor, key: Tensor, buffer: Tensor, cos: Tensor, sin: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Both rotated by one operator; cast up on the way into the buffer and back on the way out of the result."""
    heads = query.shape[2]
    batch, length = query.shape[:2]
    room = buffer.view(batch, length, -1, query.shape[3])
    room[:, :, :heads].copy_(query)
    room[:, :, heads:].copy_(key)
    turned = op.rotate(buffer, cos, sin, mode).view(room.shape)
    # Contiguous results: the attention operator would copy strided ones, in its forward and again in its backward.
    return turned[:, :, :heads].to(query.dtype), turned[:, :, heads:].to(key.dtype)


class _RotatePair(torch.autograd.Function):
    """Query and key in half precision, rotated in float32; saves two tables and no activation."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, buffer: Tensor, cos: Tensor, sin: Tensor, adjoint: Tensor, mode: str
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, adjoint)
        ctx.mode = mode
        ctx.folded = buffer.shape[0] != query.shape[0]
        return _turn(query, key, buffer, cos, sin, mode)

    @staticmethod
    def backward(ctx: Any, d_query: Tensor, d_key: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        cos, adjoint = ctx.saved_tensors
        batch, length, heads, size = d_query.shape
        shape = (batch, length, heads + d_key.shape[2], size)
        buffer = d_query.new_empty(shape, dtype=torch.float32)
        if ctx.folded:
            buffer = buffer.view(1, batch * length, *shape[2:])
        return (*_turn(d_query, d_key, buffer, cos, adjoint, ctx.mode), None, None, None, None, None)


def _plan(query: Tensor, key: Tensor, rows: Rows) -> tuple[str | None, Tensor | None]:
    """Why the operator cannot take the pair, or None; and the buffer where the pair has to be cast."""
    mode = rows.mode
    if query.dtype is torch.float32 and key.dtype is torch.float32:
        reason = op.unsupported(_fold(query, rows), rows.cos, rows.sin, mode)
        return reason or op.unsupported(_fold(key, rows), rows.cos, rows.sin, mode), None
    buffer = _buffer(query, key, rows)
    return op.unsupported(buffer, rows.cos, rows.sin, mode), buffer


def _rotate(query: Tensor, key: Tensor, rows: Rows, buffer: Tensor | None) -> tuple[Tensor, Tensor]:
    mode, cos, sin = rows.mode, rows.cos, rows.sin
    records = op.needs_adjoint(query, key)
    if buffer is None:
        adjoint = rows.adjoint() if records else None
        q, k = (op.rotate(_fold(x, rows), cos, sin, mode, adjoint).view(x.shape) for x in (query, key))
        return q, k
    if records:
        return _RotatePair.apply(query, key, buffer, cos, sin, rows.adjoint(), mode)
    return _turn(query, key, buffer, cos, sin, mode)


def _rotate_traced(query: Tensor, key: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """The same in operators that torch.compile and autograd see one by one."""
    q, k = (
        op.rotate(_fold(x.float(), rows), rows.cos, rows.sin, rows.mode).reshape(x.shape).type_as(x)
        for x in (query, key)
    )
    return q, k


# ---- call sites ------------------------------------------------------------------------------------------------------


def _forward_adapter(cls: Any, mode: str) -> Callable[[Any, Site], Callable[..., Any]]:
    reshape_cache = cls._reshape_cache

    def adapter(original: Any, site: Site) -> Callable[..., Any]:
        def forward(self: Any, query: Tensor, key: Tensor, positions: Tensor | None = None) -> Any:
            own = type(self)
            # What is gained here is that layers share the rows.  Whatever does not fit goes the original's way, which
            # ends in `apply_rotary_emb`: that is where reasons are counted.
            if (
                not is_compiling()
                and own._reshape_cache is reshape_cache
                and own.apply_rotary_emb is cls.apply_rotary_emb
                and _unsupported(query, key) is None
            ):
                rows = _shared_rows(self.cache, query, positions, mode)
                if rows is not None:
                    reason, buffer = _plan(query, key, rows)
                    if reason is None:
                        site.hit()
                        return _rotate(query, key, rows, buffer)
            return original(self, query, key, positions)

        return forward

    return adapter


def _rotation_adapter(mode: str) -> Callable[[Any, Site], Callable[..., Any]]:
    def adapter(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> Any:
            reason = _unsupported(query, key) or _table_reason(rope_cache, query)
            if reason is None:
                rows = _given_rows(rope_cache, mode)
                if is_compiling():
                    stand_in = _fold(query, rows).float()
                    reason = op.unsupported(stand_in, rows.cos, rows.sin, mode)
                    if reason is None:
                        site.hit()
                        return _rotate_traced(query, key, rows)
                else:
                    reason, buffer = _plan(query, key, rows)
                    if reason is None:
                        site.hit()
                        return _rotate(query, key, rows, buffer)
            site.fallback(reason)
            return original(query, key, rope_cache)

        return apply_rotary_emb

    return adapter


def _table_reason(rope_cache: Tensor, query: Tensor) -> str | None:
    if reason := subclass_reason(rope_cache):
        return reason
    if rope_cache.requires_grad and torch.is_grad_enabled():
        return "gradient to the rotary cache"
    shape = rope_cache.shape
    if len(shape) != 4 or shape[0] not in (1, query.shape[0]) or shape[1] != query.shape[1] or shape[2] != 1:
        return "the rotary cache is not (1 or B, L, 1, width)"
    if rope_cache.dtype not in (torch.complex64, torch.float32):
        return "the rotary cache is not in float32"
    return None
