"""What the places that sort tokens and bring them back have in common."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from ...discovery import reason_of
from ...ops import permute as op
from ...registry import Target, Unrecognised
from ...sites import Site
from . import LIBRARY
from .dispatch_order import Order
from .typecheck import TYPE_CHECKING_REASON, type_checking

_OP = "permute"
UNSORTED = "the tokens were not sorted by npu_patch"
Adapter = Callable[[Any, Site], Callable[..., Any]]


def target(
    module: ModuleType, path: str, recognise: Callable[[], Adapter], meaning: str, rebind: tuple[str, ...] = ()
) -> Target | Unrecognised:
    """The target, or why there is none."""
    try:
        return Target(_OP, LIBRARY, module.__name__, path, recognise(), meaning, rebind=rebind)
    except Exception as error:  # foreign code was run
        reason = reason_of(error)
        return Unrecognised(_OP, LIBRARY, module.__name__, path, reason)


def unsupported_dispatch(tokens: Tensor, scores: Tensor, ids: Tensor, top_k: int) -> str | None:
    """Why tokens cannot be sorted by the operator, or None."""
    if type_checking():
        return TYPE_CHECKING_REASON
    reason = op.unsupported(tokens, ids)
    if reason is None and (scores.shape != ids.shape or ids.shape[1] != top_k):
        return "scores and ids are not (tokens, top_k)"
    return reason


def unsupported_combine(outputs: Tensor, order: Order | None, tokens: Tensor) -> str | None:
    """Why outputs cannot be weighted and summed by the operators, or None."""
    if type_checking():
        return TYPE_CHECKING_REASON
    if order is None:
        return UNSORTED
    if outputs.dtype != tokens.dtype:
        return "expert outputs and tokens differ in type"
    if outputs.shape[1:] != tokens.shape[1:]:
        return "expert outputs and tokens differ in size"
    return op.unsupported_combine(outputs, order.rows, order.weights)
