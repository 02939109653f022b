"""What the host knows of a positions tensor, and things remembered per tensor.

torchtitan hands one positions tensor to the mask builder and to every rotary embedding of a step.  One copy to the
host answers all of their questions: the bounds check of the rotary caches, which rows of the tables are needed, and
where the packed documents begin.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ...ops._guards import transforming

Value = TypeVar("Value")


class PerTensor(Generic[Value]):
    """Remembers a value for a tensor object as long as the object lives and its content is the same.

    The content is the same while storage and version counter are; writes that PyTorch itself hides from the version
    counter (through `.data`) go unseen here as they do in autograd.  Inference tensors have no version counter: nothing
    is remembered.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], tuple[int, int], Value]] = {}

    def get(self, tensor: Tensor) -> Value | None:
        entry = self._entries.get(id(tensor))
        if entry is None or entry[0]() is not tensor or entry[1] != _state(tensor):
            return None
        return entry[2]

    def put(self, tensor: Tensor, value: Value) -> Value:
        if type(tensor) is Tensor and not tensor.is_inference():
            key = id(tensor)
            # The tensor's death removes the entry before its id can be given to another object; dict operations are
            # atomic.
            reference = weakref.ref(tensor, lambda _: self._entries.pop(key, None))
            self._entries[key] = (reference, _state(tensor), value)
        return value


def _state(tensor: Tensor) -> tuple[int, int]:
    return (tensor._version, tensor.data_ptr())


@dataclass(eq=False)
class Facts:
    """A positions tensor as seen from the host.

    Args:
        host: (B, L) on the CPU.
        low, high: smallest and largest position.
        pattern: "range" (every row is 0, 1, 2, …), "shared" (the rows are equal) or "rows".
        ready: what others made for this tensor and share between the layers of a step.
    """

    host: Tensor
    low: int
    high: int
    pattern: str
    ready: dict[Any, Any] = field(default_factory=dict)


_facts: PerTensor[Facts] = PerTensor()


def facts(positions: Tensor) -> Facts | None:
    """Facts about positions of shape (B, L); None when they cannot be had (a subclass, a trace, an unexpected form).

    Copies the positions to the host the first time that it sees them, which waits for the device once.
    """
    if type(positions) is not Tensor or positions.dim() != 2 or positions.numel() == 0 or transforming():
        return None
    if positions.dtype not in (torch.int64, torch.int32):
        return None
    known = _facts.get(positions) if not positions.is_inference() else None
    if known is not None:
        return known
    with torch.inference_mode(False), torch.no_grad():
        host = positions.detach().to("cpu", copy=True)
        low, high = host.aminmax()
        first = host[:1]
        if not bool((host == first).all()):
            pattern = "rows"
        elif bool((first[0] == torch.arange(host.shape[1], dtype=host.dtype, device="cpu")).all()):
            pattern = "range"
        else:
            pattern = "shared"
    return _facts.put(positions, Facts(host, int(low), int(high), pattern))
