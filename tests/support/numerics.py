"""How numbers are judged: whole models in float32, single patched calls in bfloat16.

float32: `assert_same_training(stock, patched)` on two `Run`s.  bfloat16: `recording(owner, name)` takes down every call
of a function in one unpatched run, with the gradient that came back; `assert_no_worse` replays the calls through
another implementation and compares the pooled errors against a float64 formula.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten


@dataclass(frozen=True)
class Run:
    """One training step: the loss and, per parameter, its gradient on the CPU in float64."""

    loss: float
    gradients: Mapping[str, torch.Tensor]


def training_step(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Run:
    """Gradients from zero, forward, backward."""
    model.zero_grad(set_to_none=True)
    value = loss()
    value.backward()
    gradients = {name: p.grad.detach().cpu().double() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Run(float(value.detach().cpu()), gradients)


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """norm(value - reference) / norm(reference); the norm itself where the reference is zero."""
    value, reference = value.detach().cpu().double(), reference.detach().cpu().double()
    scale = reference.norm().item()
    return (value - reference).norm().item() / (scale or 1.0)


def assert_same_training(stock: Run, patched: Run, gradient: float = 1e-5, loss: float = 1e-6) -> None:
    """The float32 criterion: the same parameters get gradients, each within `gradient`, the loss within `loss`."""
    assert math.isfinite(stock.loss), stock.loss
    assert abs(patched.loss - stock.loss) <= loss * abs(stock.loss), (stock.loss, patched.loss)
    assert stock.gradients.keys() == patched.gradients.keys()
    errors = {name: relative_error(patched.gradients[name], g) for name, g in stock.gradients.items()}
    worst = max(errors, key=lambda name: errors[name] if math.isfinite(errors[name]) else math.inf)
    assert errors[worst] <= gradient, f"{worst}: gradient differs by {errors[worst]:.2e}"


@dataclass
class Call:
    """The arguments of one call, detached, and the gradients that came back to its outputs (None: none came)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)


def _keep(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.requires_grad)


@contextlib.contextmanager
def recording(
    owner: Any, name: str, write: Callable[[Any, str, Any], None] = setattr, read: Callable[[Any, str], Any] = getattr
) -> Iterator[list[Call]]:
    """Inside: every call of `owner.name` is taken down; `read` and `write` reach places such as mappings."""
    original = read(owner, name)
    calls: list[Call] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        kept_args, kept_kwargs = tree_map_only(torch.Tensor, _keep, (args, kwargs))
        call = Call(kept_args, kept_kwargs)
        result = original(*args, **kwargs)
        for i, output in enumerate(x for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor)):
            if output.requires_grad:
                output.register_hook(lambda g, i=i: call.gradients.__setitem__(i, g.detach().clone()))
        calls.append(call)
        return result

    write(owner, name, recorded)
    try:
        yield calls
    finally:
        write(owner, name, original)


@dataclass(frozen=True)
class Replay:
    """Outputs, and gradients of every tensor argument and module parameter that required one, in a fixed order."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor]


def replay(function: Callable[..., Any], call: Call, float64: bool = False) -> Replay:
    """Run a recorded call through `function`; with `float64` on the CPU, on float64 copies of tensors and modules."""
    flat, spec = tree_flatten((call.args, call.kwargs))
    leaves: list[torch.Tensor] = []
    for i, x in enumerate(flat):
        if isinstance(x, torch.Tensor):
            y = x.detach().cpu() if float64 else x.detach()
            if float64 and y.is_floating_point():
                y = y.double()
            flat[i] = y.requires_grad_(x.requires_grad)
            leaves += [flat[i]] if x.requires_grad else []
        elif isinstance(x, torch.nn.Module):
            if float64:
                flat[i] = copy.deepcopy(x).cpu().double()
            leaves += [p for p in flat[i].parameters(recurse=False) if p.requires_grad]
    args, kwargs = tree_unflatten(flat, spec)
    outputs = [x for x in tree_flatten(function(*args, **kwargs))[0] if isinstance(x, torch.Tensor)]
    pairs = [(outputs[i], g.cpu().double() if float64 else g) for i, g in call.gradients.items()]
    gradients: list[torch.Tensor] = []
    if pairs and leaves:
        heads, grads = zip(*pairs, strict=True)
        found = torch.autograd.grad(heads, leaves, grads, allow_unused=True)
        gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
    return Replay([x.detach() for x in outputs], gradients)


@dataclass
class Pool:
    """Squared errors of one output or gradient, over calls."""

    squares: float = 0.0
    half_ulps: float = 0.0
    count: int = 0

    def add(self, value: torch.Tensor, exact: torch.Tensor) -> None:
        difference = value.detach().cpu().double() - exact
        self.squares += difference.square().sum().item()
        unit = torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
        exponent = torch.floor(torch.log2(exact.abs().clamp_min(torch.finfo(value.dtype).tiny)))
        self.half_ulps += (unit / 2 * torch.exp2(exponent)).square().sum().item()
        self.count += difference.numel()

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / max(self.count, 1))

    @property
    def half_ulp(self) -> float:
        return math.sqrt(self.half_ulps / max(self.count, 1))


def errors(
    function: Callable[..., Any],
    calls: list[Call],
    formula: Callable[..., Any],
) -> dict[str, Pool]:
    """Pooled error of every output ("output 0", …) and gradient ("gradient 0", …) against the float64 formula."""
    assert calls, "nothing was recorded"
    pools: dict[str, Pool] = {}
    for call in calls:
        ours, exact = replay(function, call), replay(formula, call, float64=True)
        for kind, values, references in (
            ("output", ours.outputs, exact.outputs),
            ("gradient", ours.gradients, exact.gradients),
        ):
            assert len(values) == len(references), (kind, len(values), len(references))
            for i, (value, reference) in enumerate(zip(values, references, strict=True)):
                assert value.shape == reference.shape, (kind, i, value.shape, reference.shape)
                pools.setdefault(f"{kind} {i}", Pool()).add(value, reference)
    return pools


def assert_no_worse(
    fused: Callable[..., Any],
    original: Callable[..., Any],
    formula: Callable[..., Any],
    calls: list[Call],
    factor: float = 1.05,
) -> None:
    """The bfloat16 criterion: dtypes of outputs and gradients are the original's, and so is the pooled RMS error.

    Args:
        fused, original: implementations with one signature.
        formula: the same in float64; gets float64 CPU copies of the recorded arguments.
        calls: what `recording` gave.
        factor: how much larger than the original's error the fused error may be.  Where the original is exact, half a
            unit in the last place is allowed.
    """
    for call in calls[:2]:
        ours, theirs = replay(fused, call), replay(original, call)
        for kind in ("outputs", "gradients"):
            mine, stock = getattr(ours, kind), getattr(theirs, kind)
            assert [(x.dtype, x.shape) for x in mine] == [(x.dtype, x.shape) for x in stock], kind
    ours_pool, theirs_pool = errors(fused, calls, formula), errors(original, calls, formula)
    assert ours_pool.keys() == theirs_pool.keys()
    for name, pool in ours_pool.items():
        stock_rms = theirs_pool[name].rms
        limit = factor * stock_rms if stock_rms > 0 else pool.half_ulp
        assert pool.rms <= limit, f"{name}: rms error {pool.rms:.3e}, the original's {stock_rms:.3e}"


def pooled_gradient_error(run: Run, exact: Run) -> float:
    """norm(all gradients - exact) / norm(exact), over all parameters together."""
    assert run.gradients.keys() == exact.gradients.keys()
    off = sum((run.gradients[name].double() - g.double()).square().sum().item() for name, g in exact.gradients.items())
    return math.sqrt(off / sum(g.double().square().sum().item() for g in exact.gradients.values()))
