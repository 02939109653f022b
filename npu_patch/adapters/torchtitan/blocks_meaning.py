"""What the blocks of experts of torchtitan 0.2.2 compute, found by running them on the CPU with stand-ins for parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...discovery.bracket import NotRecognised, no_random_draws, plain, quiet, same
from .stand_in import standing_in

_EXPERTS, _SIZE = 4, 6
_SHAPES = ((2, 3, 2), (1, 5, 1), (3, 2, 3))  # batch, length, experts of each token
_RANKS = ([[9, 0, 1]], [[1, 2], [0, 11]], [[0, 0], [0, 0]], [[2], [8], [4]])  # rows by rank and expert
_PADS = "TOKEN_GROUP_ALIGN_SIZE_M"


class _Case:
    """Tokens, and what a router says of them."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        batch, length, self.top_k = shape
        generator = torch.Generator().manual_seed(sum(shape))
        self.x = torch.randn(batch, length, _SIZE, generator=generator).to(dtype).requires_grad_()
        self.scores = torch.rand(batch * length, self.top_k, generator=generator).requires_grad_()
        self.ids = torch.rand(batch * length, _EXPERTS, generator=generator).topk(self.top_k).indices
        self.copies = torch.argsort(self.ids.flatten(), stable=True)
        self.counts = torch.bincount(self.ids.flatten(), minlength=_EXPERTS)
        self.factors = torch.randn(self.copies.shape[0], _SIZE, generator=generator).to(dtype)

    def experts(self, rows: Tensor) -> Tensor:
        """Stands for them: a factor per row and channel."""
        return rows * self.factors

    def wanted(self, before: bool, shared: bool) -> Tensor:
        rows = self.x.flatten(0, 1)
        routed, weights = rows[self.copies // self.top_k], self.scores.flatten()[self.copies].unsqueeze(1)
        routed = (routed.float() * weights).to(rows.dtype) if before else routed
        slots = torch.zeros_like(routed).index_copy(0, self.copies, self.experts(routed)).unflatten(0, (-1, self.top_k))
        after = slots.float() * self.scores.unsqueeze(-1)
        out = slots.sum(1) if before else after.sum(1).to(rows.dtype)
        return (rows.cos() + out if shared else out).view_as(self.x)


def reorderers(module: ModuleType) -> Iterator[FunctionType]:
    """The forwards of a module's classes that sort router weights: `(scores, ids) -> (sorted, order, counts)`."""
    for cls in list(vars(module).values()):
        forward = vars(cls).get("forward") if isinstance(cls, type) and issubclass(cls, nn.Module) else None
        if not isinstance(forward, FunctionType) or cls.__module__ != module.__name__:
            continue
        if len(inspect.signature(forward).parameters) == 3 and _reorders(forward):
            yield plain(forward)


def _reorders(forward: FunctionType) -> bool:
    original = plain(forward)
    with quiet(), no_random_draws():
        for shape in _SHAPES:
            case = _Case(shape, torch.float32)
            instance = _Instance(num_experts=_EXPERTS, top_k=case.top_k)
            try:
                scores, copies, counts = original(instance, case.scores, case.ids.float())  # histc of integers: no CPU
            except Exception:  # another kind of module
                return False
            wanted = case.scores.flatten()[case.copies], case.copies, case.counts.float()
            if not all(torch.equal(a, b) for a, b in zip((scores, copies, counts), wanted, strict=True)):
                return False
    return True


class _Instance:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class _Part:
    """A sub-module: a function with attributes."""

    def __init__(self, function: Callable[..., Any], **values: Any) -> None:
        vars(self).update(values)
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


def recognise_block(forward: object) -> None:
    """Check `f(self, x)` of a block with `router`, `reorderer`, `experts`, `shared_experts`.

    Raises:
        NotRecognised: it computes something else, or needs other attributes.
    """
    original = plain(forward)
    with quiet(), no_random_draws():
        for shape in _SHAPES:
            for dtype in (torch.float32, torch.bfloat16):
                for before, shared in ((True, True), (False, False), (True, False), (False, True)):
                    _check_block(original, _Case(shape, dtype), before, shared)


def _check_block(original: FunctionType, case: _Case, before: bool, shared: bool) -> None:
    seen: list[Any] = []
    bias, usage = torch.zeros(_EXPERTS), torch.ones(_EXPERTS)

    def route(rows: Tensor, given: Any) -> tuple[Tensor, Tensor, Tensor]:
        seen.append(given)
        return case.scores, case.ids, case.counts

    def reorder(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if scores is not case.scores or ids is not case.ids:
            raise NotRecognised("hands its reorderer something else than the router's choice")
        return scores.flatten()[case.copies], case.copies, case.counts

    def experts(rows: Tensor, counts: Tensor) -> Tensor:
        seen.append(counts)
        return case.experts(rows)

    block = _Instance(
        router=_Part(route, top_k=case.top_k),
        reorderer=_Part(reorder),
        experts=_Part(experts),
        shared_experts=_Part(torch.cos) if shared else None,
        score_before_experts=before,
        expert_bias=bias,
        tokens_per_expert=usage,
    )
    result, wanted = original(block, case.x), case.wanted(before, shared)
    if len(seen) != 2 or seen[0] is not bias or seen[1] is not case.counts:
        raise NotRecognised("hands its router or its experts something else")
    if not torch.equal(usage, 1.0 + case.counts):
        raise NotRecognised("does not add up the tokens of each expert")
    compare(result, wanted, [case.x, case.scores])


def recognise_padding(permute: object, unpermute: object) -> None:
    """Check `permute(rows, counts, ranks, experts) -> (shape, padded rows, indices, padded counts)` and its inverse.

    The rows of each expert are padded with zeros to a multiple of eight; there is one row more to come back to.

    Raises:
        NotRecognised: they compute something else.
    """
    forth, back = plain(permute), plain(unpermute)
    generate = forth.__globals__.get("generate_permute_indices")
    clone = None if generate is None else standing_in(forth, generate, lambda *given: generate(*given, use_cpu=True))
    if clone is None or clone.__globals__.get(_PADS) != 8:
        raise NotRecognised("does not pad to multiples of eight")
    with quiet(), no_random_draws():
        for table in _RANKS:
            _check_padding(clone, back, torch.tensor(table))


def _check_padding(permute: FunctionType, unpermute: FunctionType, counts: Tensor) -> None:
    ranks, experts = counts.shape
    rows = torch.randn(int(counts.sum()), _SIZE, generator=torch.Generator().manual_seed(3)).requires_grad_()
    source = torch.argsort(torch.arange(experts).repeat(ranks).repeat_interleave(counts.flatten()), stable=True)
    shape, routed, indices, sizes = permute(rows, counts.flatten(), ranks, experts)
    totals = counts.sum(0)
    padded = (totals.clamp_min(1) + 7) // 8 * 8
    if tuple(shape) != (rows.shape[0] + 1, _SIZE) or not torch.equal(sizes.long(), padded):
        raise NotRecognised("pads in another way")
    starts = (padded.cumsum(0) - padded).tolist()
    parts = [routed[start : start + int(n)] for start, n in zip(starts, totals, strict=True)]
    rest = [routed[s + int(n) : s + int(p)] for s, n, p in zip(starts, totals, padded, strict=True)]
    if any(bool(part.any()) for part in rest):
        raise NotRecognised("pads with something else than zeros")
    compare(torch.cat(parts), rows[source], [rows])
    compare(unpermute(routed, shape, indices), rows, [rows])


def compare(value: Any, wanted: Tensor, leaves: list[Tensor]) -> None:
    """Check a result and its gradients.

    Raises:
        NotRecognised: they differ.
    """
    if not isinstance(value, Tensor) or not same(value, wanted):
        raise NotRecognised("computes something else")
    direction = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(5)).to(wanted.dtype)
    found = [torch.autograd.grad(y, leaves, direction, allow_unused=True, retain_graph=True) for y in (value, wanted)]
    for ours, theirs in zip(*found, strict=True):
        if (ours is None) != (theirs is None) or (ours is not None and not same(ours, theirs, loose=True)):
            raise NotRecognised("has other gradients")
