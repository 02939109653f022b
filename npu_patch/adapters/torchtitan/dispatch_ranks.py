"""Between ranks, in torchtitan 0.3.0: rows by rank and expert, as they come in, to rows by expert and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...discovery import NotRecognised
from ...ops import permute as op
from ...registry import Target, Unrecognised
from ...sites import Site
from . import dtensors
from .dispatch_calls import UNSORTED, Adapter, target, unsupported_combine
from .dispatch_meaning import recognise_dispatch, recognise_exchange, recognise_ranks_combine
from .dispatch_order import Fields, Order, recall, remember
from .typecheck import TYPE_CHECKING_REASON, type_checking

_PERMUTE, _UNPERMUTE, _COMBINE, _DISPATCH = "_permute", "_unpermute", "combine", "dispatch"


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The dispatchers of a module that exchange rows between ranks."""
    for cls in list(vars(module).values()):
        if not (isinstance(cls, type) and cls.__module__ == module.__name__ and len(cls.__mro__) > 2):
            continue
        own = vars(cls)
        if isinstance(own.get(_PERMUTE), FunctionType) and isinstance(own.get(_UNPERMUTE), FunctionType):
            yield from _found(module, cls)


def _found(module: ModuleType, cls: type) -> Iterator[Target | Unrecognised]:
    own = vars(cls)

    def exchange(adapter: Adapter) -> Callable[[], Adapter]:
        def recognise() -> Adapter:
            recognise_exchange(cls, own[_PERMUTE], own[_UNPERMUTE])
            return adapter

        return recognise

    def combine() -> Adapter:
        fields = _fields(cls)
        kind = _metadata_of(own.get(_DISPATCH), fields.kind)
        recognise_ranks_combine(cls, own[_COMBINE], fields, kind)
        return _combine_adapter(fields)

    name = cls.__name__
    yield target(module, f"{name}.{_PERMUTE}", exchange(_permute_adapter), "rows of all ranks sorted by expert")
    yield target(module, f"{name}.{_UNPERMUTE}", exchange(_unpermute_adapter), "rows by expert back to their ranks")
    if isinstance(own.get(_COMBINE), FunctionType):
        meaning = "expert outputs exchanged, weighted in float32 and summed by token"
        yield target(module, f"{name}.{_COMBINE}", combine, meaning)


def _fields(cls: type) -> Fields:
    """Those of the dispatcher within a rank that this one is a kind of."""
    for base in cls.__mro__[1:]:
        if "_local_reorder" in vars(base):
            return recognise_dispatch(base, vars(base).get(_DISPATCH))
    raise NotRecognised("is no kind of a dispatcher within a rank")


def _metadata_of(dispatch: Any, kind: type) -> type:
    """The one class of metadata that a dispatch makes beside `kind`."""
    names = getattr(getattr(dispatch, "__code__", None), "co_names", ())
    made = [dispatch.__globals__.get(name) for name in names]
    kinds = [one for one in made if isinstance(one, type) and issubclass(one, kind) and one is not kind]
    if len(kinds) != 1:
        raise NotRecognised("its metadata are not known")
    return kinds[0]


def _permute_adapter(original: Any, site: Site) -> Callable[..., Any]:
    def permute(self: Any, rows: Any, counts: Tensor) -> Any:
        ranks = self.ep_mesh.size()
        sorted_rows = by_expert(rows, counts, ranks)
        if isinstance(sorted_rows, str):
            site.fallback(sorted_rows)
            return original(self, rows, counts)
        site.hit()
        routed, indices = sorted_rows
        return rows.shape, routed, indices, counts.view(ranks, -1).sum(0)

    return permute


def by_expert(rows: Any, counts: Tensor, ranks: int) -> str | tuple[Tensor, Tensor]:
    """Rows sorted by expert, and where each comes from, with the order remembered beside; or the reason.

    Args:
        rows: (rows, size), by rank and within a rank by expert; as many as the counts say.
        counts: (ranks * experts,) of rows.
    """
    if is_compiling():
        return "rows of several ranks under torch.compile"
    if type_checking():
        return TYPE_CHECKING_REASON
    rows = dtensors.waited(rows)
    experts = torch.arange(counts.shape[0] // ranks, device=counts.device).repeat(ranks)
    ids = experts.repeat_interleave(counts, output_size=rows.shape[0])
    if (reason := op.unsupported(rows, ids.unsqueeze(1))) is not None:
        return reason
    routed, places = op.permute(rows, ids.unsqueeze(1))
    indices = torch.argsort(ids, stable=True)
    remember(indices, places)
    return routed, indices


def _unpermute_adapter(original: Any, site: Site) -> Callable[..., Any]:
    def unpermute(self: Any, rows: Tensor, shape: Any, indices: Any) -> Any:
        back = by_rank(rows, shape[0], indices)
        if isinstance(back, str):
            site.fallback(back)
            return original(self, rows, shape, indices)
        site.hit()
        return back

    return unpermute


def by_rank(rows: Tensor, count: int, indices: Any) -> str | Tensor:
    """All `count` rows back in the order before `by_expert`, or the reason."""
    order = recall(indices)
    if order is None:
        return UNSORTED
    if type_checking():
        return TYPE_CHECKING_REASON
    if rows.shape[0] != count:
        return "rows were left out"
    reason = op.unsupported_combine(rows, order.rows, None)
    return reason or op.combine(rows, order.rows, None, rounded=True, top_k=1)


def _combine_adapter(fields: Fields) -> Adapter:
    def adapter(original: Any, site: Site) -> Callable[..., Any]:
        names = original.__globals__

        def combine(self: Any, outputs: Tensor, metadata: Any, tokens: Tensor) -> Any:
            if self.ep_mesh is None:  # the dispatcher within a rank does it, which is a target itself
                return original(self, outputs, metadata, tokens)
            order = None if is_compiling() else fields.order_of(metadata)
            spmd = names["get_spmd_backend"]() == "spmd_types"
            reason = "the spmd_types backend" if spmd else _combine_reason(outputs, order, tokens)
            if order is None or reason is not None:
                site.fallback(str(reason))
                return original(self, outputs, metadata, tokens)
            site.hit()
            rows = self._unpermute(outputs, metadata.input_shape, metadata.permuted_indices)
            group = self.ep_mesh.get_group()
            rows = self._combine_token_exchange(rows, group, metadata.input_splits, metadata.output_splits)
            return op.combine(dtensors.waited(rows), order.rows, order.weights, rounded=True)

        return combine

    return adapter


def _combine_reason(outputs: Tensor, order: Order | None, tokens: Tensor) -> str | None:
    """Asked before rows are exchanged; there are as many then as were sorted."""
    if order is not None:
        outputs = outputs.new_empty((1, *outputs.shape[1:])).expand(order.rows.shape[0], -1)
    return unsupported_combine(outputs, order, tokens)
