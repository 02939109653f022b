"""What a FlexAttention mask_mod shows, found out by evaluating it; names say nothing.

A mask_mod is a function of (batch, head, query, key) that says whether the query sees the key.  It is evaluated on the
host, and where its closure holds device tensors on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops.mask_meaning import Meaning, read, shows
from .aside import aside

__all__ = ["HEAD", "SAMPLE", "MaskMod", "Meaning", "describe", "evaluate", "one_for_all", "reads", "recognise"]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_PAIRS = 1 << 24  # verified one by one: as many (sample, query, key) as one sample of 4096 tokens has
SAMPLE, HEAD = 0, 1  # positions of a mask_mod's arguments


def evaluate(mod: MaskMod, device: Any, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """The mod on index vectors of one length, element by element as flex attention defines it; bool, on the host."""
    return _mapped(torch.vmap(mod), device, b, h, q, kv)


def _mapped(mod: Any, device: Any, *indices: Tensor) -> Tensor:
    return _called(mod, device, *indices).to("cpu").bool()


def _called(mod: Any, device: Any, *indices: Tensor) -> Tensor:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    with torch.no_grad(), TransformGetItemToIndex():
        seen: Tensor = mod(*(index.to(device) for index in indices))
    return seen


def _over_grid(mod: MaskMod) -> Any:
    """The mod on vectors of samples, queries and keys, for all their combinations, as create_block_mask does it."""
    over_keys = torch.vmap(mod, in_dims=(None, None, None, 0))
    over_queries = torch.vmap(over_keys, in_dims=(None, None, 0, None))
    return torch.vmap(over_queries, in_dims=(0, None, None, None))


class _Look:
    """Evaluates one mod, on the host if that works."""

    def __init__(self, mod: MaskMod, device: torch.device) -> None:
        self.mod = mod
        self.devices = [torch.device("cpu")] + ([device] if device.type != "cpu" else [])

    def __call__(self, b: Tensor, q: Tensor, kv: Tensor, head: Tensor | int = 0) -> Tensor:
        h = torch.as_tensor(head, device="cpu")
        shape = torch.broadcast_shapes(b.shape, h.shape, q.shape, kv.shape)
        three = h.dim() == 0 and b.dim() == q.dim() == kv.dim() == 3
        grid = three and b.shape[1:] == q.shape[::2] == kv.shape[:2] == (1, 1)
        if grid:  # far cheaper: what depends on a query or a key alone is not evaluated for pairs
            indices = [b.reshape(-1), h, q.reshape(-1), kv.reshape(-1)]
            mapped = _over_grid(self.mod)
        else:
            indices = [index.reshape(-1) for index in torch.broadcast_tensors(b, h, q, kv)]
            mapped = torch.vmap(self.mod)
        while True:
            try:
                return _mapped(mapped, self.devices[0], *indices).reshape(shape)
            except Exception:  # foreign code on a device that it was not made for raises anything
                if len(self.devices) == 1:
                    raise
                self.devices.pop(0)


def recognise(mod: MaskMod, batch: int, length: int, device: torch.device) -> Meaning | None:
    """The meaning of a mask over (batch, length, length) for any number of heads.

    None without such a form, where the mod reads the head index, or if it cannot be evaluated.
    """
    try:
        with aside():
            return None if reads(mod, HEAD, device) else read(_Look(mod, device), batch, length, heads=1, pairs=_PAIRS)
    except Exception:  # evaluated as a whole later, which raises the mod's own error
        return None


def reads(mod: MaskMod, argument: int, device: torch.device) -> bool:
    """Whether what a mask_mod shows may depend on the argument `SAMPLE` or `HEAD`.

    Found by following the index through the mod, not by its values: False is certain for every sample or head there
    may be.  The mod is one that `torch.vmap` maps, so it does not branch on an index.  No index but 0 is asked for.
    """
    found: list[bool] = []

    def one(index: Tensor) -> Tensor:
        indices = [torch.zeros_like(zero) for _ in range(4)]
        indices[argument] = index
        seen = mod(*indices)
        found.append(torch._C._functorch.is_batchedtensor(seen))
        return seen

    for place in dict.fromkeys((torch.device("cpu"), device)):
        zero = torch.zeros((), dtype=torch.int64, device=place)
        try:
            with aside():
                _called(torch.vmap(one), place, torch.zeros(2, dtype=torch.int64, device=place))
        except Exception:  # closes over tensors of the other device, or branches on the index
            found.clear()
            continue
        return found[0]
    return True


def one_for_all(mod: MaskMod, meaning: Meaning | None, batch: int, lengths: tuple[int, int], device: Any) -> bool:
    """Whether what a mask_mod shows to sample 0 is what it shows to every sample of a batch.

    A mod that cannot be asked about a second sample, for its table has one row, is one for all.

    Args:
        meaning: what was found for sample 0; without one a mod that reads the sample is not one for all.
    """
    if not reads(mod, SAMPLE, device):
        return True
    look, zero = _Look(mod, device), torch.zeros((), dtype=torch.int64, device="cpu")
    with aside():
        look(zero, zero, zero)
        del look.devices[1:]  # where it works for one sample, so that a row too many never reaches a device
        try:
            look(zero + 1, zero, zero)
        except Exception:
            return True
        if meaning is None:
            return False
        try:
            return shows(look, meaning.select(torch.zeros(batch, dtype=torch.int64, device="cpu")), _PAIRS)
        except Exception:  # fewer rows than samples: writing it out raises the mod's own error
            return False


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
