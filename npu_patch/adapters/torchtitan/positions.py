"""What the host knows of a positions tensor.

torchtitan hands one positions tensor to the mask builder and to every rotary embedding of a step.  One look at it on
the host answers all of their questions: the bounds check of the rotary caches, which rows of the tables are needed, and
where the packed documents begin.  What comes from torchtitan's data loader was on the host (`batches`); anything else
is copied there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...ops.guards import transforming
from ...ops.per_tensor import PerTensor
from .aside import aside
from .batches import host_copy


@dataclass(eq=False)
class Facts:
    """A positions tensor as seen from the host.

    Args:
        host: (B, L) on the CPU.
        low, high: smallest and largest position.
        pattern: "range" (every row is 0, 1, 2, …), "shared" (the rows are equal) or "rows".
        batch, length: B and L.
        ready: what others made for this tensor and share between the layers of a step.
    """

    host: Tensor
    low: int
    high: int
    pattern: str
    batch: int = 0
    length: int = 0
    ready: dict[Any, Any] = field(default_factory=dict)


_facts: PerTensor[Facts] = PerTensor()

known_facts = _facts.get
"""The facts about a positions tensor that was seen before, or None."""


def facts(positions: Tensor) -> Facts | None:
    """Facts about positions of shape (B, L) or (L,); None when they cannot be had (a subclass, a trace, another form).

    The first time that it sees positions that the host does not know it copies them, which waits for the device once.
    """
    known = _facts.get(positions)
    if known is not None:
        return known
    if type(positions) is not Tensor or transforming():
        return None
    known = _facts.find(positions)
    if known is not None:
        return known
    if positions.dim() not in (1, 2) or positions.numel() == 0 or positions.dtype not in (torch.int64, torch.int32):
        return None
    with aside():
        host = host_copy(positions)
        if host is None:
            host = positions.detach().to("cpu", copy=True)
        host = host.view(-1, positions.shape[-1])
        low, high = (int(bound) for bound in host.aminmax())
        first = host[:1]
        if not bool((host == first).all()):
            pattern = "rows"
        elif bool((first[0] == torch.arange(host.shape[1], dtype=host.dtype, device="cpu")).all()):
            pattern = "range"
        else:
            pattern = "shared"
    return _facts.put(positions, Facts(host, low, high, pattern, *host.shape))
