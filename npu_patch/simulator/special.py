"""The ``aten::`` kernels that are not "the CPU kernel on CPU views": copies, and what the CPU has no kernel for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .autograd import gradients
from .memory import cpu_view, is_npu, to_npu


def _view(tensor: torch.Tensor) -> torch.Tensor:
    return cpu_view(tensor) if is_npu(tensor) else tensor


def copy_(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _view(self).copy_(_view(src))
    return self


def _copy_from(self: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return copy_(dst, self)


def _copy_from_and_resize(self: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    if dst.size() != self.size():
        dst.resize_(self.size())
    return copy_(dst, self)


def _to_copy(
    self: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: Any = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    target = torch.device(device) if device is not None else self.device
    result = torch.ops.aten._to_copy(_view(self), dtype=dtype, memory_format=memory_format)
    if target.type == "npu":
        return to_npu(result, target)
    return result.pin_memory() if pin_memory else result


def _local_scalar_dense(self: torch.Tensor) -> Any:
    return cpu_view(self).item()


def contiguous(self: torch.Tensor, *, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    if self.is_contiguous(memory_format=memory_format):
        return self
    return self.clone(memory_format=memory_format)


def matmul_backward(
    grad: torch.Tensor, self: torch.Tensor, other: torch.Tensor, mask: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """torch_npu gives ``aten::matmul`` an autograd node of its own; the CPU has no such kernel."""
    results = gradients(torch.matmul, (cpu_view(self), cpu_view(other)), cpu_view(grad))
    moved = [
        to_npu(g, grad.device) if wanted and g is not None else None for g, wanted in zip(results, mask, strict=True)
    ]
    return moved[0], moved[1]


def histc(self: torch.Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> torch.Tensor:
    """The device counts integers as well; the CPU only floats."""
    values = cpu_view(self)
    counts = torch.histc(values if values.is_floating_point() else values.double(), bins, min, max)
    return to_npu(counts.to(values.dtype), self.device)


KERNELS = {
    "copy_": copy_,
    "_to_copy": _to_copy,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from_and_resize,
    "_local_scalar_dense": _local_scalar_dense,
    "contiguous": contiguous,
    "matmul_backward": matmul_backward,
    "histc": histc,
}
