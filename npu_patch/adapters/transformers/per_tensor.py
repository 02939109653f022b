"""Things that are computed once per tensor and shared by the layers of a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...ops.guards import keep


class PerTensor:
    """Remembers what `build(tensor)` gave, as long as the tensor object lives and is not written to.

    While compiling or under a torch.func transform, for tensors that need a gradient, and for fake and inference
    tensors nothing is remembered.

    Args:
        build: makes the derived tensor.
    """

    def __init__(self, build: Callable[[Tensor], Tensor]) -> None:
        self._build = build
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        if is_compiling() or tensor.requires_grad or tensor.is_inference():
            return self._build(tensor)
        key, version = id(tensor), tensor._version
        entry = self._known.get(key)
        if entry is not None and entry[1] == version and entry[0]() is tensor:
            return entry[2]
        with torch.inference_mode(False), torch.no_grad():
            derived = self._build(tensor)
        if keep(derived) and type(tensor) is Tensor:
            # The tensor's death removes the entry before its id is given to another object.
            self._known[key] = (weakref.ref(tensor, lambda _: self._known.pop(key, None)), version, derived)
        return derived
