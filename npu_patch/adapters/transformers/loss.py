"""The cross entropy below every language modeling loss of transformers: `fixed_cross_entropy`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...discovery import NotRecognised, foreign_code
from ...discovery.bracket import no_random_draws, plain, quiet, same
from ...ops import cross_entropy as op
from ...registry import Target, Unrecognised
from ...sites import Site
from . import LIBRARY

_OP = "cross_entropy"
_NAME = "fixed_cross_entropy"
_PARAMETERS = ("source", "target", "num_items_in_batch", "ignore_index")
# Keywords that an implementation could honour; the stock one ignores every keyword.
_HONOURED = ("weight", "label_smoothing", "reduction")


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """`fixed_cross_entropy`, in the module that defines it."""
    function = getattr(module, _NAME, None)
    if getattr(function, "__module__", None) != module.__name__:
        return
    try:
        with foreign_code():
            recognise(function)
    except NotRecognised as error:
        yield Unrecognised(_OP, LIBRARY, module.__name__, _NAME, str(error))
        return
    yield Target(_OP, LIBRARY, module.__name__, _NAME, adapter, "cross entropy of class indices", rebind=(LIBRARY,))


def recognise(function: object) -> None:
    """Check `f(source, target, num_items_in_batch=None, ignore_index=-100, **kwargs)` against the formula.

    Raises:
        NotRecognised: a case differs, in value or gradient.
    """
    original = plain(function)
    code = original.__code__
    if code.co_varnames[: code.co_argcount] != _PARAMETERS or code.co_kwonlyargcount or not code.co_flags & 0x08:
        raise NotRecognised(f"takes ({', '.join(code.co_varnames[: code.co_argcount])})")
    if original.__defaults__ != (None, -100):
        raise NotRecognised(f"has the defaults {original.__defaults__}")
    with quiet(), no_random_draws():
        for dtype in (torch.float32, torch.bfloat16):
            for target, items, ignore in (
                ([3, 0, -100, 5, 5], None, -100),
                ([3, 0, -100, 5, 5], 7, -100),
                ([3, 0, 2, 5, 5], torch.tensor(3), 5),
                ([3, 0, 2, 6, 6], None, 6),
                ([-100] * 5, None, -100),
                ([-100] * 5, torch.tensor(4.0), -100),
            ):
                _compare(original, dtype, torch.tensor(target), items, ignore)


def _compare(original: FunctionType, dtype: torch.dtype, target: Tensor, items: Any, ignore: int) -> None:
    x = (torch.randn(5, 6, generator=torch.Generator().manual_seed(4)) * 5).to(dtype).requires_grad_()
    reduction = "mean" if items is None else "sum"
    expected = F.cross_entropy(x, target, ignore_index=ignore, reduction=reduction)
    if items is not None:
        expected = expected / items
    try:
        loss = original(x, target, items, ignore, any_other_keyword=1)
    except Exception as error:
        raise NotRecognised(f"fails on a small input: {type(error).__name__}: {str(error)[:80]}") from None
    if not isinstance(loss, Tensor) or loss.dim() or not same(loss.nan_to_num(-1.0), expected.nan_to_num(-1.0)):
        raise NotRecognised("computes no cross entropy")
    found, wanted = (torch.autograd.grad(y, x, allow_unused=True)[0] for y in (loss, expected))
    if found is None or not same(found, wanted, loose=True):
        raise NotRecognised("its gradient is not that of a cross entropy")


def adapter(original: Any, site: Site) -> Callable[..., Tensor]:
    def fixed_cross_entropy(
        source: Tensor, target: Tensor, num_items_in_batch: Any = None, ignore_index: int = -100, **kwargs: Any
    ) -> Tensor:
        reason = _unsupported(source, target, ignore_index, kwargs)
        if reason is not None:
            site.fallback(reason)
            return original(source, target, num_items_in_batch, ignore_index, **kwargs)
        site.hit()
        if num_items_in_batch is None:
            return op.cross_entropy(source, target, ignore_index, "mean")
        loss = op.cross_entropy(source, target, ignore_index, "sum")
        if torch.is_tensor(num_items_in_batch):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch

    return fixed_cross_entropy


def _unsupported(source: Tensor, target: Tensor, ignore_index: Any, kwargs: dict[str, Any]) -> str | None:
    for name in _HONOURED:
        if kwargs.get(name) is not None:
            return f"keyword {name}"
    if type(ignore_index) is not int:
        return "ignore_index is not a number"
    return op.unsupported(source, target)
