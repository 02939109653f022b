"""Rows of each expert, beside the offsets that torchtitan makes of them.

The operator takes either, but 64-bit integers, and zero gradients of experts without rows are found in counts at once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...ops.per_tensor import PerTensor

_counts: PerTensor[tuple[Tensor, int]] = PerTensor()


def offsets_of(counts: Tensor) -> Tensor:
    """The running sum of the counts, int32, which remembers what it was made of."""
    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    if counts.dtype == torch.int64 and not is_compiling() and not counts.is_inference():
        _counts.put(offsets, (counts, counts._version))
    return offsets


def counts_of(offsets: Tensor) -> Tensor | None:
    """The counts of these very offsets, unless either was changed since."""
    found = None if is_compiling() or offsets.is_inference() else _counts.get(offsets)
    if found is None:
        return None
    counts, version = found
    return counts if counts._version == version else None
