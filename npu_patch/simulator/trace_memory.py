"""Peak memory of the device over a block, from ``torch.npu``'s statistics."""

from __future__ import annotations

import gc
from typing import Any, ClassVar

import torch


def _npu() -> Any:
    return torch.get_device_module("npu")


class Peak:
    """Peak memory over a block; blocks nest although the statistic has one reset."""

    _open: ClassVar[list[Peak]] = []

    def __init__(self) -> None:
        self._device: int | None = None
        self._start = 0
        self._most = 0

    def start(self) -> None:
        if not _npu().is_initialized():
            _npu().init()
        gc.collect()  # garbage that happens to be collected inside the block would hide part of the peak
        self._flush()
        self._device = _npu().current_device()
        _npu().reset_peak_memory_stats(self._device)
        self._start = self._most = _npu().memory_allocated(self._device)
        Peak._open.append(self)

    def stop(self) -> None:
        self._flush()
        Peak._open.remove(self)

    def bytes(self) -> int:
        self._flush()
        return self._most - self._start

    @classmethod
    def _flush(cls) -> None:
        """Notes the peak so far in every open block, before somebody resets it."""
        for peak in cls._open:
            peak._most = max(peak._most, _npu().max_memory_allocated(peak._device))
