"""Checks that every fused op makes first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32))

_peek = torch._C._functorch.peek_interpreter_stack

NOT_ON_NPU = "not on an NPU"
FUNCTORCH = "a torch.func transform or forward-mode differentiation is active"


def transforming() -> bool:
    """True while a torch.func transform (vmap, grad, jvp, functionalize) runs, or inside `forward_ad.dual_level()`."""
    return _peek() is not None or forward_ad._current_level >= 0


# Taken as a constant by torch.compile, which runs transforms itself while it traces them.
transforming._dynamo_marked_constant = True  # type: ignore[attr-defined]


def subclass_reason(*tensors: Any) -> str | None:
    """Why one of the tensors is not a plain tensor, or None.

    FakeTensor passes: under torch.compile and torch.export fake NPU tensors stand for the real ones.
    """
    for tensor in tensors:
        kind = type(tensor)
        if kind not in PLAIN_TYPES and kind.__name__ != "FakeTensor":
            return f"{kind.__name__} is not a plain tensor"
    return None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def capture_state() -> Callable[[], bool] | None:
    """A function that says whether a device graph is captured on the current stream; None where there are none."""
    return getattr(getattr(torch, "npu", None), "is_current_stream_capturing", None)  # torch_npu registers it


def keep(tensor: torch.Tensor) -> bool:
    """True when a helper tensor may outlive this call.

    Not a fake or functional one, which belongs to a trace, and not one made while a device graph is captured, whose
    memory is the graph's.
    """
    if type(tensor) is not torch.Tensor or transforming():
        return False
    if tensor.device.type != "npu":
        return True
    capturing = capture_state()
    return capturing is None or not capturing()
