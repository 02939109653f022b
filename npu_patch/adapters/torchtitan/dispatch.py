"""Token dispatchers of torchtitan 0.3.0: tokens sorted by expert, and the experts' outputs weighted and summed back.

Dispatchers are no modules.  One that spans ranks (dispatch_ranks) sorts by `_local_reorder`, too.  0.2.2 has no
dispatchers: its blocks do this themselves (dispatch_blocks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ... import functions
from ...ops import permute as op
from ...registry import Target, Unrecognised
from ...sites import Site
from . import dispatch_blocks, dispatch_ranks
from .dispatch_calls import Adapter, target, unsupported_combine, unsupported_dispatch
from .dispatch_meaning import recognise_combine, recognise_dispatch, recognise_reorder
from .dispatch_order import Fields, Order, remember, sorted_metadata, with_order

_REORDER, _DISPATCH, _COMBINE = "_local_reorder", "dispatch", "combine"


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """What sorts tokens and brings them back, in the module that defines it."""
    for cls in list(vars(module).values()):
        if isinstance(cls, type) and cls.__module__ == module.__name__ and _REORDER in vars(cls):
            yield from _found(module, cls)
    yield from dispatch_ranks.find(module)
    yield from dispatch_blocks.find(module)


def _found(module: ModuleType, cls: type) -> Iterator[Target | Unrecognised]:
    own = {name: vars(cls).get(name) for name in (_REORDER, _DISPATCH, _COMBINE)}

    def reorder() -> Adapter:
        recognise_reorder(cls, own[_REORDER])
        return _reorder_adapter

    def dispatch() -> Adapter:
        recognise_reorder(cls, own[_REORDER])
        return _dispatch_adapter(recognise_dispatch(cls, own[_DISPATCH]), functions.beneath(own[_REORDER]))

    def combine() -> Adapter:
        fields = recognise_dispatch(cls, own[_DISPATCH])
        recognise_combine(cls, own[_COMBINE], fields)
        return _combine_adapter(fields)

    for name, recognise, meaning in (
        (_REORDER, reorder, "tokens sorted by expert, and their indices"),
        (_DISPATCH, dispatch, "tokens sorted by expert"),
        (_COMBINE, combine, "expert outputs, weighted in float32 and summed by token"),
    ):
        if isinstance(own[name], FunctionType):
            yield target(module, f"{cls.__name__}.{name}", recognise, meaning)


def _reorder_adapter(original: Any, site: Site) -> Callable[..., Any]:
    def reorder(self: Any, tokens: Tensor, scores: Tensor, ids: Tensor) -> Any:
        if (reason := unsupported_dispatch(tokens, scores, ids, self.top_k)) is not None:
            site.fallback(reason)
            return original(self, tokens, scores, ids)
        site.hit()
        routed, rows = op.permute(tokens, ids)
        copies = torch.argsort(ids.view(-1), stable=True)
        indices, sorted_scores = copies // self.top_k, scores.view(-1)[copies]
        remember(indices, rows, scores, sorted_scores)
        return routed, indices, sorted_scores

    return reorder


def _dispatch_adapter(fields: Fields, reorder: Any) -> Adapter:
    kind = sorted_metadata(fields)

    def adapter(original: Any, site: Site) -> Callable[..., Any]:
        def dispatch(self: Any, tokens: Tensor, scores: Tensor, ids: Tensor, counts: Tensor) -> Any:
            if is_compiling() or functions.beneath(getattr(self._local_reorder, "__func__", None)) is not reorder:
                return original(self, tokens, scores, ids, counts)  # sorts by another target, or in somebody's own way
            if (reason := unsupported_dispatch(tokens, scores, ids, self.top_k)) is not None:
                site.fallback(reason)
                return original(self, tokens, scores, ids, counts)
            site.hit()
            routed, rows = op.permute(tokens, ids)
            return routed, counts, with_order(kind, Order(rows, scores))

        return dispatch

    return adapter


def _combine_adapter(fields: Fields) -> Adapter:
    def adapter(original: Any, site: Site) -> Callable[..., Tensor]:
        def combine(self: Any, outputs: Tensor, metadata: Any, tokens: Tensor) -> Tensor:
            order = None if is_compiling() else fields.order_of(metadata)
            reason = unsupported_combine(outputs, order, tokens)
            if order is None or reason is not None:
                site.fallback(str(reason))
                result: Tensor = original(self, outputs, metadata, tokens)
                return result
            site.hit()
            return op.combine(outputs, order.rows, order.weights, rounded=True)

        return combine

    return adapter
