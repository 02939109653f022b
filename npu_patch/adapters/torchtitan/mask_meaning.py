"""What a FlexAttention mask_mod shows, found out by evaluating it; names say nothing.

A mask_mod is a function of (batch, head, query, key) that says whether the query sees the key.  It is evaluated on the
host, and where its closure holds device tensors on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops.mask_meaning import Meaning, read
from .aside import aside

__all__ = ["MaskMod", "Meaning", "describe", "evaluate", "recognise", "tells_heads_apart"]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def evaluate(mod: MaskMod, device: Any, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """The mod on index vectors of one length, element by element as flex attention defines it; bool, on the host."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    with torch.no_grad(), TransformGetItemToIndex():
        seen = torch.vmap(mod)(*(index.to(device) for index in (b, h, q, kv)))
    return seen.to("cpu").bool()


class _Look:
    """Evaluates one mod, on the host if that works."""

    def __init__(self, mod: MaskMod, device: torch.device) -> None:
        self.mod = mod
        self.devices = [torch.device("cpu")] + ([device] if device.type != "cpu" else [])

    def __call__(self, b: Tensor, q: Tensor, kv: Tensor, head: Tensor | int = 0) -> Tensor:
        b, h, q, kv = torch.broadcast_tensors(b, torch.as_tensor(head, device="cpu"), q, kv)
        shape = q.shape
        indices = [index.reshape(-1) for index in (b, h, q, kv)]
        while True:
            try:
                return evaluate(self.mod, self.devices[0], *indices).expand(q.numel()).reshape(shape)
            except Exception:  # foreign code on a device that it was not made for raises anything
                if len(self.devices) == 1:
                    raise
                self.devices.pop(0)


def recognise(mod: MaskMod, batch: int, length: int, device: torch.device) -> Meaning | None:
    """The meaning of a mask over (batch, length, length); None without such a form, or if it cannot be evaluated."""
    try:
        with aside():
            return read(_Look(mod, device), batch, length)
    except Exception:  # evaluated as a whole later, which raises the mod's own error
        return None


def tells_heads_apart(mod: MaskMod, lengths: tuple[int, int], device: torch.device) -> bool:
    """Whether a mask_mod shows different keys to different heads, or cannot be asked about many heads.

    Judged by a sample of the first sample's pairs, for 64 heads.
    """
    look = _Look(mod, device)
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    q, kv = (torch.linspace(0, length - 1, 32, device="cpu").long() for length in lengths)
    heads = torch.arange(64, device="cpu").reshape(-1, 1, 1)
    try:
        seen = look(zero, q.unsqueeze(1), kv, heads)
    except Exception:  # a table of fewer heads
        return True
    return not bool((seen == seen[:1]).all())


def describe(mod: Any, depth: int = 3) -> str:
    """The functions that a mask_mod is made of, for messages."""
    name = getattr(mod, "__qualname__", type(mod).__name__)
    parts = []
    for cell in (getattr(mod, "__closure__", None) or ()) if depth else ():
        content = cell.cell_contents
        for inner in content if isinstance(content, (tuple, list)) else (content,):
            if callable(inner) and hasattr(inner, "__code__"):
                parts.append(describe(inner, depth - 1))
    return f"{name} of ({', '.join(parts)})" if parts else name
