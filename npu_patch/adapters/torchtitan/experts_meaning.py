"""What torchtitan's functions for the matrices of experts compute, found by running them on the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...discovery.bracket import NotRecognised, failure, no_random_draws, plain, quiet, same

Formula = Callable[..., Tensor]
_COUNTS = ([3, 0, 4], [0, 7, 0], [2, 2, 3])
_SIZE, _HIDDEN = 8, 16
_ALPHA = 1.702  # of the gate of gpt_oss


@dataclass(frozen=True)
class ExpertsFunction:
    """A function that runs all experts, one matrix of each kind per expert.

    Args:
        biased: gpt_oss: two matrices with biases, gates and linear parts beside each other, both limited; else three
            matrices without, `w2(silu(w1 x) * w3 x)`.
        dtype: the type in which it multiplies, whatever comes in; None: the one of its arguments.
        zeros: rows that belong to no expert become zero; else they are undefined.
    """

    biased: bool
    dtype: torch.dtype | None
    zeros: bool

    def __str__(self) -> str:
        what = "limited gates with biases" if self.biased else "silu(gate) * up"
        return f"experts, {what}, in {'the input type' if self.dtype is None else str(self.dtype).split('.')[1]}"


def recognise_product(method: object) -> None:
    """Check a method `f(self, *, A, B_t, offs)` against a product per group of rows.

    Raises:
        NotRecognised: it computes something else, or reads its instance.
    """
    original = plain(method)
    parameters = list(inspect.signature(original).parameters.values())
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    if len(parameters) != 4 or keywords != {"A", "B_t", "offs"}:
        raise NotRecognised(f"takes ({', '.join(p.name for p in parameters)})")
    instance = SimpleNamespace()

    def product(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        offsets = counts.cumsum(0, dtype=torch.int32)
        result: Tensor = original(instance, A=x, B_t=weight.transpose(-2, -1), offs=offsets)
        return result

    def wanted(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        return torch.cat([part @ w.t() for part, w in zip(x.split(counts.tolist()), weight, strict=True)])

    with quiet(), no_random_draws():
        for counts in _COUNTS:
            x, weight = _random(3, sum(counts), _SIZE), _random(4, len(counts), _HIDDEN, _SIZE)
            if not _agree(product, wanted, [x.bfloat16(), weight.bfloat16()], [torch.tensor(counts)]):
                raise NotRecognised("computes no product per group of rows")


def recognise_experts(function: object) -> ExpertsFunction:
    """What a function `f(*matrices, x, num_tokens_per_expert)` computes.

    Raises:
        NotRecognised: it takes other arguments, or computes none of the known formulas.
    """
    original = plain(function)
    parameters = list(inspect.signature(original).parameters.values())
    count = len(parameters)
    if any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters) or count not in (5, 8):
        raise NotRecognised(f"takes ({', '.join(p.name for p in parameters)})")
    for dtype in (None, torch.bfloat16):
        try:
            with quiet(), no_random_draws():
                if all(_computes(original, count == 8, dtype, one) for one in (torch.float32, torch.bfloat16)):
                    return ExpertsFunction(count == 8, dtype, _zeroes(original, count == 8, dtype))
        except Exception as error:  # foreign code was run
            raise failure(error) from None
    raise NotRecognised("computes no known experts")


def _computes(original: FunctionType, biased: bool, dtype: torch.dtype | None, given: torch.dtype) -> bool:
    matrices = [tensor.to(given) for tensor in _matrices(biased)]
    rest = [(0.6, 1), (7.0, 2)] if biased else [()]
    for counts in _COUNTS:
        x = _random(11, sum(counts), _SIZE).to(given)
        for limit_and_degree in rest:
            run, wanted = _call(original, *limit_and_degree), _call(formula(biased, dtype), *limit_and_degree)
            if not _agree(run, wanted, [*matrices, x], [torch.tensor(counts)], dtype):
                return False
    return True


def _zeroes(original: FunctionType, biased: bool, dtype: torch.dtype | None) -> bool:
    """Whether rows past those of the last expert come out as zero; multiplied in groups they are undefined."""
    if dtype is not None:
        return False
    x, counts = _random(12, 9, _SIZE), [2, 0, 3]
    run = _call(original, 7.0, 1) if biased else _call(original)
    try:
        out = run(*_matrices(biased), x, torch.tensor(counts))
    except RuntimeError:  # takes no such rows
        return False
    return out.shape[0] == len(x) and not bool(out[sum(counts) :].any())


def _matrices(biased: bool) -> list[Tensor]:
    """In the order of the functions' parameters; 0.4 keeps the half types apart from each other's rounding."""
    shapes: Sequence[tuple[int, ...]]
    if biased:
        shapes = ((3, 2 * _HIDDEN, _SIZE), (3, 2 * _HIDDEN), (3, _SIZE, _HIDDEN), (3, _SIZE))
    else:
        shapes = ((3, _HIDDEN, _SIZE), (3, _SIZE, _HIDDEN), (3, _HIDDEN, _SIZE))
    return [0.4 * _random(20 + i, *shape) for i, shape in enumerate(shapes)]


def _call(function: Callable[..., Tensor], *limit_and_degree: Any) -> Callable[..., Tensor]:
    """The function of matrices, x and counts."""
    if not limit_and_degree:
        return function
    limit, degree = limit_and_degree
    return lambda *given: function(*given[:-2], limit, *given[-2:], degree)


def formula(biased: bool, dtype: torch.dtype | None) -> Formula:
    """The formula by a loop over the experts, with the parameters of the function."""

    def gated(w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, counts: Tensor) -> Tensor:
        w1, w2, w3, rows = (tensor.to(dtype or tensor.dtype) for tensor in (w1, w2, w3, x))
        parts = []
        for one, a, b, c in zip(rows.split(counts.tolist()), w1, w2, w3, strict=True):
            parts.append((F.silu(one @ a.t()) * (one @ c.t())) @ b.t())
        return torch.cat(parts).type_as(x)

    def limited(
        w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, limit: float, x: Tensor, counts: Tensor, degree: int
    ) -> Tensor:
        w1, w2, rows = (tensor.to(dtype or tensor.dtype) for tensor in (w1, w2, x))
        parts = []
        for i, one in enumerate(rows.split(counts.tolist())):
            hidden = limited_gate(one @ w1[i].t() + b1[i].to(rows.dtype), limit)
            parts.append(hidden @ w2[i].t() + shared_bias(b2[i], degree).to(rows.dtype))
        return torch.cat(parts)

    return limited if biased else gated


def limited_gate(x: Tensor, limit: float) -> Tensor:
    """gpt_oss: (rows, 2 * hidden), gates and linear parts in turn → (rows, hidden)."""
    gate, linear = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(_ALPHA * gate) * (linear + 1)


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, degree: int) -> Tensor:
        return bias / degree

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def shared_bias(bias: Tensor, degree: int) -> Tensor:
    """A bias that each of `degree` ranks adds its share of, before their results are summed; its gradient is whole."""
    return bias if degree == 1 else _Shared.apply(bias, degree)


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _agree(
    ours: Formula,
    theirs: Formula,
    leaves: Sequence[Tensor],
    rest: Sequence[Tensor],
    dtype: torch.dtype | None = None,
) -> bool:
    """Whether two functions give the same result and the same gradients, as exactly as the type allows.

    Args:
        dtype: in which they compute, if it is not that of the arguments.
    """
    tensors = [tensor.clone().requires_grad_() for tensor in leaves]
    mine, wanted = ours(*tensors, *rest), theirs(*tensors, *rest)
    if not isinstance(mine, Tensor) or not _same(mine, wanted, dtype):
        return False
    direction = _random(30, *wanted.shape).to(wanted.dtype)
    found = [torch.autograd.grad(result, tensors, direction, allow_unused=True) for result in (mine, wanted)]
    return all(a is not None and _same(a, b, dtype) for a, b in zip(*found, strict=True))


def _same(a: Tensor, b: Tensor, dtype: torch.dtype | None) -> bool:
    return a.dtype is b.dtype and same(a.to(dtype or a.dtype), b.to(dtype or b.dtype), loose=True)
