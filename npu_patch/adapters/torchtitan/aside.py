"""Work on the side of a forward, unseen by autograd and activation checkpointing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint as checkpoint
from torch.utils import _python_dispatch as dispatch

_CHECKPOINT_MODES: tuple[type, ...] = tuple(
    mode
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if isinstance(mode := getattr(checkpoint, name, None), type)
)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Inside: no gradient, no inference tensors, and nothing that selective activation checkpointing takes note of.

    Selective checkpointing counts the operators of the forward and expects the same ones when it runs the forward
    again.  What is remembered from one layer to the next is not repeated, and what was forgotten in between would be.
    """
    with torch.inference_mode(False), torch.no_grad(), _without_checkpoint_modes():
        yield


@contextlib.contextmanager
def _without_checkpoint_modes() -> Iterator[None]:
    stack = dispatch._get_current_dispatch_mode_stack()
    # Modes with a key of their own (fake tensors, tracing) are not ours to reorder; nothing is made under them anyway.
    if not any(isinstance(mode, _CHECKPOINT_MODES) for mode in stack) or any(_keyed(mode) for mode in stack):
        yield
        return
    others = [mode for mode in stack if not isinstance(mode, _CHECKPOINT_MODES)]
    _replace(len(stack), others)
    try:
        yield
    finally:
        _replace(len(others), stack)


def _keyed(mode: Any) -> bool:
    return getattr(mode, "_mode_key", None) is not None or getattr(mode, "_dispatch_key", None) is not None


def _replace(count: int, modes: list[Any]) -> None:
    """Another stack of modes, without entering or leaving any of them."""
    for _ in range(count):
        dispatch._pop_mode()
    for mode in modes:
        dispatch._push_mode(mode)
