"""Recognise blocks of experts that go through a list of modules, by what they compute.

Two forms: a method of (hidden states, expert ids, weights), and a whole block that also routes: softmax, top-k, weights
that may be divided by their sum, beside a shared expert or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .bracket import NotRecognised, failure, foreign_code, no_random_draws, plain, quiet, same

_HIDDEN, _EXPERTS, _TOKENS = 6, 5, 7
NORMALISES = "norm_topk_prob"
JITTER = "jitter_noise"


@dataclass(frozen=True)
class Choice:
    """Experts and weights are given: the sum of the experts' weighted results, in the wider type of the two."""

    reads: frozenset[str]

    def __str__(self) -> str:
        return "a loop over experts"


@dataclass(frozen=True)
class Routed:
    """Softmax in float32, the best `top_k`, weights in the type of the hidden states; returns the logits, too.

    Args:
        reads: attributes of the block that it reads.
        normalised: whether the weights are divided by their sum; None: where the attribute `norm_topk_prob` says so.
        shared: a shared expert is added, weighted by the sigmoid of its gate.
    """

    reads: frozenset[str]
    normalised: bool | None
    shared: bool

    def __str__(self) -> str:
        return "softmax, top-k and a loop over experts" + (", and a shared expert" if self.shared else "")


class _Expert(nn.Module):
    """The same for a row, whatever rows are beside it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(_draw(_HIDDEN, seed=seed))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.scale)


class _Linear(nn.Module):
    """A linear layer whose weight is not drawn from the global generator."""

    def __init__(self, out: int, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(_draw(out, _HIDDEN, seed=seed))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class _Block(nn.Module):
    """Notes what is read of it beside what every module has."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self.read: set[str] = set()
        self.experts = nn.ModuleList(_Expert(10 + index) for index in range(_EXPERTS))
        for name, value in values.items():
            setattr(self, name, value)

    def __getattribute__(self, name: str) -> Any:
        note = object.__getattribute__(self, "__dict__").get("read")
        if note is not None and not name.startswith("_"):
            note.add(name)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise NotRecognised(f"reads its attribute {name}") from None


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def looks_like_a_loop(function: Any) -> bool:
    """Whether a function of a class goes through experts, as far as its names tell."""
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    return "experts" in names and bool({"one_hot", "argsort"} & set(names))


@foreign_code()
def recognise_block(function: Any) -> Choice | Routed:
    """What a method or the forward of a block computes, forward and backward, in float32 and with bfloat16 tokens.

    Raises:
        NotRecognised: something else.
    """
    function = plain(function)
    taken = function.__code__.co_argcount
    if function.__code__.co_flags & 0x2C or function.__code__.co_kwonlyargcount or taken not in (2, 4):
        raise NotRecognised("takes other arguments")
    with quiet(), no_random_draws():
        return _choice(function) if taken == 4 else _routed(function)


def _call(function: Callable[..., Any], *given: Any) -> Any:
    try:
        return function(*given)
    except BaseException as error:
        raise failure(error) from None


def weighted(experts: nn.ModuleList, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The formula: each expert on every token, weighted, summed in the order of the experts."""
    total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, weights.dtype))
    for index, expert in enumerate(experts):
        weight = (weights * (ids == index)).sum(-1, keepdim=True)
        chosen = (ids == index).any(-1, keepdim=True)
        total = torch.where(chosen, total + expert(x) * weight, total)
    return total.to(x.dtype)


# ---- experts and weights are given -----------------------------------------------------------------------------------


def _choices() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for top_k, dtype, most in ((2, torch.float32, 5), (1, torch.float32, 3), (3, torch.bfloat16, 4)):
        x = _draw(_TOKENS, _HIDDEN).to(dtype).requires_grad_()
        ids = torch.stack([torch.randperm(most, generator=torch.Generator().manual_seed(i)) for i in range(_TOKENS)])
        yield x, ids[:, :top_k].contiguous(), _draw(_TOKENS, top_k, seed=1).requires_grad_()


def _choice(function: Callable[..., Any]) -> Choice:
    read: set[str] = set()
    for per_rank in (1, 7):
        for x, ids, weights in _choices():
            block = _Block(ep_rank=0, experts_per_rank=per_rank).to(x.dtype).train(per_rank == 1)
            found = _call(function, block, x, ids, weights)
            _compare((found,), (weighted(block.experts, x, ids, weights),), block, (x, weights))
            read |= block.read
    return Choice(frozenset(read))


# ---- the block routes ------------------------------------------------------------------------------------------------


def _routed(function: Callable[..., Any]) -> Routed:
    shared = any("shared" in name for name in function.__code__.co_names)
    answers: list[bool] = []
    read: set[str] = set()
    for flag in (True, False):
        kinds = [_routes(function, flag, shared, normalised, read) for normalised in (True, False)]
        if kinds.count(None) != 1:
            raise NotRecognised(next(kind for kind in kinds if kind) if all(kinds) else "weights are of no consequence")
        answers.append(kinds.index(None) == 0)
    normalised = answers[0] if answers[0] == answers[1] else None
    if answers == [False, True] or (normalised is None and NORMALISES not in read):
        raise NotRecognised("normalises its weights in an unknown way")
    return Routed(frozenset(read), normalised, shared)


def _routes(function: Callable[..., Any], flag: bool, shared: bool, normalised: bool, read: set[str]) -> str | None:
    """Why it does not compute this, or None."""
    for top_k, dtype, training in ((2, torch.float32, True), (3, torch.bfloat16, False), (2, torch.float32, False)):
        x = _draw(2, _TOKENS, _HIDDEN).to(dtype).requires_grad_()
        block = _stub(flag, top_k, shared).to(dtype).train(training)
        try:
            found = _call(function, block, x)
            if not isinstance(found, tuple):
                raise NotRecognised("does not return its result and the logits of the router")
            expected = routed(block, x, normalised, shared)
            _compare(found, expected, block, (x,))
        except NotRecognised as error:
            return str(error)
        read |= block.read
    return None


def _stub(flag: bool, top_k: int, shared: bool) -> _Block:
    values: dict[str, Any] = {"top_k": top_k, "num_experts": _EXPERTS, NORMALISES: flag, JITTER: 0.0}
    values["gate"] = _Linear(_EXPERTS, 20)
    if shared:
        values |= {"shared_expert": _Expert(3), "shared_expert_gate": _Linear(1, 21)}
    return _Block(**values)


def routed(block: Any, x: Tensor, normalised: bool, shared: bool) -> tuple[Tensor, Tensor]:
    """The formula."""
    tokens = x.reshape(-1, x.shape[-1])
    logits = block.gate(tokens)
    weights, ids = F.softmax(logits, dim=1, dtype=torch.float).topk(block.top_k, dim=-1)
    if normalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    total = weighted(block.experts, tokens, ids, weights.to(x.dtype))
    if shared:
        total = total + torch.sigmoid(block.shared_expert_gate(tokens)) * block.shared_expert(tokens)
    return total.reshape(x.shape), logits


def _compare(found: tuple[Any, ...], expected: tuple[Tensor, ...], block: nn.Module, given: tuple[Tensor, ...]) -> None:
    loose = given[0].dtype != torch.float32
    if len(found) != len(expected) or not all(isinstance(one, Tensor) for one in found):
        raise NotRecognised("returns something else than its result and the logits of the router")
    if not all(same(a, b, loose=loose) for a, b in zip(found, expected, strict=True)):
        raise NotRecognised("computes something else")
    leaves = [*given, *block.parameters()]
    head = [_draw(*one.shape, seed=5).to(one.dtype) for one in expected]
    ours = torch.autograd.grad(found, leaves, head, allow_unused=True)
    theirs = torch.autograd.grad(expected, leaves, head, allow_unused=True)
    for a, b in zip(ours, theirs, strict=True):
        if b is None:
            continue
        if a is None and not b.any():  # an expert without tokens has no gradient, or zeros
            continue
        if a is None or (not loose and not same(a, b, loose=True)):
            raise NotRecognised("its gradient is another one")
