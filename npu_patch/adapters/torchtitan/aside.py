"""Work on the side of a forward: made once, remembered per tensor, unseen by autograd and activation checkpointing."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch
import torch.utils.checkpoint as checkpoint
from torch import Tensor
from torch.utils import _python_dispatch as dispatch

Value = TypeVar("Value")

_CHECKPOINT_MODES: tuple[type, ...] = tuple(
    mode
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if isinstance(mode := getattr(checkpoint, name, None), type)
)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Inside: no gradient, no inference tensors, and nothing that selective activation checkpointing takes note of.

    Selective checkpointing counts the operators of the forward and expects the same ones when it runs the forward
    again.  What is remembered from one layer to the next is not repeated, and what was forgotten in between would be.
    """
    with torch.inference_mode(False), torch.no_grad(), _without_checkpoint_modes():
        yield


@contextlib.contextmanager
def _without_checkpoint_modes() -> Iterator[None]:
    stack = dispatch._get_current_dispatch_mode_stack()
    # Modes with a key of their own (fake tensors, tracing) are not ours to reorder; nothing is made under them anyway.
    if not any(isinstance(mode, _CHECKPOINT_MODES) for mode in stack) or any(_keyed(mode) for mode in stack):
        yield
        return
    others = [mode for mode in stack if not isinstance(mode, _CHECKPOINT_MODES)]
    _replace(len(stack), others)
    try:
        yield
    finally:
        _replace(len(others), stack)


def _keyed(mode: Any) -> bool:
    return getattr(mode, "_mode_key", None) is not None or getattr(mode, "_dispatch_key", None) is not None


def _replace(count: int, modes: list[Any]) -> None:
    """Another stack of modes, without entering or leaving any of them."""
    for _ in range(count):
        dispatch._pop_mode()
    for mode in modes:
        dispatch._push_mode(mode)


class PerTensor(Generic[Value]):
    """Remembers a value for a tensor as long as the tensor object lives and its content is the same.

    The content is the same while storage and version counter are; writes that PyTorch itself hides from the version
    counter (through `.data`) go unseen here as they do in autograd.  Inference tensors have no version counter: nothing
    is remembered for them.

    Another tensor object over the same memory finds the value too while the first one is alive and unchanged: with
    saved-tensor hooks, activation checkpointing hands such aliases to the forward that it runs again.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry[Value]] = {}

    def get(self, tensor: Tensor) -> Value | None:
        if tensor.is_inference():
            return None
        entry = self._entries.get(id(tensor))
        if entry is not None and entry.tensor() is tensor:
            return entry.value if entry.unchanged(tensor) else None
        for entry in list(self._entries.values()):
            first = entry.tensor()
            if first is not None and entry.unchanged(first) and _place(first) == _place(tensor):
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

    def unchanged(self, tensor: Tensor) -> bool:
        return tensor._version == self.version and tensor.data_ptr() == self.pointer


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Where and how the tensor lies in memory."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
