"""What each query of an attention may see."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .guards import subclass_reason

ALIGNMENTS = ("lower_right", "upper_left")


class TensorFacts(NamedTuple):
    """What can be asked of a tensor without its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> TensorFacts:
        return cls(tensor.shape, tensor.dtype, tensor.device)


class MaskFacts(NamedTuple):
    """What the fused operator asks of a mask, in values that compare; `subclass` says why a tensor is no plain one."""

    kind: str
    subclass: str | None = None
    hidden: TensorFacts | None = None
    bias: TensorFacts | None = None
    documents: int = 0
    ends: tuple[int, int] = (0, 0)
    may_hide_rows: bool = False
    hard_bias: bool = False


@dataclass(frozen=True, eq=False)
class Mask:
    """What each query may see; make one with `full`, `causal`, `band`, `dense` or `documents`.

    i is the query's index, j the key's, d = Skv - Sq.
    """

    kind: str = "full"
    alignment: str = "lower_right"
    window: int | None = None
    hidden: Tensor | None = None
    may_hide_rows: bool = False
    q_ends: tuple[int, ...] = ()
    kv_ends: tuple[int, ...] = ()
    is_causal: bool = False
    bias: Tensor | None = None
    hard_bias: bool = False

    def describe(self) -> MaskFacts:
        """The facts about this mask, as they are now."""
        hidden, bias = self.hidden, self.bias
        return MaskFacts(
            self.kind,
            subclass_reason(*(tensor for tensor in (hidden, bias) if tensor is not None)),
            None if hidden is None else TensorFacts.of(hidden),
            None if bias is None else TensorFacts.of(bias),
            len(self.q_ends),
            (self.q_ends[-1], self.kv_ends[-1]) if self.q_ends else (0, 0),
            self.may_hide_rows,
            self.hard_bias,
        )

    @cached_property
    def facts(self) -> MaskFacts:
        """The same, found once; not while torch.compile traces."""
        return self.describe()

    @cached_property
    def plans(self) -> dict[tuple[Any, ...], Any]:
        """What the fused operator's `plan` knows of this mask, by the kind of tensors."""
        return {}

    @staticmethod
    def full() -> Mask:
        """Every key."""
        return _FULL

    @staticmethod
    def causal(alignment: str = "lower_right") -> Mask:
        """Keys j <= i + d for "lower_right" (the last query sees every key), j <= i for "upper_left".

        Raises:
            ValueError: another alignment.
        """
        if alignment == "lower_right":
            return _LOWER_RIGHT
        if alignment == "upper_left":
            return _UPPER_LEFT
        raise ValueError(f"alignment {alignment!r}: expected one of {', '.join(ALIGNMENTS)}")

    @staticmethod
    def band(window: int) -> Mask:
        """Keys i + d - window < j <= i + d: the query itself and the window - 1 keys before it.

        Raises:
            ValueError: a window below 1.
        """
        if window < 1:
            raise ValueError(f"window {window}: expected at least 1")
        return Mask("band", window=window)

    @staticmethod
    def dense(hidden: Tensor, may_hide_rows: bool = True) -> Mask:
        """A written-out mask.

        Args:
            hidden: bool, True where the key is hidden: (B, N, Sq, Skv), (B, 1, Sq, Skv), (1, 1, Sq, Skv) or (Sq, Skv);
                a query dimension of 1 stands for every query.
            may_hide_rows: a query may see no key at all; its output is then 0.  False is faster where it is known.
        """
        return Mask("dense", hidden=hidden, may_hide_rows=may_hide_rows)

    @staticmethod
    def documents(
        q_ends: tuple[int, ...], kv_ends: tuple[int, ...], causal: bool = True, window: int | None = None
    ) -> Mask:
        """Packed sequences in TND: keys of the query's own document only, and there as `causal` or `band`.

        Args:
            q_ends, kv_ends: cumulative ends on the host, without the leading zero.
            causal: lower-right causal inside each document.
            window: with `causal`, the number of keys that a query sees, itself included.

        Raises:
            ValueError: no document, lengths that differ, a leading zero, a decreasing end, or a window below 1 or
                without `causal`.
        """
        if not q_ends or len(q_ends) != len(kv_ends):
            raise ValueError("expected one query end and one key end for each document")
        for ends in (q_ends, kv_ends):
            if ends[0] <= 0 or any(a > b for a, b in pairwise(ends)):
                raise ValueError("document ends must be above 0 and not decrease")
        if window is not None and (window < 1 or not causal):
            raise ValueError("a window is at least 1 and needs causal=True")
        q_ends, kv_ends = tuple(q_ends), tuple(kv_ends)
        hides = q_ends != kv_ends and _hides_rows(q_ends, kv_ends, causal)
        return Mask("documents", may_hide_rows=hides, q_ends=q_ends, kv_ends=kv_ends, is_causal=causal, window=window)

    def with_bias(self, bias: Tensor, hard: bool = False) -> Mask:
        """The same mask with a tensor added to the scaled scores.

        Args:
            bias: broadcasts to (B, N, Sq, Skv).  -inf hides: a query that sees no key gets 0.  A query for which all
                is the lowest number gets the mean of all values, as a softmax of equal scores gives it.
            hard: it holds nothing but 0 and its type's lowest number.  Unlike a dense mask it gives a query that sees
                no key the mean of all values, as a softmax of equal scores does.
        """
        return replace(self, bias=bias, hard_bias=hard)


def _hides_rows(q_ends: tuple[int, ...], kv_ends: tuple[int, ...], causal: bool) -> bool:
    """True when some query sees no key of its document."""
    q_start = kv_start = 0
    for q_end, kv_end in zip(q_ends, kv_ends, strict=True):
        q_len, kv_len = q_end - q_start, kv_end - kv_start
        if q_len and (not kv_len or (causal and q_len > kv_len)):
            return True
        q_start, kv_start = q_end, kv_end
    return False


_FULL = Mask()
_LOWER_RIGHT = Mask("causal", is_causal=True)
_UPPER_LEFT = Mask("causal", alignment="upper_left", is_causal=True)
