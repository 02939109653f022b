"""The order of sorted tokens, on its way from the place where they are sorted to the one where they go back.

The fused operators work with the inverse of the permutation that torchtitan keeps in its metadata.  It travels with
that metadata: in an object of a subclass, or beside the very tensor that it belongs to.  Neither outlives a layer's
forward, so that several microbatches in flight and forwards that run again each have their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...ops.per_tensor import PerTensor

_ORDER = "_npu_patch_order"


class Order:
    """How copies of tokens were sorted.

    Args:
        rows: (tokens * top_k,) int32, the row of each copy.
        weights: (tokens, top_k), if they have any.
        beside: the same weights, sorted, that the metadata must hold, too.
    """

    __slots__ = ("_versions", "beside", "rows", "weights")

    def __init__(self, rows: Tensor, weights: Tensor | None = None, beside: Tensor | None = None) -> None:
        self.rows, self.weights, self.beside = rows, weights, beside
        self._versions = self._now()

    def _now(self) -> tuple[int, ...]:
        return tuple(x._version for x in (self.weights, self.beside) if x is not None and not x.is_inference())

    def unchanged(self) -> bool:
        """Whether the weights are those of the dispatch; torchtitan's own copy of them would be."""
        return self._now() == self._versions


_orders: PerTensor[Order] = PerTensor()


def remember(indices: Tensor, rows: Tensor, weights: Tensor | None = None, beside: Tensor | None = None) -> None:
    """Put an `Order` beside the indices that say the same in torchtitan's way."""
    if not is_compiling() and not indices.is_inference():
        _orders.put(indices, Order(rows, weights, beside))


def recall(indices: Any, beside: Any = None) -> Order | None:
    """The order of these very indices, unless they or the weights beside them are others now."""
    if not isinstance(indices, Tensor) or is_compiling() or indices.is_inference():
        return None
    order = _orders.get(indices)
    return order if order is not None and order.beside is beside and order.unchanged() else None


@dataclass(frozen=True)
class Fields:
    """The metadata of a dispatch: its class, and where it holds the tokens' indices and the weights, both sorted."""

    kind: type
    indices: str
    weights: str

    def order_of(self, metadata: Any) -> Order | None:
        """The order that some metadata came with, if it did.

        Raises:
            RuntimeError: the router's weights were changed in place since, and nobody has a copy.
        """
        order: Order | None = getattr(metadata, "__dict__", {}).get(_ORDER)
        if order is None:
            return recall(getattr(metadata, self.indices, None), getattr(metadata, self.weights, None))
        if not order.unchanged():
            raise RuntimeError("the router's weights were changed in place between dispatch and combine")
        return order


def sorted_metadata(fields: Fields) -> type:
    """A class of metadata that are the fields' own, but for the order; the fields are filled in when they are read."""

    class SortedMetadata(fields.kind):  # type: ignore[misc, name-defined]
        def __getattr__(self, name: str) -> Any:
            if name not in (fields.indices, fields.weights) or _ORDER not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            order: Order = self.__dict__.pop(_ORDER)
            assert order.weights is not None
            copies = torch.argsort(order.rows)
            indices, weights = copies // order.weights.shape[1], order.weights.reshape(-1)[copies]
            remember(indices, order.rows, order.weights, weights)  # whoever read them may change them
            object.__setattr__(self, fields.indices, indices)
            object.__setattr__(self, fields.weights, weights)
            return self.__dict__[name]

    SortedMetadata.__name__ = SortedMetadata.__qualname__ = fields.kind.__name__
    return SortedMetadata


def with_order(kind: type, order: Order) -> Any:
    """Metadata of a class that `sorted_metadata` made."""
    metadata: Any = object.__new__(kind)
    metadata.__dict__[_ORDER] = order
    return metadata
