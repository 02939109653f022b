"""Things that are made once per tensor and shared by the layers of a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .guards import capture_state, keep

Value = TypeVar("Value")


class PerTensor(Generic[Value]):
    """Remembers a value for a tensor as long as the tensor object lives and its content is the same.

    The content is the same while address and version counter are: after `x.data = y` nothing old is found.  Writes in
    place that PyTorch hides from the version counter, as `x.data.mul_(2)` does, go unseen here as they do in autograd:
    what is remembered is then stale.  Nothing is remembered for inference tensors, which have no version counter, and
    for subclasses.  Ask `keep` before a value is put, and do neither while compiling.

    Args:
        anew: while a device graph is captured, `get` finds only what was put meanwhile.  A graph that used an older
            value would not see what its replays find in the tensor.
    """

    def __init__(self, anew: bool = False) -> None:
        self._anew = anew
        # (the tensor, its version, its address, the value, what says that it must not be used just now)
        self._entries: dict[int, tuple[weakref.ref[Tensor], int, int, Value, Callable[[], bool] | None]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        self._entries.clear()

    def get(self, tensor: Tensor) -> Value | None:
        """The value that was put for this tensor object, if its content is still the same."""
        entry = self._entries.get(id(tensor))
        if entry is None:
            return None
        reference, version, pointer, value, barred = entry
        if reference() is tensor and version == tensor._version and pointer == tensor.data_ptr():
            return value if barred is None or not barred() else None
        return None

    def find(self, tensor: Tensor) -> Value | None:
        """The same, also for another tensor object over the memory of one that is alive and unchanged.

        With saved-tensor hooks, activation checkpointing hands such aliases to the forward that it runs again.
        """
        if tensor.is_inference():
            return None
        entry = self._entries.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return self.get(tensor)
        for reference, _, _, value, _ in list(self._entries.values()):
            first = reference()
            if first is not None and self.get(first) is value and _place(first) == _place(tensor):
                return value
        return None

    def put(self, tensor: Tensor, value: Value) -> Value:
        if type(tensor) is Tensor and not tensor.is_inference():
            key, entries = id(tensor), self._entries
            # The tensor's death removes the entry before its id can be given to another object; dict operations are
            # atomic.
            reference = weakref.ref(tensor, lambda _: entries.pop(key, None))
            barred = capture_state() if self._anew and not tensor.is_cpu else None
            if barred is not None and barred():
                barred = None
            entries[key] = (reference, tensor._version, tensor.data_ptr(), value, barred)
        return value


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Where and how the tensor lies in memory."""
    lazy = tensor.is_conj(), tensor.is_neg()  # views that conjugate or negate what lies there
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, *lazy)


class Derived(PerTensor[Value]):
    """`derived(tensor)` is `build(tensor)`, made once per tensor.

    While compiling or under a torch.func transform, while a device graph is captured, for tensors that need a gradient,
    and for fake and inference tensors it is made every time.

    Args:
        build: makes the value, without a gradient where it is remembered.
        tensor_of: the tensor in the value, which says whether it may be kept; by default the value itself.
    """

    def __init__(self, build: Callable[[Tensor], Value], tensor_of: Callable[[Value], Any] | None = None) -> None:
        super().__init__(anew=True)
        self._build = build
        self._tensor_of = tensor_of

    def __call__(self, tensor: Tensor) -> Value:
        if tensor.requires_grad or is_compiling():
            return self._build(tensor)
        entry = self._entries.get(id(tensor))
        if entry is not None:  # `get`, without its frame
            reference, version, pointer, value, barred = entry
            if (
                reference() is tensor
                and version == tensor._version
                and pointer == tensor.data_ptr()
                and (barred is None or not barred())
            ):
                return value
        elif tensor.is_inference():
            return self._build(tensor)
        with torch.inference_mode(False), torch.no_grad():
            value = self._build(tensor)
        made: Any = value if self._tensor_of is None else self._tensor_of(value)
        return self.put(tensor, value) if keep(made) else value


class DerivedPair(PerTensor[tuple[weakref.ref[Tensor], int, int, Value]]):
    """`derived(first, second)` is `build(first, second)`, made once per pair of tensors, where `Derived` would.

    Args:
        build: makes the value, without a gradient where it is remembered.
        tensors_of: the tensors in the value, which say whether it may be kept.
    """

    def __init__(self, build: Callable[[Tensor, Tensor], Value], tensors_of: Callable[[Value], tuple[Tensor, ...]]):
        super().__init__(anew=True)
        self._build = build
        self._tensors_of = tensors_of

    def kept(self, first: Tensor, second: Tensor) -> Value | None:
        """What is remembered of two tensors, neither of which gets a gradient here; not while compiling."""
        entry = self._entries.get(id(second))
        if entry is not None:
            reference, version, pointer, (other, other_version, other_pointer, value), barred = entry
            if (
                reference() is second
                and other() is first
                and version == second._version
                and other_version == first._version
                and pointer == second.data_ptr()
                and other_pointer == first.data_ptr()
                and (barred is None or not barred())
            ):
                return value
        return None

    def __call__(self, first: Tensor, second: Tensor) -> Value:
        if first.requires_grad or second.requires_grad or is_compiling():
            return self._build(first, second)
        known = self.kept(first, second)
        if known is not None:
            return known
        if type(first) is not Tensor or first.is_inference() or second.is_inference():
            return self._build(first, second)
        with torch.inference_mode(False), torch.no_grad():
            value = self._build(first, second)
        if all(keep(tensor) for tensor in self._tensors_of(value)):
            self.put(second, (weakref.ref(first), first._version, first.data_ptr(), value))
        return value
