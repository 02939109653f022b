"""CPU views of simulated device memory: both are host memory, so a view needs no copy."""

from __future__ import annotations

from typing import Any

import torch

_CPU = torch.device("cpu")


def is_npu(value: Any) -> bool:
    """Whether ``value`` is a tensor on an NPU."""
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def cpu_view(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the bytes of an NPU tensor. It does not keep them alive."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0:
        view = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    else:
        view = torch.empty(0, dtype=tensor.dtype)
        same = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), _CPU, size)  # type: ignore[attr-defined]
        view.set_(same, tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.is_neg():
        view = torch._neg_view(view)
    return view.conj() if tensor.is_conj() else view


def to_npu(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A new NPU tensor with the values and strides of a CPU tensor."""
    result = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        cpu_view(result).copy_(tensor)
    return result
