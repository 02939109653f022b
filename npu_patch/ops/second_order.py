"""Gradients of gradients for operators whose own backward operator has no derivative.

torch_npu's node calls that operator, and under `create_graph=True` what depends on its result would be lost without a
word.  A hook on the node, which does nothing in a usual backward pass, then puts the same gradients in its place,
computed by formulas that PyTorch differentiates, from what the node saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils.checkpoint import CheckpointError

Gradients = Sequence[Tensor | None]


def with_gradients(op: str, formula: Callable[[Any, Tensor], Gradients]) -> Callable[[Tensor], Tensor]:
    """A function that makes the gradient of an operator's result differentiable and returns the result.

    Args:
        op: the name by which the user switches the operator off.
        formula: gets the node, whose attributes are what it saved, and the incoming gradient; gives the gradients of
            the node's inputs.
    """

    def hook(own: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> Any:
        if not torch.is_grad_enabled() or incoming[0] is None:
            return None
        try:
            made = formula(torch._C._current_autograd_node(), incoming[0])
        except CheckpointError as error:  # what was saved can be had once, and the node has had it
            raise RuntimeError(
                f"create_graph=True through an activation checkpoint: npu_patch's {op!r} has no second derivative "
                f"there; switch it off with npu_patch.disable({op!r}) or NPU_PATCH_OPS=default,-{op}"
            ) from error
        pairs = zip(own, made, strict=True)
        return tuple(None if a is None or b is None else b.to(a.dtype) for a, b in pairs)

    def attach(result: Tensor) -> Tensor:
        # A compiled graph refuses a second derivative by itself.
        if not is_compiling():
            node: Any = result.grad_fn
            if node is not None:
                node.register_hook(hook)
        return result

    return attach
