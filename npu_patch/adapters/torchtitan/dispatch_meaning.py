"""What torchtitan's token dispatchers compute, found by running them on the CPU without a process group."""

from __future__ import annotations

import dataclasses
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...discovery.bracket import NotRecognised, no_random_draws, plain, quiet
from .blocks_meaning import compare
from .dispatch_order import Fields
from .stand_in import standing_in

_EXPERTS, _SIZE = 5, 6
_SHAPES = ((7, 2), (4, 1), (3, 4))  # tokens, experts of each
_DTYPES = (torch.float32, torch.bfloat16)
_RANKS = ([[2, 0, 1]], [[1, 2], [0, 3]], [[0, 0], [0, 0]], [[2], [1], [4]])  # rows by rank and expert


class _Given:
    """Tokens, router weights and expert ids, with what sorting them by expert gives."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(sum(shape))
        tokens, self.top_k = shape
        self.x = torch.randn(tokens, _SIZE, generator=generator).to(dtype).requires_grad_()
        self.scores = torch.rand(shape, generator=generator).requires_grad_()
        self.ids = torch.rand(tokens, _EXPERTS, generator=generator).topk(self.top_k).indices
        self.counts = torch.bincount(self.ids.flatten(), minlength=_EXPERTS)
        order = torch.argsort(self.ids.flatten(), stable=True)
        self.indices, self.routed = order // self.top_k, self.x[order // self.top_k]
        self.sorted_scores = self.scores.flatten()[order]
        self.outputs = torch.randn(self.ids.numel(), _SIZE, generator=generator).to(dtype).requires_grad_()

    def instance(self, cls: type) -> Any:
        made: Any = object.__new__(cls)
        made.num_experts, made.top_k = _EXPERTS, self.top_k
        return made

    def combined(self) -> Tensor:
        """Each row times its weight in float32, rounded, and summed by token in the type of the rows."""
        weighted = (self.outputs.float() * self.sorted_scores.unsqueeze(1)).to(self.outputs.dtype)
        return torch.zeros_like(self.x).index_add(0, self.indices, weighted)


def _cases() -> list[_Given]:
    return [_Given(shape, dtype) for shape in _SHAPES for dtype in _DTYPES]


def recognise_reorder(cls: type, method: object) -> None:
    """Check `f(self, tokens, scores, ids) -> (sorted tokens, their indices, sorted scores)`.

    Raises:
        NotRecognised: it computes something else.
    """
    original = plain(method)
    with quiet(), no_random_draws():
        for given in _cases():
            result = original(given.instance(cls), given.x, given.scores, given.ids)
            if not isinstance(result, tuple) or len(result) != 3 or not _equal(result[1], given.indices):
                raise NotRecognised("does not sort tokens by expert")
            compare(result[0], given.routed, [given.x])
            compare(result[2], given.sorted_scores, [given.scores])


def recognise_dispatch(cls: type, method: object) -> Fields:
    """Check `f(self, tokens, scores, ids, counts) -> (sorted tokens, the same counts, metadata)`.

    Raises:
        NotRecognised: it computes something else.
    """
    original, found = plain(method), set()
    with quiet(), no_random_draws():
        for given in _cases():
            routed, counts, metadata = original(given.instance(cls), given.x, given.scores, given.ids, given.counts)
            if counts is not given.counts:
                raise NotRecognised("counts tokens anew")
            compare(routed, given.routed, [given.x])
            found.add(_fields(metadata, given))
    if len(found) != 1:
        raise NotRecognised("its metadata are of several kinds")
    return found.pop()


def _fields(metadata: Any, given: _Given) -> Fields:
    kind = type(metadata)
    if not dataclasses.is_dataclass(kind) or not hasattr(metadata, "__dict__"):
        raise NotRecognised("its metadata are no dataclass")
    values = {field.name: getattr(metadata, field.name) for field in dataclasses.fields(kind)}
    indices = [name for name, value in values.items() if _equal(value, given.indices)]
    weights = [name for name, value in values.items() if _equal(value, given.sorted_scores)]
    if len(values) != 2 or len(indices) != 1 or len(weights) != 1:
        raise NotRecognised("its metadata hold something else than indices and weights")
    compare(values[weights[0]], given.sorted_scores, [given.scores])
    return Fields(kind, indices[0], weights[0])


def recognise_combine(cls: type, method: object, fields: Fields) -> None:
    """Check `f(self, rows, metadata, tokens)`: the weighted sum by token.

    Raises:
        NotRecognised: it computes something else.
    """
    original = plain(method)
    with quiet(), no_random_draws():
        for given in _cases():
            metadata = _metadata(fields.kind, fields, given)
            result = original(given.instance(cls), given.outputs, metadata, given.x.detach())
            compare(result, given.combined(), [given.outputs, given.scores])


def _metadata(kind: type, fields: Fields, given: _Given, **more: Any) -> Any:
    return kind(**{fields.indices: given.indices, fields.weights: given.sorted_scores}, **more)


# ---- between ranks ---------------------------------------------------------------------------------------------------


def recognise_exchange(cls: type, permute: object, unpermute: object) -> None:
    """Check the way from rows by rank to rows by expert, and back.

    `permute(self, rows, counts) -> (their shape, rows by expert, indices, rows of each expert)` and
    `unpermute(self, rows by expert, shape, indices)`.

    Raises:
        NotRecognised: they compute something else.
    """
    forth, back = plain(permute), plain(unpermute)
    with quiet(), no_random_draws():
        for table in _RANKS:
            counts = torch.tensor(table)
            rows, wanted = _by_rank(counts)
            instance: Any = object.__new__(cls)
            instance.ep_mesh = _Mesh(len(table))
            shape, routed, indices, totals = forth(instance, rows, counts.flatten())
            if tuple(shape) != tuple(rows.shape) or not _equal(indices, wanted) or not _equal(totals, counts.sum(0)):
                raise NotRecognised("does not sort the rows of all ranks by expert")
            compare(routed, rows[wanted], [rows])
            compare(back(instance, routed, shape, indices), rows, [rows])


def _by_rank(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of each rank, its experts one after the other; and where the rows by expert come from."""
    ranks, experts = counts.shape
    rows = torch.randn(int(counts.sum()), _SIZE, generator=torch.Generator().manual_seed(3)).requires_grad_()
    expert = torch.arange(experts).repeat(ranks).repeat_interleave(counts.flatten())
    return rows, torch.argsort(expert, stable=True)


class _Mesh(SimpleNamespace):
    """A mesh of so many ranks, without a process group."""

    def __init__(self, ranks: int) -> None:
        super().__init__(size=lambda: ranks, get_group=lambda: None)


def recognise_ranks_combine(cls: type, method: object, fields: Fields, kind: type) -> None:
    """Check the combine between ranks: `_unpermute`, `_combine_token_exchange`, and then what one rank does.

    Raises:
        NotRecognised: it computes something else, or in another order.
    """
    original = plain(method)
    backend = original.__globals__.get("get_spmd_backend")
    clone = None if backend is None else standing_in(original, backend, lambda: "partial_dtensor")
    if clone is None:
        raise NotRecognised("does not ask for the SPMD backend")
    with quiet(), no_random_draws():
        for given in _cases():
            _check_ranks_combine(clone, cls, fields, kind, given)


def _check_ranks_combine(original: FunctionType, cls: type, fields: Fields, kind: type, given: _Given) -> None:
    mixed = torch.argsort(torch.arange(given.outputs.shape[0]) % 3)
    rest = {"input_shape": given.outputs.shape, "permuted_indices": mixed, "input_splits": [1], "output_splits": [2]}
    calls: list[Any] = []

    def exchange(rows: Tensor, group: Any, inputs: Any, outputs: Any) -> Tensor:
        calls.append((group, inputs, outputs))
        return rows

    instance = given.instance(cls)
    instance.ep_mesh = _Mesh(2)
    instance._combine_token_exchange = exchange
    metadata = _metadata(kind, fields, given, **rest)
    result = original(instance, given.outputs[mixed], metadata, given.x.detach())
    if calls != [(None, [1], [2])]:
        raise NotRecognised("does not exchange rows once")
    compare(result, given.combined(), [given.outputs, given.scores])


# ---- comparing -------------------------------------------------------------------------------------------------------


def _equal(value: Any, wanted: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dtype is wanted.dtype and torch.equal(value, wanted)
