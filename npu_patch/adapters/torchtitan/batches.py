"""Batches of torchtitan's data loader: what the host knows of a tensor stays known when it is moved to the device.

The operators want host numbers: where packed documents begin, which rows of the rotary tables are needed.  The data
loader makes positions and tokens on the host, the trainer moves them with `.to`, and reading them back waits for the
device.  So the loader's integer tensors remember, for what `.to` makes of them, what they held.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ...ops.per_tensor import PerTensor
from ...registry import Target
from ...sites import Site

_INTEGERS = (torch.int64, torch.int32)
_MOVES = frozenset(("to", "npu", "cuda"))  # torch_npu may wrap them: known by name

_copies: PerTensor[Tensor] = PerTensor()


def host_copy(tensor: Tensor) -> Tensor | None:
    """What a tensor on the device holds, on the host, if it was moved there from a batch and not written to since."""
    return _copies.find(tensor) if len(_copies) else None


class HostTensor(Tensor):
    """A tensor on the host that notes what it holds when it is moved to the device; whatever else is made of it is a
    plain tensor, as if it were one itself."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if type(result) is Tensor and result.device.type == "npu" and getattr(func, "__name__", "") in _MOVES:
                source = args[0]
                if type(source) is cls and (result.shape, result.dtype) == (source.shape, source.dtype):
                    _copies.put(result, torch.empty_like(source, memory_format=torch.contiguous_format).copy_(source))
        return result

    def __deepcopy__(self, memo: Any) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def find(module: ModuleType) -> Iterator[Target]:
    """The data loaders that a module of torchtitan's components defines."""
    for name, cls in list(vars(module).items()):
        if isinstance(cls, type) and issubclass(cls, DataLoader) and cls.__module__ == module.__name__:
            meaning = "hands over positions and tokens"
            path = f"{name}.__iter__"
            yield Target("attention", "torchtitan", module.__name__, path, _adapter, meaning, supporting=True)


def _adapter(original: Any, site: Site) -> Callable[..., Any]:
    def __iter__(self: Any) -> Any:
        return _Batches(original(self))

    return __iter__


class _Batches:
    """An iterator over batches, with integer tensors that remember; its attributes are those of the loader's own."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        batch = next(self._inner)
        if type(batch) not in (tuple, list) or not batch or type(batch[0]) is not dict:
            return batch
        return type(batch)(({name: _noting(value) for name, value in batch[0].items()}, *batch[1:]))

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _noting(value: Any) -> Any:
    if type(value) is Tensor and value.dtype in _INTEGERS and value.dim() in (1, 2) and value.is_cpu:
        return value.as_subclass(HostTensor)  # type: ignore[arg-type]
    return value
