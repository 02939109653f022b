"""Random numbers of the simulated device: a function of the NPU generator's (seed, offset), as on hardware."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

_T = TypeVar("_T")
_lock = threading.RLock()
#: How far one random kernel moves the generator's offset; like the hardware's counter it is a multiple of 4.
_STEP = 4


def draw(generator: torch.Generator | None, device: torch.device, run: Callable[[], _T]) -> _T:
    """Runs ``run`` with the CPU generator seeded from the NPU generator, and moves the NPU generator on.

    ``torch.npu.manual_seed``, ``get_rng_state``, ``fork_rng`` and DTensor's offset tracker therefore mean what they
    mean on a device, and the CPU generator is left as it was. The numbers are neither the CPU's nor the hardware's.
    """
    if generator is None:
        npu = torch.get_device_module("npu")
        generator = npu.default_generators[device.index if device.index is not None else npu.current_device()]
        assert generator is not None
    with _lock:
        state = generator.get_state()
        seed, offset = state.view(torch.int64).tolist()
        moved = state.clone()
        moved.view(torch.int64)[1] = offset + _STEP
        generator.set_state(moved)
        before = torch.default_generator.get_state()
        try:
            torch.default_generator.manual_seed(_mix(seed, offset))
            return run()
        finally:
            torch.default_generator.set_state(before)


def stream(seed: int, offset: int) -> torch.Generator:
    """A CPU generator for a kernel that makes the same numbers again from the same seed and offset."""
    return torch.Generator().manual_seed(_mix(seed, offset))


def _mix(seed: int, offset: int) -> int:
    """Splitmix64 of both numbers, so that neighbouring seeds and offsets give unrelated streams."""
    mask = (1 << 64) - 1
    value = (seed * 0x9E3779B97F4A7C15 + offset * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return (value ^ (value >> 31)) >> 2
