"""The cross entropy of torchtitan: `components.loss.cross_entropy_loss`.

Logits whose vocabulary is spread over ranks go torchtitan's own way, which never has them in one place.  What computes
the loss a chunk of the sequence at a time stays as it is, and calls this function for every chunk.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...discovery import NotRecognised, reason_of
from ...discovery.bracket import no_random_draws, plain, quiet, same
from ...ops import cross_entropy as op
from ...ops.guards import NOT_ON_NPU
from ...registry import Target, Unrecognised
from ...sites import Site
from . import LIBRARY
from .typecheck import TYPE_CHECKING_REASON, type_checking

_OP = "cross_entropy"
_NAME = "cross_entropy_loss"
_VOCABULARY = "global_vocab_size"
_IGNORED = -100
SPREAD = "the vocabulary is spread over ranks"


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """`cross_entropy_loss`, in the module that defines it; names bound to it elsewhere follow."""
    function = getattr(module, _NAME, None)
    if getattr(function, "__module__", None) != module.__name__:
        return
    try:
        keyword = recognise(function)
    except Exception as error:  # foreign code was run
        reason = reason_of(error)
        yield Unrecognised(_OP, LIBRARY, module.__name__, _NAME, reason)
        return
    meaning = "sum of the cross entropy of class indices, in float32"
    yield Target(_OP, LIBRARY, module.__name__, _NAME, _adapter(keyword), meaning, rebind=(LIBRARY,))


def recognise(function: object) -> bool:
    """Check `f(pred, labels)` against the formula; returns whether it has a keyword for the vocabulary's size, too.

    Raises:
        NotRecognised: it takes other arguments, or a case differs, in value or gradient.
    """
    original = plain(function)
    parameters = list(inspect.signature(original).parameters.values())
    keywords = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    positional = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if len(positional) != 2 or keywords not in ([], [_VOCABULARY]) or len(parameters) != 2 + len(keywords):
        raise NotRecognised(f"takes ({', '.join(p.name for p in parameters)})")
    with quiet(), no_random_draws():
        for dtype in (torch.float32, torch.bfloat16):
            for labels in ([[3, 0, _IGNORED], [5, 5, 1]], [[_IGNORED] * 3] * 2, [[0, 1, 2], [3, 4, 5]]):
                _compare(original, dtype, torch.tensor(labels))
    return bool(keywords)


def _compare(original: FunctionType, dtype: torch.dtype, labels: Tensor) -> None:
    x = (torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(4)) * 5).to(dtype).requires_grad_()
    wanted = F.cross_entropy(x.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=_IGNORED)
    try:
        loss = original(x, labels)
    except Exception as error:
        raise NotRecognised(f"fails on a small input: {type(error).__name__}: {str(error)[:80]}") from None
    if not isinstance(loss, Tensor) or loss.dim() or not same(loss, wanted):
        raise NotRecognised("computes no sum of cross entropies")
    ours, theirs = (torch.autograd.grad(y, x, allow_unused=True)[0] for y in (loss, wanted))
    if ours is None or not same(ours, theirs, loose=True):
        raise NotRecognised("its gradient is not that of a cross entropy")


def _adapter(keyword: bool) -> Callable[[Any, Site], Callable[..., Tensor]]:
    def adapter(original: Any, site: Site) -> Callable[..., Tensor]:
        home = sys.modules.get(getattr(original, "__module__", None) or "")

        def fused(pred: Tensor, labels: Tensor) -> str | Tensor:
            """The reason, or the loss."""
            if type(pred) is not Tensor and hasattr(pred, "placements"):
                return SPREAD
            ranks = getattr(home, "spmd_mesh_size", None)
            if ranks is not None and ranks("tp") > 1:
                return SPREAD
            if pred.device.type != "npu":
                return NOT_ON_NPU
            if type_checking():
                return TYPE_CHECKING_REASON
            if pred.dim() != 3 or labels.dim() != 2 or not pred.is_floating_point():
                return "logits and labels are not (B, L, classes) and (B, L)"
            logits, target = pred.flatten(0, 1).float(), labels.flatten(0, 1)
            reason = op.unsupported(logits, target)
            return reason or op.cross_entropy(logits, target, _IGNORED, "sum")

        def cross_entropy_loss(pred: Tensor, labels: Tensor) -> Tensor:
            loss = fused(pred, labels)
            if isinstance(loss, str):
                site.fallback(loss)
                return original(pred, labels)
            site.hit()
            return loss

        def with_vocabulary(pred: Tensor, labels: Tensor, *, global_vocab_size: int | None = None) -> Tensor:
            loss = fused(pred, labels)
            if isinstance(loss, str):
                site.fallback(loss)
                return original(pred, labels, global_vocab_size=global_vocab_size)
            site.hit()
            return loss

        return with_vocabulary if keyword else cross_entropy_loss

    return adapter
