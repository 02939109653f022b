"""torchtitan's rotary embeddings: `ComplexRoPE` (neighbouring pairs, complex) and `CosSinRoPE` (halves, cos and sin).

torchtitan rotates in float32 whatever the model's type.  So do these functions: query and key are cast up into one
buffer, rotated by one operator and cast back, with float32 tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ...ops import rope as op
from ...ops.guards import FUNCTORCH, NOT_ON_NPU, keep, subclass_reason, transforming
from ...registry import Target, Unrecognised
from ...sites import Site
from .positions import known_facts
from .rope_meaning import NotRecognised, recognise_forward, recognise_rotation
from .rope_rows import Rows, given_rows, known_tables, shared_rows
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


# ---- rotation --------------------------------------------------------------------------------------------------------


def _call_reason(query: Tensor, key: Tensor) -> str | None:
    """What may differ from call to call, whatever the shapes."""
    if (type(query) is not Tensor or type(key) is not Tensor) and (reason := subclass_reason(query, key)):
        return reason
    if transforming():
        return FUNCTORCH
    return TYPE_CHECKING_REASON if type_checking() else None


def _pair_reason(query: Tensor, key: Tensor) -> str | None:
    """What the pair must be before anything is made for it."""
    if query.device.type != "npu" or key.device.type != "npu":
        return NOT_ON_NPU
    if query.dim() != 4 or key.dim() != 4 or query.shape[:2] != key.shape[:2] or query.shape[3] != key.shape[3]:
        return "query and key are not (B, L, N, D) with the same B, L and D"
    if query.dtype not in _INPUTS or key.dtype not in _INPUTS:
        return "query or key is neither float32, bfloat16 nor float16"
    if query.numel() == 0 or key.numel() == 0:
        return "the input is empty"
    return None


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
    turned = op.rotate(buffer, cos, sin, mode, swap=False).view(room.shape)
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


class _Plan(NamedTuple):
    """How a pair of known shapes and types is rotated."""

    rows: Rows
    in_float32: bool
    folded: bool


def _plan(query: Tensor, key: Tensor, rows: Rows) -> str | _Plan:
    """The plan, or why the operator cannot take the pair; for a pair that `_call_reason` has passed.

    It depends on shapes, types and devices alone, so it is made once per rows: for all layers of a step.
    """
    question = (query.shape, key.shape, query.dtype, key.dtype, query.device, key.device)
    plan = rows.plans.get(question)
    if plan is None:
        reason = _pair_reason(query, key)
        in_float32 = query.dtype is torch.float32 and key.dtype is torch.float32
        if reason is None and in_float32:
            reason = op.unsupported(_fold(query, rows), rows.cos, rows.sin, rows.mode)
            reason = reason or op.unsupported(_fold(key, rows), rows.cos, rows.sin, rows.mode)
        elif reason is None:
            reason = op.unsupported(_buffer(query, key, rows), rows.cos, rows.sin, rows.mode)
        plan = reason or _Plan(rows, in_float32, rows.cos.shape[1] != query.shape[1])
        rows.plans[question] = plan
    return plan


def _rotate(query: Tensor, key: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
    rows, in_float32, folded = plan
    cos, sin, mode = rows.cos, rows.sin, rows.mode
    adjoint = rows.adjoint() if op.needs_adjoint(query, key) else None
    # swap: these tables are never those of (B, N, S, D).
    if not in_float32:
        buffer = _buffer(query, key, rows)
        if adjoint is not None:
            return _RotatePair.apply(query, key, buffer, cos, sin, adjoint, mode)
        return _turn(query, key, buffer, cos, sin, mode)
    rotate = op.rotate_by_constants
    if not folded:
        return rotate(query, cos, sin, mode, adjoint, False), rotate(key, cos, sin, mode, adjoint, False)
    q = rotate(_fold(query, rows), cos, sin, mode, adjoint, False).view(query.shape)
    return q, rotate(_fold(key, rows), cos, sin, mode, adjoint, False).view(key.shape)


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

    def is_like(own: Any) -> bool:
        return own._reshape_cache is reshape_cache and own.apply_rotary_emb is cls.apply_rotary_emb

    def adapter(original: Any, site: Site) -> Callable[..., Any]:
        def forward(self: Any, query: Tensor, key: Tensor, positions: Tensor | None = None) -> Any:
            own = type(self)
            # What is gained here is that layers share the rows.  Whatever does not fit goes the original's way, which
            # ends in `apply_rotary_emb`: that is where reasons are counted.
            if not is_compiling() and (own is cls or is_like(own)) and _call_reason(query, key) is None:
                plan = _shared_plan(self.cache, query, key, positions, mode)
                if plan is not None:
                    site.hit()
                    return _rotate(query, key, plan)
            return original(self, query, key, positions)

        return forward

    return adapter


def _shared_plan(cache: Tensor, query: Tensor, key: Tensor, positions: Tensor | None, mode: str) -> _Plan | None:
    """The plan for a call of a rotary forward; None where the original has to run."""
    known = None if positions is None else known_facts(positions)
    tables = None if cache.requires_grad else known_tables(cache)
    device = query.device
    facts = (mode, query.shape, key.shape, query.dtype, key.dtype, device)
    plan: _Plan | None = None
    if key.device != device:
        return None
    if known is not None and tables is not None:
        plan = known.ready.get((tables, facts))
    if plan is not None or device.type != "npu":
        return plan
    rows = shared_rows(cache, query.shape, positions, mode)
    made = None if rows is None else _plan(query, key, rows)
    if not isinstance(made, _Plan):
        return None
    known = None if positions is None else known_facts(positions)
    tables = known_tables(cache)
    if known is not None and tables is not None and keep(made.rows.cos):
        known.ready[tables, facts] = made
    return made


def _rotation_adapter(mode: str) -> Callable[[Any, Site], Callable[..., Any]]:
    def adapter(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> Any:
            reason = _call_reason(query, key) or _pair_reason(query, key) or _table_reason(rope_cache, query)
            if reason is None:
                rows = given_rows(rope_cache, mode)
                if is_compiling():
                    stand_in = _fold(query, rows).float()
                    reason = op.unsupported(stand_in, rows.cos, rows.sin, mode)
                    if reason is None:
                        site.hit()
                        return _rotate_traced(query, key, rows)
                else:
                    plan = _plan(query, key, rows)
                    if isinstance(plan, _Plan):
                        site.hit()
                        return _rotate(query, key, plan)
                    reason = plan
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
