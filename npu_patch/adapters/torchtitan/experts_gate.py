"""The gate inside torchtitan's experts: `silu(gate) * up` of the results of two grouped products.

Joined for the operator they are kept once for the backward pass, where the original keeps the activated gate, too.  The
products stay those of the instance's own `_grouped_mm`, which other targets or subclasses may have replaced.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from ... import functions
from ...discovery.bracket import no_random_draws, plain, quiet, reason_of, same
from ...ops import swiglu as op
from ...registry import Target, Unrecognised
from ...sites import Site
from . import LIBRARY, dtensors
from .experts_counts import offsets_of
from .typecheck import TYPE_CHECKING_REASON, type_checking

_OP = "swiglu"
_PRODUCT = "_grouped_mm"
_LARGEST = (1 << 31) - 1  # elements of a row


@dataclass(frozen=True)
class Matrices:
    """The names of the parameters, (experts, hidden, size) and, of the last one, (experts, size, hidden)."""

    gate: str
    up: str
    down: str

    def __str__(self) -> str:
        return f"{self.down}(silu({self.gate}) * {self.up}) of every expert, in bfloat16"


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The classes of experts of a module whose forward is gated by silu."""
    for name, cls in list(vars(module).items()):
        if not isinstance(cls, type) or not issubclass(cls, nn.Module) or cls.__module__ != module.__name__:
            continue
        forward = functions.beneath(vars(cls).get("forward"))
        if not isinstance(forward, FunctionType) or _PRODUCT not in forward.__code__.co_names:
            continue
        path = f"{name}.forward"
        try:
            matrices = _recognise(cls, plain(forward))
        except Exception as error:  # foreign code was run
            reason = reason_of(error)
            yield Unrecognised(_OP, LIBRARY, module.__name__, path, reason)
            continue
        if matrices is not None:  # else experts of another kind, such as gpt_oss's
            yield Target(_OP, LIBRARY, module.__name__, path, _adapter(matrices), str(matrices))


def _recognise(cls: Any, forward: FunctionType) -> Matrices | None:
    """Which parameters are which, found by running the forward of an instance on the CPU."""
    if len(inspect.signature(forward).parameters) != 3:
        return None
    size, hidden, counts = 8, 16, torch.tensor([3, 0, 4])
    with quiet(), no_random_draws():
        experts = cls(cls.Config(dim=size, hidden_dim=hidden, num_experts=len(counts)))
        generator = torch.Generator().manual_seed(2)
        for parameter in experts.parameters():
            parameter.data.normal_(generator=generator)
        shapes = {name: tuple(parameter.shape) for name, parameter in experts.named_parameters()}
        wide = [name for name, shape in shapes.items() if shape == (len(counts), hidden, size)]
        narrow = [name for name, shape in shapes.items() if shape == (len(counts), size, hidden)]
        if len(shapes) != 3 or len(wide) != 2 or len(narrow) != 1:
            return None
        for gate, up in itertools.permutations(wide):
            matrices = Matrices(gate, up, narrow[0])
            if all(_computes(experts, forward, matrices, counts, dtype) for dtype in (torch.float32, torch.bfloat16)):
                return matrices
    return None


def _computes(experts: Any, forward: FunctionType, matrices: Matrices, counts: Tensor, dtype: torch.dtype) -> bool:
    leaves = list(experts.parameters())
    x = torch.randn(int(counts.sum()), leaves[0].shape[-1], generator=torch.Generator().manual_seed(3)).to(dtype)
    x.requires_grad_()
    rows = x.bfloat16().split(counts.tolist())
    gate, up, down = (getattr(experts, name).bfloat16() for name in (matrices.gate, matrices.up, matrices.down))
    parts = [(F.silu(one @ a.t()) * (one @ b.t())) @ c.t() for one, a, b, c in zip(rows, gate, up, down, strict=True)]
    wanted, found = torch.cat(parts).type_as(x), forward(experts, x, counts)
    if not _same(found, wanted):
        return False
    direction = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    gradients = [torch.autograd.grad(y, (x, *leaves), direction, allow_unused=True) for y in (found, wanted)]
    return all(a is not None and _same(a, b) for a, b in zip(*gradients, strict=True))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and same(a.to(torch.bfloat16), b.to(torch.bfloat16), loose=True)


def _adapter(matrices: Matrices) -> Callable[[Any, Site], Callable[..., Tensor]]:
    def adapter(original: Any, site: Site) -> Callable[..., Tensor]:
        def forward(self: Any, x: Tensor, counts: Tensor) -> Tensor:
            result: Tensor
            if not torch.is_grad_enabled() or x.shape[0] == 0:  # nothing is kept: joining would only move more bytes
                result = original(self, x, counts)
                return result
            if (reason := _reason(self, x, matrices)) is not None:
                site.fallback(reason)
                result = original(self, x, counts)
                return result
            site.hit()
            return _run(self, x, counts, matrices)

        return forward

    return adapter


def _run(experts: Any, x: Tensor, counts: Tensor, matrices: Matrices) -> Tensor:
    gate, up, down = (_local(getattr(experts, name)) for name in (matrices.gate, matrices.up, matrices.down))
    offsets, sides = offsets_of(counts), []
    for weight in (gate, up):  # cast for each, as in the original: wider gradients are summed in their own type
        product = experts._grouped_mm(A=x.bfloat16(), B_t=weight.bfloat16().transpose(-2, -1), offs=offsets)
        sides.append(product)
    hidden, last = _gated(*sides), down.bfloat16().transpose(-2, -1)
    result: Tensor = experts._grouped_mm(A=hidden, B_t=last, offs=offsets).type_as(x)
    return result


def _local(parameter: Any) -> Tensor:
    tensor: Tensor = parameter.to_local() if dtensors.is_distributed(parameter) else parameter
    return tensor


def _reason(self: Any, x: Tensor, matrices: Matrices) -> str | None:
    if is_compiling():
        return "experts under torch.compile"
    if type_checking():
        return TYPE_CHECKING_REASON
    if 2 * x.shape[0] * _local(getattr(self, matrices.gate)).shape[1] > _LARGEST:
        return f"more than {_LARGEST} elements"
    return op.unavailable(x)  # the type and the shape of what is joined are always the same


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    """As two rows in one, whose halves, and those of its gradient, are contiguous."""
    joined = torch.cat((gate.reshape(1, -1), up.reshape(1, -1)), -1)
    return op.gated(joined, "silu").view(gate.shape)
