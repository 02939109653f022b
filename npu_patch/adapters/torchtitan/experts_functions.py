"""The functions of torchtitan 0.2.2 that run all experts, with the grouped products in place of theirs.

On anything but a recent GPU torchtitan 0.2.2 runs a loop over the experts in most of its models, which waits for the
device in every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops import gmm as op
from ...sites import Site
from .experts_meaning import ExpertsFunction, limited_gate, shared_bias
from .typecheck import TYPE_CHECKING_REASON, type_checking

Factory = Callable[[Any, Site], Callable[..., Tensor]]


def adapter(meaning: ExpertsFunction) -> Factory:
    """A factory for one function."""
    return _limited(meaning) if meaning.biased else _gated(meaning)


def _gated(meaning: ExpertsFunction) -> Factory:
    def factory(original: Any, site: Site) -> Callable[..., Tensor]:
        def run(w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, counts: Tensor) -> Tensor:
            up, down, gate, rows = _cast(meaning, w1, w2, w3, x)
            reason = _reason(rows, (up, down, gate), counts)
            if reason is not None:
                site.fallback(reason)
                result: Tensor = original(w1, w2, w3, x, counts)
                return result
            site.hit()
            hidden = F.silu(_product(meaning, rows, up, counts)) * _product(meaning, rows, gate, counts)
            out = _product(meaning, hidden, down, counts)
            return out if meaning.dtype is None else out.type_as(x)

        return run

    return factory


def _limited(meaning: ExpertsFunction) -> Factory:
    def factory(original: Any, site: Site) -> Callable[..., Tensor]:
        def run(
            w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, limit: float, x: Tensor, counts: Tensor, degree: int = 1
        ) -> Tensor:
            first, second, rows = _cast(meaning, w1, w2, x)
            reason = _reason(rows, (first, second), counts)
            if reason is None and meaning.dtype is None and b1.dtype != rows.dtype:
                reason = "biases wider than the products, as under autocast"
            if reason is not None:
                site.fallback(reason)
                result: Tensor = original(w1, b1, w2, b2, limit, x, counts, degree)
                return result
            site.hit()
            hidden = limited_gate(_product(meaning, rows, first, counts, b1), limit)
            return _product(meaning, hidden, second, counts, shared_bias(b2, degree))

        return run

    return factory


def _cast(meaning: ExpertsFunction, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the type of the products; rows stay rows, matrices become those of `x @ w`."""
    dtype = meaning.dtype
    if dtype is None and torch.is_autocast_enabled("npu"):  # as it casts torch.matmul
        dtype = torch.get_autocast_dtype("npu")
    cast = tensors if dtype is None else tuple(tensor.to(dtype) for tensor in tensors)
    return tuple(tensor.transpose(-2, -1) if tensor.dim() == 3 else tensor for tensor in cast)


def _reason(rows: Tensor, weights: tuple[Tensor, ...], counts: Tensor) -> str | None:
    if type_checking():
        return TYPE_CHECKING_REASON
    for weight in weights:
        given = rows if weight.shape[1] == rows.shape[1] else rows[:, :1].expand(-1, weight.shape[1])  # as the last has
        if (reason := op.unsupported(given, weight, counts)) is not None:
            return reason
    return None


def _product(
    meaning: ExpertsFunction, rows: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None
) -> Tensor:
    # Where the original leaves rows past the last expert's undefined, they stay out of every gradient among several
    # experts; a single one is multiplied by all rows that are not left out.
    tail = meaning.zeros or weight.shape[0] == 1
    if bias is not None:
        bias = bias.to(rows.dtype)
    return op.grouped_matmul(rows, weight, counts, cumulative=False, bias=bias, tail=tail)
