"""Things that are made once per tensor and shared by the layers of a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .guards import keep

Value = TypeVar("Value")


class PerTensor(Generic[Value]):
    """Remembers a value for a tensor as long as the tensor object lives and its content is the same.

    The content is the same while storage and version counter are; writes that PyTorch itself hides from the version
    counter (through `.data`) go unseen here as they do in autograd.  Nothing is remembered for inference tensors, which
    have no version counter, and for subclasses.  Ask `keep` before a value is put, and do neither while compiling.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry[Value]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        self._entries.clear()

    def get(self, tensor: Tensor) -> Value | None:
        """The value that was put for this tensor object, if its content is still the same."""
        entry = self._entries.get(id(tensor))
        if (
            entry is not None
            and entry.tensor() is tensor
            and entry.version == tensor._version
            and entry.pointer == tensor.data_ptr()
        ):
            return entry.value
        return None

    def find(self, tensor: Tensor) -> Value | None:
        """The same, also for another tensor object over the memory of one that is alive and unchanged.

        With saved-tensor hooks, activation checkpointing hands such aliases to the forward that it runs again.
        """
        if tensor.is_inference():
            return None
        entry = self._entries.get(id(tensor))
        if entry is not None and entry.tensor() is tensor:
            return self.get(tensor)
        for entry in list(self._entries.values()):
            first = entry.tensor()
            if first is not None and self.get(first) is entry.value and _place(first) == _place(tensor):
                return entry.value
        return None

    def put(self, tensor: Tensor, value: Value) -> Value:
        if type(tensor) is Tensor and not tensor.is_inference():
            key, entries = id(tensor), self._entries
            # The tensor's death removes the entry before its id can be given to another object; dict operations are
            # atomic.
            reference = weakref.ref(tensor, lambda _: entries.pop(key, None))
            entries[key] = _Entry(reference, tensor._version, tensor.data_ptr(), value)
        return value


class _Entry(Generic[Value]):
    __slots__ = ("pointer", "tensor", "value", "version")

    def __init__(self, tensor: weakref.ref[Tensor], version: int, pointer: int, value: Value) -> None:
        self.tensor, self.version, self.pointer, self.value = tensor, version, pointer, value


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Where and how the tensor lies in memory."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


class Derived(Generic[Value]):
    """`derived(tensor)` is `build(tensor)`, made once per tensor.

    While compiling or under a torch.func transform, for tensors that need a gradient, and for fake and inference
    tensors it is made every time.

    Args:
        build: makes the value, without a gradient where it is remembered.
        tensor_of: the tensor in the value, which says whether it may be kept; by default the value itself.
    """

    def __init__(self, build: Callable[[Tensor], Value], tensor_of: Callable[[Value], Any] | None = None) -> None:
        self._build = build
        self._tensor_of = tensor_of
        self.known: PerTensor[Value] = PerTensor()

    def __call__(self, tensor: Tensor) -> Value:
        if is_compiling() or tensor.requires_grad:
            return self._build(tensor)
        value = self.known.get(tensor)
        if value is not None:
            return value
        if tensor.is_inference():
            return self._build(tensor)
        with torch.inference_mode(False), torch.no_grad():
            value = self._build(tensor)
        made: Any = value if self._tensor_of is None else self._tensor_of(value)
        if keep(made):
            self.known.put(tensor, value)
        return value
