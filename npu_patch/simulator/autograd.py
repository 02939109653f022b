"""Differentiating a plain-PyTorch reference inside a kernel, where autograd has already been left behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


@contextlib.contextmanager
def _autograd() -> Iterator[None]:
    """Switches autograd on again below the dispatcher's autograd layer."""
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.ADInplaceOrView):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def gradients(
    function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor | None], output_gradient: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """The gradient of ``function(*inputs)`` for each input; ``None`` where it is ``None`` or has no influence."""
    with _autograd():
        leaves = [None if x is None else x.detach().clone().requires_grad_(True) for x in inputs]
        output = function(*leaves)
        present: list[Any] = [x for x in leaves if x is not None]
        found = iter(torch.autograd.grad(output, present, output_gradient, allow_unused=True))
    return tuple(None if x is None else next(found) for x in leaves)
