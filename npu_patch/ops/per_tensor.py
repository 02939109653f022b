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

    Args:
        aliases: another tensor object over the same memory finds the value too, while the first one is alive and
            unchanged: with saved-tensor hooks, activation checkpointing hands such aliases to the forward that it runs
            again.
    """

    def __init__(self, aliases: bool = False) -> None:
        self._aliases = aliases
        self._entries: dict[int, _Entry[Value]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        self._entries.clear()

    def get(self, tensor: Tensor) -> Value | None:
        entry = self._entries.get(id(tensor))
        if entry is not None and entry.tensor() is tensor:
            if entry.version == tensor._version and entry.pointer == tensor.data_ptr():
                return entry.value
            return None
        return self._of_an_alias(tensor) if self._aliases else None

    def _of_an_alias(self, tensor: Tensor) -> Value | None:
        if tensor.is_inference():
            return None
        for entry in list(self._entries.values()):
            first = entry.tensor()
            if (
                first is not None
                and (first._version, first.data_ptr()) == (entry.version, entry.pointer)
                and _place(first) == _place(tensor)
            ):
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
