"""How torchtitan lays out the tensors of its inner attentions.

Inside, everything is (B, L, N, H): batch, length, heads, head size.  The other layouts are views of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """One layout.

    Args:
        name: its letters; T is B and L in one.
        rank: number of dimensions.
        heads: which of them the heads are.
        inside: to (B, L, N, H).
        outside: back.
        lse: a log-sum-exp from (B, L, N) to what this layout calls it.
    """

    name: str
    rank: int
    heads: int
    inside: Callable[[Tensor], Tensor]
    outside: Callable[[Tensor], Tensor]
    lse: Callable[[Tensor], Tensor]

    def __repr__(self) -> str:
        return self.name


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _swapped(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2)


def _as_batch(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(0)


def _of_batch(tensor: Tensor) -> Tensor:
    return tensor.squeeze(0)


BLNH = Layout("BLNH", 4, 2, _same, _same, _same)
BNLH = Layout("BNLH", 4, 1, _swapped, _swapped, _swapped)
TNH = Layout("TNH", 3, 1, _as_batch, _of_batch, _of_batch)
LAYOUTS = {layout.name: layout for layout in (BLNH, BNLH, TNH)}

_SUFFIX = re.compile(r"(?:x?[qkv])_([A-Z]+)")


def named(parameters: Sequence[str]) -> Layout | None:
    """The layout that the parameters for query, key and value name, as in `q_BLNH`; None where they name none."""
    found = {match.group(1) if (match := _SUFFIX.fullmatch(name)) else "" for name in parameters}
    return LAYOUTS.get(found.pop()) if len(found) == 1 else None
