"""Casts. torch_npu routes ``softmax(dtype=...)`` and its own autocast through them."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Call, kernel

#: ``c10::ScalarType`` numbers, by which schemas with ``int dtype`` name a dtype. Larger numbers are torch_npu's own.
_CODES = dict(
    enumerate(
        (
            torch.uint8,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.int64,
            torch.float16,
            torch.float32,
            torch.float64,
            torch.complex32,
            torch.complex64,
            torch.complex128,
            torch.bool,
        )
    )
) | {15: torch.bfloat16, 23: torch.float8_e5m2, 24: torch.float8_e4m3fn}


def _dtype(call: Call, dtype: int | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _CODES:
        call.refuse("dtype", f"the dtype with number {dtype} is not simulated")
    return _CODES[dtype]


def _check_read_as(call: Call, argument: str, given: int | None, tensor: Tensor) -> None:
    """These arguments read the input's bytes as another dtype; only the dtype that it has is simulated."""
    if given is not None:
        call.require(_CODES.get(given) is tensor.dtype, argument, f"reading {tensor.dtype} as dtype number {given}")


@kernel("npu_dtype_cast", models=("input", "dtype", "input_dtype"))
def npu_dtype_cast(call: Call, input: Tensor, dtype: int | torch.dtype, input_dtype: int | None) -> Tensor:
    _check_read_as(call, "input_dtype", input_dtype, input)
    return input.to(_dtype(call, dtype))


@kernel("_npu_dtype_cast", models=("input", "dtype"))
def _npu_dtype_cast(call: Call, input: Tensor, dtype: int | torch.dtype) -> Tensor:
    return input.to(_dtype(call, dtype))


@kernel("_npu_dtype_cast_backward", models=("grad", "dtype"))
def _npu_dtype_cast_backward(call: Call, grad: Tensor, dtype: int | torch.dtype) -> Tensor:
    return grad.to(_dtype(call, dtype))
