"""torchtitan's rotary embeddings: `ComplexRoPE` (neighbouring pairs, complex), `CosSinRoPE` (halves, cos and sin), and
classes and functions that compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ...ops.guards import keep, subclass_reason, transforming
from ...registry import Target, Unrecognised
from ...sites import Site
from . import LIBRARY, dtensors, rope_functions
from .positions import known_facts
from .rope_meaning import NotRecognised, RotaryClass, asks_for_rows, recognise_forward, recognise_rotation
from .rope_rotation import Plan, Tensors, call_reason, pair_reason, plan, rotate, rotate_traced
from .rope_rows import given_rows, known_tables, own_rows, shared_rows
from .typecheck import watched

_OP = "rope"


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The rotary classes of a module that rotate or choose rows in a way of their own, and its rotary functions."""
    for name, cls in list(vars(module).items()):
        if not (isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == module.__name__):
            continue
        own = [part for part in ("apply_rotary_emb", "_reshape_cache", "forward") if part in vars(cls)]
        if own and isinstance(_raw(cls, "apply_rotary_emb"), staticmethod):
            yield from _class_targets(cls, module.__name__, name, own)
    yield from rope_functions.find(module)


def _raw(cls: type, name: str) -> Any:
    return next((vars(owner)[name] for owner in cls.__mro__ if name in vars(owner)), None)


def _class_targets(cls: type, module: str, name: str, own: list[str]) -> Iterator[Target | Unrecognised]:
    path, forward = f"{name}.apply_rotary_emb", f"{name}.forward"
    try:
        rotation = recognise_rotation(cls)
    except NotImplementedError:  # the abstract base
        return
    except NotRecognised as error:
        yield Unrecognised(_OP, LIBRARY, module, path, str(error))
        return
    if "apply_rotary_emb" in own:
        yield Target(_OP, LIBRARY, module, path, _rotation_adapter(rotation), str(rotation))
    try:
        ranks = recognise_forward(cls, rotation)
    except NotRecognised as error:
        yield Unrecognised(_OP, LIBRARY, module, forward, str(error))
        return
    meaning = f"{rotation}, rows of the table by position"
    yield Target(_OP, LIBRARY, module, forward, _forward_adapter(cls, rotation, ranks), meaning)


def _wide(site: Site) -> bool:
    """Whether to rotate in float32, as the originals do."""
    return site.options.get("tables") != "input"


# ---- forward: rows by position, shared by the layers -----------------------------------------------------------------


def _forward_adapter(
    cls: Any, rotation: RotaryClass, ranks: frozenset[int]
) -> Callable[[Any, Site], Callable[..., Any]]:
    reshape_cache, kind = cls._reshape_cache, rotation.kind
    asks = 4 in ranks and asks_for_rows(cls, rotation)
    ranks = _BLNH if ranks == _BLNH else ranks

    def is_like(own: Any) -> bool:
        return own._reshape_cache is reshape_cache and own.apply_rotary_emb is cls.apply_rotary_emb

    def fused(self: Any, query: Any, key: Any, positions: Any, site: Site) -> Any:
        """Both rotated; None for whatever does not fit.

        What is gained here is that layers share the rows.  The rest goes the original's way, which ends in
        `apply_rotary_emb`: that is where reasons are counted.
        """
        own = type(self)
        if is_compiling() or (own is not cls and not is_like(own)):
            return None
        cache, places = self.cache, None
        plain = type(query) is type(key) is Tensor
        if not plain and dtensors.is_distributed(query):
            found = dtensors.heads((query, key), cache)
            if isinstance(found, str) or dtensors.is_distributed(positions):
                return None
            places, (query, key), cache = found
        if (watched() or transforming()) if plain else call_reason((query, key)) is not None:
            return None
        if positions is not None and positions.dim() > 2:
            if not asks or places is not None:
                return None
            return _by_own_rows(self, query, key, positions, kind, site)
        if ranks is not _BLNH:
            if query.dim() not in ranks or key.dim() != query.dim():
                return None
            if query.dim() == 3:
                query, key = query.unsqueeze(0), key.unsqueeze(0)
                rotated = _shared(cache, query, key, positions, kind, site)
                return None if rotated is None else _packed(rotated, places)
        rotated = _shared(cache, query, key, positions, kind, site)
        if places is None or rotated is None:
            return rotated
        return tuple(place.wrap(y) for place, y in zip(places, rotated, strict=True))

    def adapter(original: Any, site: Site) -> Callable[..., Any]:
        def forward(self: Any, query: Tensor, key: Tensor, positions: Tensor | None = None) -> Any:
            rotated = fused(self, query, key, positions, site)
            return original(self, query, key, positions) if rotated is None else rotated

        def forward_or_back(
            self: Any,
            query: Tensor,
            key: Tensor | None = None,
            positions: Tensor | None = None,
            *,
            inverse: bool = False,
        ) -> Any:
            rotated = None if inverse or key is None else fused(self, query, key, positions, site)
            return original(self, query, key, positions, inverse=inverse) if rotated is None else rotated

        return forward_or_back if rotation.inverse else forward

    return adapter


_BLNH = frozenset((4,))


def _packed(rotated: Tensors, places: Any) -> Tensors:
    outputs = tuple(y.squeeze(0) for y in rotated)
    return outputs if places is None else tuple(p.wrap(y) for p, y in zip(places, outputs, strict=True))


def _shared(
    cache: Tensor, query: Tensor, key: Tensor, positions: Tensor | None, kind: str, site: Site
) -> Tensors | None:
    """Both rotated, counted; None where the original has to run."""
    wide = _wide(site)
    # Asked once per positions tensor for all layers with these tables: what is left are shapes, types and devices.
    facts = (kind, wide, query.shape, key.shape, query.dtype, key.dtype, query.device, key.device)
    known = None if positions is None else known_facts(positions)
    tables = None if cache.requires_grad else known_tables(cache)
    chosen: Plan | None = None
    if known is not None and tables is not None:
        chosen = known.ready.get((tables, facts))
    if chosen is None:
        chosen = _make_plan(cache, query, key, positions, kind, wide, facts)
        if chosen is None:
            return None
    site.hit()
    return rotate((query, key), chosen)


def _by_own_rows(module: Any, query: Tensor, key: Tensor, positions: Tensor, kind: str, site: Site) -> Tensors | None:
    """Both rotated, counted, by rows that the module chooses in its own way; None where the original has to run."""
    if pair_reason((query, key)) is not None:
        return None
    rows = own_rows(module, query, positions, kind)
    chosen = None if rows is None else plan((query, key), rows, _wide_for(query, key, _wide(site)))
    if not isinstance(chosen, Plan):
        return None
    site.hit()
    return rotate((query, key), chosen)


def _make_plan(
    cache: Tensor, query: Tensor, key: Tensor, positions: Tensor | None, kind: str, wide: bool, facts: tuple[Any, ...]
) -> Plan | None:
    """The plan for a call of a rotary forward, remembered; None where the original has to run."""
    device = query.device
    if key.device != device or query.dim() != 4 or device.type != "npu":
        return None
    rows = shared_rows(cache, query.shape[0], query.shape[1], positions, kind)
    made = None if rows is None else plan((query, key), rows, _wide_for(query, key, wide))
    if not isinstance(made, Plan):
        return None
    known = None if positions is None else known_facts(positions)
    tables = known_tables(cache)
    if known is not None and tables is not None and keep(made.rows.cos):
        known.ready[tables, facts] = made
    return made


def _wide_for(query: Tensor, key: Tensor, wide: bool) -> bool:
    """Query and key of two types have no one type to rotate in but float32."""
    return wide or query.dtype is not key.dtype


# ---- rotation by rows that were gathered -----------------------------------------------------------------------------


def _rotation_adapter(rotation: RotaryClass) -> Callable[[Any, Site], Callable[..., Any]]:
    ranks, kind = rotation.ranks, rotation.kind

    def fused(tensors: Tensors, table: Tensor, site: Site) -> str | Tensors:
        """The reason, or the tensors rotated."""
        places = None
        if dtensors.is_distributed(tensors[0]):
            found = dtensors.heads(tensors, table)
            if isinstance(found, str):
                return found
            places, tensors, table = found
        if reason := call_reason(tensors):
            return reason
        if tensors[0].dim() not in ranks or any(x.dim() != tensors[0].dim() for x in tensors):
            return "query and key are not (B, L, N, D) with the same B, L and D"
        packed = tensors[0].dim() == 3
        if packed:
            tensors, table = tuple(x.unsqueeze(0) for x in tensors), table.unsqueeze(0)
        result = _by_table(tensors, table, kind, _wide_for(tensors[0], tensors[-1], _wide(site)), site)
        if isinstance(result, str):
            return result
        if packed:
            return _packed(result, places)
        return result if places is None else tuple(p.wrap(y) for p, y in zip(places, result, strict=True))

    def adapter(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> Any:
            result = fused((query, key), rope_cache, site)
            if isinstance(result, str):
                site.fallback(result)
                return original(query, key, rope_cache)
            return result

        def apply_or_undo(query: Tensor, key: Tensor | None, rope_cache: Tensor, *, inverse: bool = False) -> Any:
            tensors = (query,) if key is None else (query, key)
            result = "the inverse rotation" if inverse else fused(tensors, rope_cache, site)
            if isinstance(result, str):
                site.fallback(result)
                return original(query, key, rope_cache, inverse=inverse)
            return result[0] if key is None else result

        return apply_or_undo if rotation.inverse else apply_rotary_emb

    return adapter


def _by_table(tensors: Tensors, table: Tensor, kind: str, wide: bool, site: Site) -> str | Tensors:
    """Tensors (B, L, N, D) rotated by a table (1 or B, L, 1, …), counted; or the reason."""
    reason = pair_reason(tensors) or _table_reason(table, tensors[0])
    if reason is not None:
        return reason
    rows = given_rows(table, kind)
    if is_compiling():
        traced = rotate_traced(tensors, rows, wide)
        if not isinstance(traced, str):
            site.hit()
        return traced
    chosen = plan(tensors, rows, wide)
    if isinstance(chosen, str):
        return chosen
    site.hit()
    return rotate(tensors, chosen)


def _table_reason(table: Tensor, query: Tensor) -> str | None:
    if reason := subclass_reason(table):
        return reason
    if table.requires_grad and torch.is_grad_enabled():
        return "gradient to the rotary cache"
    shape = table.shape
    if len(shape) != 4 or shape[0] not in (1, query.shape[0]) or shape[1] != query.shape[1] or shape[2] != 1:
        return "the rotary cache is not (1 or B, L, 1, width)"
    if table.dtype not in (torch.complex64, torch.float32):
        return "the rotary cache is not in float32"
    return None
