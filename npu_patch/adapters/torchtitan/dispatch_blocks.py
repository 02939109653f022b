"""Blocks of experts of torchtitan 0.2.2: they sort tokens and bring them back themselves.

Also its `_permute` and `_unpermute`, which go from rows by rank to rows by expert and pad each expert's for the grouped
products of GPUs.  Nothing on an NPU wants padding, so that the rows of one rank, sorted by expert already, stay where
they are; what makes the padded indices is a Triton kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ... import functions
from ...ops import permute as op
from ...registry import Target, Unrecognised
from ...sites import Site
from . import LIBRARY, dtensors
from .blocks_meaning import recognise_block, recognise_padding, reorderers
from .dispatch_calls import Adapter, target
from .dispatch_ranks import by_expert, by_rank
from .typecheck import TYPE_CHECKING_REASON, type_checking

_PERMUTE, _UNPERMUTE = "_permute", "_unpermute"
_ALIGNMENT, _EIGHT = "TOKEN_GROUP_ALIGN_SIZE_M", 8


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The blocks that a module defines, and its functions that pad."""
    for cls in list(vars(module).values()):
        if isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == module.__name__:
            forward = vars(cls).get("forward")
            if isinstance(forward, FunctionType) and "reorderer" in functions.beneath(forward).__code__.co_names:
                meaning = "tokens sorted by expert, weighted before or after, and summed back"
                yield target(module, f"{cls.__name__}.forward", _block(module, forward), meaning)
    own = [vars(module).get(name) for name in (_PERMUTE, _UNPERMUTE)]
    if all(isinstance(one, FunctionType) and one.__module__ == module.__name__ for one in own):

        def padding(adapter: Adapter) -> Callable[[], Adapter]:
            def recognise() -> Adapter:
                recognise_padding(*own)
                return adapter

            return recognise

        meaning = "rows of all ranks sorted by expert, padded for other devices"
        yield target(module, _PERMUTE, padding(_permute_adapter), meaning, rebind=(LIBRARY,))
        yield target(module, _UNPERMUTE, padding(_unpermute_adapter), "and back to their ranks", rebind=(LIBRARY,))


def _block(module: ModuleType, forward: FunctionType) -> Callable[[], Adapter]:
    def recognise() -> Adapter:
        recognise_block(forward)
        return _block_adapter(frozenset(reorderers(module)))

    return recognise


def _block_adapter(known: frozenset[FunctionType]) -> Adapter:
    def adapter(original: Any, site: Site) -> Callable[..., Tensor]:
        def forward(self: Any, x: Tensor) -> Tensor:
            if (reason := _block_reason(self, x, known)) is not None:
                site.fallback(reason)
                result: Tensor = original(self, x)
                return result
            site.hit()
            rows = x.view(-1, x.shape[-1])
            scores, ids, usage = self.router(rows, self.expert_bias)
            with torch.no_grad():
                self.tokens_per_expert.add_(usage)
            sorted_scores, _, counts = self.reorderer(scores, ids)
            routed, order = op.permute(rows, ids)
            if self.score_before_experts:
                routed = (routed.to(torch.float32) * sorted_scores.reshape(-1, 1)).to(x.dtype)
            outputs = dtensors.waited(self.experts(routed, counts))
            shared = self.shared_experts(rows) if self.shared_experts is not None else None
            if self.score_before_experts:
                out = op.combine(outputs, order, None, rounded=False, top_k=ids.shape[1])
            else:
                out = op.combine(outputs, order, scores, rounded=False).to(x.dtype)
            return (out if shared is None else shared + out).reshape(x.shape)

        return forward

    return adapter


def _block_reason(self: Any, x: Tensor, known: frozenset[FunctionType]) -> str | None:
    """Asked before the router is called, which counts what it is called for."""
    if is_compiling():
        return "a block of experts under torch.compile"
    if type_checking():
        return TYPE_CHECKING_REASON
    reorderer = self.reorderer
    if functions.beneath(type(reorderer).forward) not in known or "forward" in vars(reorderer):
        return "the router's choice is sorted in another way"
    if reorderer._forward_hooks or reorderer._forward_pre_hooks:
        return "the router's choice is split over ranks"
    rows = x.reshape(-1, x.shape[-1])
    return op.unsupported(rows, rows.new_empty((rows.shape[0], self.router.top_k), dtype=torch.int64))


def _permute_adapter(original: Any, site: Site) -> Callable[..., Any]:
    names = original.__globals__

    def permute(x: Any, counts: Tensor, ranks: int, experts: int) -> Any:
        wanted = names[_ALIGNMENT]
        sorted_rows: Any = f"groups of {wanted} rows are wanted"
        if wanted == _EIGHT:
            sorted_rows = (x, slice(x.shape[0])) if ranks == 1 else by_expert(x, counts, ranks)
        if isinstance(sorted_rows, str):
            site.fallback(sorted_rows)
            return original(x, counts, ranks, experts)
        site.hit()
        routed, indices = sorted_rows
        shape = torch.Size((x.shape[0] + 1, *x.shape[1:]))  # what the original's way back needs
        return shape, routed, indices, counts.view(ranks, -1).sum(0) if ranks > 1 else counts

    return permute


def _unpermute_adapter(original: Any, site: Site) -> Callable[..., Any]:
    def unpermute(out: Tensor, shape: Any, indices: Any) -> Any:
        back = out if isinstance(indices, slice) else by_rank(out, shape[0] - 1, indices)
        if isinstance(back, str):
            site.fallback(back)
            return original(out, shape, indices)
        site.hit()
        return back

    return unpermute
