"""Functions that run all experts of a mixture of experts on sorted tokens, recognised by what they compute.

What is recognised are the parts of one contract: experts whose parameters are stacked, (experts, …), and whose own
attributes say how they are laid out.  `run` is that contract as a formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .. import functions
from .bracket import NotRecognised, no_random_draws, plain, quiet, same

_EXPERTS, _SIZE, _INNER, _TOKENS, _TOP_K = 4, 16, 8, 6, 2
_SCALES = ((1e-4,), (1.0,), (4.0,), (32.0,), (1024.0,))  # no clamp goes unseen


def pristine(module: ModuleType, function: Any) -> FunctionType:
    """The function as it was before this package, calling what its module had before this package.

    Raises:
        NotRecognised: it is no plain function of the module.
    """
    original = plain(functions.beneath(function))
    names = dict(vars(module))
    for name, value in list(names.items()):
        value = functions.beneath(value)
        if isinstance(value, FunctionType) and value.__globals__ is vars(module):
            names[name] = _moved(value, names)
    if original.__globals__ is not vars(module):
        raise NotRecognised("is a function of another module")
    return _moved(original, names)


def _moved(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    moved = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    moved.__kwdefaults__ = function.__kwdefaults__
    return moved


def _takes(function: FunctionType, parameters: tuple[str, ...]) -> None:
    code = function.__code__
    found = code.co_varnames[: code.co_argcount]
    if found != parameters or code.co_kwonlyargcount or code.co_flags & 0x0C:
        raise NotRecognised(f"takes ({', '.join(found)})")


# ---- the product of sorted rows with one matrix per expert -----------------------------------------------------------


def recognise_product(module: ModuleType, function: object) -> None:
    """Check `f(input, weight, offs)`: rows up to offs[e] times weight[e], in the dtype of the weights.

    Rows past the last offset may hold anything.

    Raises:
        NotRecognised: a case differs, in value, dtype or gradient.
    """
    product = pristine(module, function)
    _takes(product, ("input", "weight", "offs"))
    with quiet(), no_random_draws():
        for dtype, weight_dtype in _DTYPES:
            for counts, transposed in (
                ([3, 0, 4, 5], True),
                ([3, 0, 4, 5], False),
                ([3, 0, 4, 1], False),
                ([12], True),
            ):
                last = sum(counts)
                x, weight = _leaf(last, _SIZE, dtype=dtype), _leaf(len(counts), _INNER, _SIZE, dtype=weight_dtype)
                if not transposed:
                    weight = weight.detach().transpose(1, 2).contiguous().requires_grad_()
                offs = torch.tensor(counts).cumsum(0, dtype=torch.int32)

                def found(x: Tensor, w: Tensor, t: bool = transposed, offs: Tensor = offs) -> Tensor:
                    rows = torch.cat((x, x.new_ones(12 - len(x), _SIZE)))
                    result = _called(product, rows, w.transpose(1, 2) if t else w, offs)
                    return result[: len(x)]

                def wanted(x: Tensor, w: Tensor, t: bool = transposed, counts: Any = counts) -> Tensor:
                    pairs = zip(x.to(w.dtype).split(counts), w.transpose(1, 2) if t else w, strict=True)
                    return torch.cat([one @ matrix for one, matrix in pairs])

                _compare(found, wanted, (x, weight), "is not a product per group of rows")


_DTYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16))


def recognise_linear(module: ModuleType, function: object) -> None:
    """Check `f(input, weight, offs, bias=None, is_transposed=False)`: such a product, and a bias for each row.

    Raises:
        NotRecognised: a case differs.
    """
    linear = pristine(module, function)
    _takes(linear, ("input", "weight", "offs", "bias", "is_transposed"))
    if linear.__defaults__ != (None, False):
        raise NotRecognised(f"has the defaults {linear.__defaults__}")
    counts = [3, 0, 4, 5]
    offs = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    with quiet(), no_random_draws():
        for transposed in (False, True):
            for with_bias in (False, True):
                weight = _leaf(4, _SIZE, _INNER) if transposed else _leaf(4, _INNER, _SIZE)
                leaves = (_leaf(12, _SIZE), weight, *((_leaf(12, _INNER, seed=5),) if with_bias else ()))

                def found(x: Tensor, w: Tensor, *bias: Tensor, transposed: bool = transposed) -> Tensor:
                    result: Tensor = _called(
                        linear, x, w, offs, bias=bias[0] if bias else None, is_transposed=transposed
                    )
                    return result

                def wanted(x: Tensor, w: Tensor, *bias: Tensor, transposed: bool = transposed) -> Tensor:
                    pairs = zip(x.split(counts), w if transposed else w.transpose(1, 2), strict=True)
                    return torch.cat([one @ matrix for one, matrix in pairs]) + (bias[0] if bias else 0.0)

                _compare(found, wanted, leaves, "is not a linear layer per group of rows")


# ---- the gate --------------------------------------------------------------------------------------------------------


def recognise_gate(function: object) -> None:
    """Check `f(self, x)`: self.act_fn(first half of x) * second half.

    Raises:
        NotRecognised: it reads something else of self, or computes something else.
    """
    gate = plain(functions.beneath(function))
    if gate.__code__.co_argcount != 2 or gate.__code__.co_flags & 0x0C or gate.__code__.co_kwonlyargcount:
        raise NotRecognised("takes more than the projections")
    with quiet(), no_random_draws():
        for activation in (torch.tanh, lambda x: x.abs() - 2.0):
            for dtype in (torch.float32, torch.bfloat16):
                x = (_leaf(5, 12, dtype=dtype).detach() * torch.tensor(_SCALES, dtype=dtype)).requires_grad_()

                def wanted(x: Tensor, activation: Any = activation) -> Tensor:
                    return activation(x[:, :6]) * x[:, 6:]

                def found(x: Tensor, activation: Any = activation) -> Tensor:
                    result: Tensor = _called(gate, _OnlyActivation(activation), x)
                    return result

                _compare(found, wanted, (x,), "is another gate than act_fn(gate) * up", exact=True)


class _OnlyActivation:
    def __init__(self, activation: Any) -> None:
        self.act_fn = activation

    def __getattr__(self, name: str) -> Any:
        raise NotRecognised(f"reads {name}: another gate than act_fn(gate) * up")


# ---- all of it -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """What the attributes of a class of experts say."""

    has_gate: bool = True
    has_bias: bool = False
    is_transposed: bool = False
    has_post_expert_norm: bool = False
    parallel: bool = False


_LAYOUTS = (
    Layout(),
    Layout(is_transposed=True),
    Layout(is_transposed=True, has_bias=True),
    Layout(has_bias=True, has_gate=False),
    Layout(has_gate=False),
    Layout(has_post_expert_norm=True),
    Layout(parallel=True),
)


class Experts(nn.Module):
    """Experts of the contract."""

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_experts = _EXPERTS
        self.has_gate, self.has_bias = layout.has_gate, layout.has_bias
        self.is_transposed, self.has_post_expert_norm = layout.is_transposed, layout.has_post_expert_norm
        self._is_expert_parallel = layout.parallel
        wide = 2 * _INNER if layout.has_gate else _INNER
        first = "gate_up_proj" if layout.has_gate else "up_proj"
        self._matrix(first, wide, _SIZE, dtype, 2)
        self._matrix("down_proj", _SIZE, _INNER, dtype, 3)
        if layout.has_post_expert_norm:
            self.post_expert_norm = _Halve()

    def _matrix(self, name: str, rows: int, columns: int, dtype: torch.dtype, seed: int) -> None:
        shape = (columns, rows) if self.is_transposed else (rows, columns)
        self.register_parameter(name, nn.Parameter(_leaf(_EXPERTS, *shape, dtype=dtype, seed=seed).detach()))
        if self.has_bias:
            self.register_parameter(
                f"{name}_bias", nn.Parameter(_leaf(_EXPERTS, rows, dtype=dtype, seed=seed).detach())
            )

    def act_fn(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def _apply_gate(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x[..., ::2]) * (x[..., 1::2] + 1.0)  # a class's own, like that of gpt_oss


class _Halve(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().mean(-1, keepdim=True) + 0.5)


def run(experts: Any, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The contract, one token after another; an id that is no expert's adds nothing."""
    rows = []
    for token, choices, factors in zip(tokens, ids.tolist(), weights, strict=True):
        parts = []
        for expert, factor in zip(choices, factors, strict=True):
            if expert >= experts.num_experts:
                parts.append((token * 0.0).to(experts.down_proj.dtype) * (factor.detach() * 0.0))
                continue
            wide = _multiply(experts, "gate_up_proj" if experts.has_gate else "up_proj", token, expert)
            y = _multiply(
                experts, "down_proj", experts._apply_gate(wide) if experts.has_gate else experts.act_fn(wide), expert
            )
            parts.append((experts.post_expert_norm(y) if experts.has_post_expert_norm else y) * factor)
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows).to(tokens.dtype)


def _multiply(experts: Any, name: str, x: Tensor, expert: int) -> Tensor:
    matrix = getattr(experts, name)[expert]
    y = x.to(matrix.dtype).unsqueeze(0) @ (matrix if experts.is_transposed else matrix.t())
    return y[0] + getattr(experts, f"{name}_bias")[expert] if experts.has_bias else y[0]


def recognise_experts(module: ModuleType, function: object) -> None:
    """Check `f(self, hidden_states, top_k_index, top_k_weights)` against `run`, in every layout.

    Raises:
        NotRecognised: a layout differs, in value, dtype or gradient.
    """
    forward = pristine(module, function)
    _takes(forward, ("self", "hidden_states", "top_k_index", "top_k_weights"))
    with quiet(), no_random_draws():
        for layout in _LAYOUTS:
            _compare_layout(forward, layout, torch.float32, torch.float32)
        for weights_dtype in (torch.bfloat16, torch.float32):
            _compare_layout(forward, Layout(is_transposed=True, has_bias=True), torch.bfloat16, weights_dtype)


def _compare_layout(forward: FunctionType, layout: Layout, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
    experts = Experts(layout, dtype)
    ids = torch.tensor([[3, 0], [0, 1], [1, 3], [3, 1], [0, 3], [1, 0]])  # none for 2
    weights = _leaf(_TOKENS, _TOP_K, dtype=weights_dtype, seed=6)
    if layout.parallel:
        ids[1, 0] = ids[4, 1] = ids[4, 0] = _EXPERTS
        weights = weights.detach().masked_fill(ids == _EXPERTS, 0.0).requires_grad_()
    leaves = (_leaf(_TOKENS, _SIZE, dtype=dtype, seed=7), weights, *experts.parameters())

    def found(tokens: Tensor, weights: Tensor, *_: Tensor) -> Tensor:
        given = ids.clone()
        result: Tensor = _called(forward, experts, tokens, given, weights)
        if not torch.equal(given, ids):
            raise NotRecognised("writes into the experts' ids")
        return result

    def wanted(tokens: Tensor, weights: Tensor, *_: Tensor) -> Tensor:
        return run(experts, tokens, ids, weights)

    _compare(found, wanted, leaves, f"differs for {layout}")


# ---- comparing -------------------------------------------------------------------------------------------------------


def _leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.25
    return values.to(dtype).requires_grad_()


def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    try:
        result = function(*args, **kwargs)
    except NotRecognised:
        raise
    except Exception as error:
        raise NotRecognised(f"fails on a small input: {type(error).__name__}: {str(error)[:80]}") from None
    if not isinstance(result, Tensor):
        raise NotRecognised(f"returns a {type(result).__name__}")
    return result


def _compare(
    found: Callable[..., Tensor],
    wanted: Callable[..., Tensor],
    leaves: tuple[Tensor, ...],
    reason: str,
    exact: bool = False,
) -> None:
    ours, theirs = found(*leaves), wanted(*leaves)
    if not same(ours, theirs, loose=not exact):
        raise NotRecognised(reason)
    direction = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(8)).to(theirs.dtype)
    unit = max(torch.finfo(leaf.dtype).eps for leaf in leaves)
    for a, b in _gradients(ours, theirs, leaves, direction):
        if (a is None) is not (b is None) or (a is not None and b is not None and not _close(a, b, unit)):
            raise NotRecognised(f"{reason}: its gradients")


def _gradients(
    ours: Tensor, theirs: Tensor, leaves: tuple[Tensor, ...], direction: Tensor
) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    if not ours.requires_grad:
        raise NotRecognised("has no gradient")
    pairs = [torch.autograd.grad(y, leaves, direction, allow_unused=True) for y in (ours, theirs)]
    yield from zip(*pairs, strict=True)


def _close(a: Tensor, b: Tensor, unit: float) -> bool:
    """Sums of several rounded terms, in any order: to a few units of the largest of all."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    return bool(((a.float() - b.float()).abs() <= 8 * unit * b.float().abs().max().clamp_min(1e-6)).all())
