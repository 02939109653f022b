"""Calls on DTensors, computed on the local tensors of every rank where that gives the same result.

torchtitan's tensor parallelism hands norms, rotary embeddings and feed-forwards DTensors.  What these compute goes row
by row, so that every rank can run the plain operator on its own rows, without a word to the others; gradients of what
is the same on all ranks are sums over the ranks where the rows are spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ...ops.guards import transforming

COMPILING = "a DTensor under torch.compile"
_MIXED = "DTensor beside a plain tensor"
_MESHES = "DTensors on different meshes"


def is_distributed(x: object) -> bool:
    """Whether x is a DTensor."""
    return type(x) is DTensor


class Spread:
    """How the rows of a DTensor lie on its mesh."""

    def __init__(self, x: Any) -> None:
        self.mesh, self.placements = x.device_mesh, x.placements
        self.shape: torch.Size = x.shape

    def wrap(self, y: Tensor, shape: torch.Size | None = None) -> Tensor:
        """The DTensor whose local tensor is y; it has the placements and, if no other is given, the shape of the one
        that was taken apart."""
        shape = self.shape if shape is None else shape
        strides = [1]
        for size in reversed(shape[1:]):
            strides.append(strides[-1] * size)
        return DTensor.from_local(
            y, self.mesh, self.placements, run_check=False, shape=shape, stride=tuple(reversed(strides))
        )


def spread(x: Any, whole: Sequence[int], beside: Sequence[Any] = ()) -> str | Spread:
    """How x is spread, or why its rows cannot be computed by themselves.

    Args:
        x: a DTensor.
        whole: dimensions that no rank may have a part of only.
        beside: what else takes part; of every other tensor each rank must have all.
    """
    if is_compiling():
        return COMPILING
    if transforming():
        return "a torch.func transform of a DTensor"
    for placement in x.placements:
        if type(placement) is Shard:
            if placement.dim in whole or placement.dim - x.dim() in whole:
                return "a DTensor whose rows are spread"
        elif type(placement) is not Replicate:
            return f"a DTensor that is {type(placement).__name__}"
    for other in beside:
        if not is_distributed(other):
            return _MIXED
        if other.device_mesh != x.device_mesh:
            return _MESHES
        if any(type(placement) is not Replicate for placement in other.placements):
            return "a parameter or table that is spread"
    return Spread(x)


def local(x: Any, summed: Sequence[Placement] | None = None) -> Tensor:
    """The local tensor of a DTensor, waited for, with a gradient.

    Args:
        x: the DTensor.
        summed: for one that is the same on every rank: how the rows are spread that it meets; its gradient is a sum
            over the ranks that have different rows.
    """
    placements = None if summed is None else [Partial() if type(p) is Shard else Replicate() for p in summed]
    return waited(x.to_local(grad_placements=placements))


def waited(x: Any) -> Tensor:
    """The tensor behind a collective that may still run, with its gradient; any other tensor as it is."""
    tensor: Tensor = _Waited.apply(x) if type(x) is functional.AsyncCollectiveTensor else x
    return tensor


class _Waited(torch.autograd.Function):
    """The tensor behind a collective that may still run."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        tensor: Tensor = x.trigger_wait()
        return tensor.view(tensor.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def heads(tensors: Sequence[Any], table: Any) -> str | tuple[list[Spread], tuple[Tensor, ...], Tensor]:
    """Query and key by the heads that this rank has, or why not.

    Args:
        tensors: DTensors (B, L, N, D) or (T, N, D); a rank may have a part of the heads, and nothing else in parts.
        table: of every rank, plain or as a DTensor.

    Returns:
        How each lies, the local tensors, and the local table, without a gradient.
    """
    places = []
    for x in tensors:
        if not is_distributed(x):
            return _MIXED
        whole = [i for i in range(x.dim()) if i != x.dim() - 2]
        place = spread(x, whole, (table,) if is_distributed(table) else ())
        if isinstance(place, str):
            return place
        places.append(place)
    if any(place.mesh != places[0].mesh for place in places):
        return _MESHES
    if is_distributed(table):
        if table.requires_grad:
            return "gradient to the rotary cache"
        with torch.no_grad():  # the same tensor object every time
            table = table.to_local()
    return places, tuple(local(x) for x in tensors), table


def attention(query: Any, key: Any, value: Any, heads: int) -> str | tuple[Spread, tuple[Tensor, ...]]:
    """Query, key and value by the heads that this rank has, or why not.

    Args:
        query, key, value: DTensors that are spread alike; a rank may have a part of the heads, as many as every other
            one, and nothing else in parts.
        heads: which dimension they are.
    """
    tensors = (query, key, value)
    places = []
    for x in tensors:
        if not is_distributed(x):
            return _MIXED
        place = spread(x, whole=[i for i in range(x.dim()) if i != heads])
        if isinstance(place, str):
            return place
        places.append(place)
    if any(place.mesh != places[0].mesh for place in places):
        return _MESHES
    if any(place.placements != places[0].placements for place in places):
        return "query, key and value are spread differently"
    parts = 1
    for size, placement in zip(places[0].mesh.shape, places[0].placements, strict=True):
        parts *= size if type(placement) is Shard else 1
    if any(x.shape[heads] % parts for x in tensors):
        return "ranks with different numbers of heads"
    return places[0], tuple(local(x) for x in tensors)
