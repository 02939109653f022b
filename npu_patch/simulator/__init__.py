"""A simulated Ascend NPU for the real ``torch_npu`` on a machine without one.

Everything of torch_npu is real: schemas, autograd formulas, argument checks in C++, allocator, streams and
ProcessGroupHCCL. Only the device below it is simulated, in host memory. Importing this package imports neither torch
nor torch_npu.

    import npu_patch.simulator
    npu_patch.simulator.load(devices=2)      # before anything imports torch
    import torch
    torch.ones(3, device="npu") + 1

    with npu_patch.simulator.trace() as t:   # works on real hardware too
        loss.backward()
    t.launches, t.bytes_read, t.host_syncs
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .device import check, is_loaded, load
from .errors import SimulatorError
from .request import parse_request

if TYPE_CHECKING:
    from .tracing import Trace

__all__ = ["SimulatorError", "check", "is_loaded", "load", "parse_request", "trace"]


def trace(parameters: Any = ()) -> Trace:
    """Counts what the ``with`` block does on device ``npu``; see :class:`npu_patch.simulator.tracing.Trace`."""
    from .tracing import Trace

    return Trace(parameters)
