"""Attention sinks: an `out_transform` that only rescales by them is the operator's own business."""

from __future__ import annotations

import weakref
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...discovery.bracket import NotRecognised, plain, quiet, same
from ...ops.guards import transforming

_known: weakref.WeakKeyDictionary[FunctionType, str | None] = weakref.WeakKeyDictionary()


def sinks_of(transform: Any) -> Tensor | None:
    """The sinks (N,) float32 of a method `(output, lse)` that computes `output * sigmoid(lse - sinks)`, or None.

    With one score more in the softmax, the sink, all other probabilities are smaller by the factor
    `exp(lse) / (exp(lse) + exp(sink))`, which is that sigmoid.
    """
    if type(transform) is not MethodType or is_compiling() or transforming():
        return None
    function, module = transform.__func__, transform.__self__
    if not isinstance(function, FunctionType):
        return None
    try:
        name = _known[function]
    except KeyError:
        name = _known[function] = _sink_name(function, module)
    if name is None:
        return None
    sinks: Any = getattr(module, name, None)
    # Sharded sinks are made local by the method, which has its reasons.
    return sinks.float() if type(sinks) in (Tensor, torch.nn.Parameter) and sinks.dim() == 1 else None


def _sink_name(function: FunctionType, module: Any) -> str | None:
    """The one parameter of the module that the method reads, if the method is known with it."""
    parameters = getattr(module, "_parameters", {})
    names = [name for name in function.__code__.co_names if name in parameters]
    if len(names) != 1:
        return None
    try:
        with quiet():
            known = all(_rescales(plain(function), names[0], dtype) for dtype in (torch.float32, torch.bfloat16))
    except (NotRecognised, Exception):  # foreign code on a stand-in that has nothing but the one parameter
        return None
    return names[0] if known else None


def _rescales(function: FunctionType, name: str, dtype: torch.dtype) -> bool:
    """Whether output and gradients are those of `output * sigmoid(lse - sinks)`, in one of the shapes in use."""
    generator = torch.Generator().manual_seed(17)
    out = torch.randn(2, 5, 3, 4, generator=generator).to(dtype).requires_grad_()
    lse = (3 * torch.randn(2, 5, 3, generator=generator)).requires_grad_()
    sinks = torch.randn(3, generator=generator).requires_grad_()
    leaves = out, lse, sinks
    theirs = function(SimpleNamespace(**{name: sinks}), out, lse)
    ours = out * torch.sigmoid(lse - sinks).unsqueeze(-1).to(dtype)
    if not (isinstance(theirs, Tensor) and same(theirs, ours)):
        return False
    head = torch.randn(ours.shape, generator=generator).to(dtype)
    gradients = torch.autograd.grad(theirs, leaves, head), torch.autograd.grad(ours, leaves, head)
    return all(same(a, b, loose=True) for a, b in zip(*gradients, strict=True))
