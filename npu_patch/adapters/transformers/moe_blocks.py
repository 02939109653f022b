"""Mixture of experts of transformers 4: blocks that go through a list of gated MLPs, one after another.

All experts run as three grouped products.  The matrices stay where they are, in one linear layer each; experts that are
more than plain linear layers, or have hooks, leave the block to the original.

An expert to which no token is sent gets a gradient of zeros; most originals leave None.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import functions
from ...discovery import NotRecognised
from ...discovery.mlp import GatedMeaning, recognise_gated_mlp
from ...discovery.moe_blocks import JITTER, NORMALISES, Choice, Routed, looks_like_a_loop, recognise_block
from ...ops import permute
from ...ops.gmm_list import grouped_matmul_list, unsupported_list
from ...registry import Target, Unrecognised
from ...sites import Site
from . import EXPERTS, LIBRARY
from .activations import activation, learn
from .classes import defined

_OP = "gmm"
#: What the forward of a class with stacked matrices reads.
_STACKED = frozenset(("gate_up_proj", "down_proj", "bmm"))
#: What an MLP class computes, and the forward that does.
Known = Mapping[type, tuple[GatedMeaning, Any]]


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The blocks of a modeling file."""
    own = [cls for _, cls in defined(module)]
    if EXPERTS not in sys.modules:  # transformers 4
        for cls in own:
            if set(getattr(getattr(functions.beneath(cls.forward), "__code__", None), "co_names", ())) >= _STACKED:
                yield Unrecognised(
                    _OP, LIBRARY, module.__name__, f"{cls.__name__}.forward", "its experts are not separate modules"
                )
    blocks = [
        (cls, name)
        for cls in own
        for name, function in vars(cls).items()
        if looks_like_a_loop(functions.beneath(function))
    ]
    if not blocks:
        return
    learn()
    known = dict(_gated(own))
    for cls, name in blocks:
        path = f"{cls.__name__}.{name}"
        try:
            meaning = recognise_block(vars(cls)[name])
            if not known:
                raise NotRecognised("its experts are no gated MLPs")
        except NotRecognised as error:
            yield Unrecognised(_OP, LIBRARY, module.__name__, path, str(error))
            continue
        factory = _choice(meaning, known) if isinstance(meaning, Choice) else _routed(meaning, known)
        yield Target(_OP, LIBRARY, module.__name__, path, factory, str(meaning))


def _gated(classes: list[type]) -> Iterator[tuple[type, tuple[GatedMeaning, Any]]]:
    for cls in classes:
        if "forward" in vars(cls):
            try:
                meaning = recognise_gated_mlp(cls)
            except NotRecognised:
                continue
            if not meaning.packed and not meaning.between and meaning.activation is not None:
                yield cls, (meaning, functions.beneath(vars(cls)["forward"]))


class _Experts(NamedTuple):
    gates: list[Tensor]
    ups: list[Tensor]
    downs: list[Tensor]
    activation: Any


def _choice(meaning: Choice, known: Known) -> Callable[[Any, Site], Callable[..., Tensor]]:
    def factory(original: Any, site: Site) -> Callable[..., Tensor]:
        def moe(self: Any, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            reason = "experts of several ranks" if "ep_rank" in meaning.reads and self.ep_rank != 0 else None
            result: Tensor
            if reason is None:
                reason, experts = _ready(self.experts, known, hidden_states, ids, weights)
                if reason is None:
                    site.hit()
                    return _run(experts, hidden_states, ids, weights)
            site.fallback(reason)
            result = original(self, hidden_states, ids, weights)
            return result

        return moe

    return factory


def _routed(meaning: Routed, known: Known) -> Callable[[Any, Site], Callable[..., Any]]:
    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def forward(self: Any, hidden_states: Tensor) -> Any:
            if _left_behind(self):
                return original(self, hidden_states)
            reason = _otherwise(self, meaning, hidden_states)
            if reason is None:
                tokens = hidden_states.view(-1, hidden_states.shape[-1])
                reason, experts = _ready(self.experts, known, tokens)
            if reason is not None:
                site.fallback(reason)
                return original(self, hidden_states)
            site.hit()
            logits = self.gate(tokens)
            weights, ids = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), self.top_k, dim=-1)
            if getattr(self, NORMALISES) if meaning.normalised is None else meaning.normalised:
                weights = weights / weights.sum(dim=-1, keepdim=True)
            total = _run(experts, tokens, ids, weights.to(tokens.dtype))
            if meaning.shared:
                total = total + F.sigmoid(self.shared_expert_gate(tokens)) * self.shared_expert(tokens)
            return total.reshape(hidden_states.shape), logits

        return forward

    return factory


def _left_behind(block: nn.Module) -> bool:
    """Whether the class has its original back: recording router logits leaves the forward of that time on instances."""
    forward = type(block).forward
    return "forward" in block.__dict__ and functions.beneath(forward) is forward


def _otherwise(block: Any, meaning: Routed, hidden_states: Tensor) -> str | None:
    """What this block does that its class need not."""
    if hidden_states.dim() != 3:
        return "the hidden states are not (batch, sequence, size)"
    if JITTER in meaning.reads and block.training and getattr(block, JITTER) > 0:
        return "the router is trained with noise"
    if "num_experts" in meaning.reads and block.num_experts != len(block.experts):
        return "not as many experts as the router knows"
    return None


def _ready(
    modules: Any, known: Known, tokens: Tensor, ids: Tensor | None = None, weights: Tensor | None = None
) -> tuple[str | None, Any]:
    """(reason, None), or (None, the experts as the operator takes them)."""
    if tokens.dim() != 2 or tokens.shape[0] == 0:
        return "no tokens", None
    reason, experts = _experts(modules, known)
    if reason is not None:
        return reason, None
    dtype, wide = _computed_in(tokens), experts.gates[0].shape[1]
    if dtype is not None:
        experts = experts._replace(**{name: [one.to(dtype) for one in getattr(experts, name)] for name in _MATRICES})
    first = tokens if dtype is None else tokens.to(dtype)
    counts = tokens.new_empty(len(experts.gates), dtype=torch.int64)
    for rows, matrices in (
        (first, experts.gates),
        (first, experts.ups),
        (first.new_empty(0, wide), experts.downs),
    ):
        if (reason := unsupported_list(rows, matrices, counts)) is not None:
            return reason, None
    if ids is not None and weights is not None and (ids.dim() != 2 or weights.shape != ids.shape):
        return "expert ids and weights are not (tokens, top_k)", None
    return None, experts


_MATRICES = ("gates", "ups", "downs")


def _computed_in(tokens: Tensor) -> torch.dtype | None:
    """The type in which autocast lets linear layers compute."""
    kind = tokens.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _experts(modules: Any, known: Known) -> tuple[str | None, Any]:
    if type(modules) is not nn.ModuleList or not len(modules):
        return "the experts are in no plain list", None
    kind = type(modules[0])
    if kind not in known:
        return f"an expert is a {kind.__name__}", None
    meaning, forward = known[kind]
    if functions.beneath(kind.forward) is not forward:
        return "the forward of the experts was replaced", None
    names = (meaning.projections[meaning.gate], meaning.projections[1 - meaning.gate], meaning.down)
    gates: list[Tensor] = []
    ups: list[Tensor] = []
    downs: list[Tensor] = []
    own = activation(getattr(modules[0], str(meaning.activation)))
    for expert in modules:
        if type(expert) is not kind:
            return "the experts are of several classes", None
        if (reason := _touched(expert)) is not None:
            return f"an expert has {reason}", None
        found = activation(getattr(expert, str(meaning.activation)))
        if found[0] is not None or found != own:
            return found[0] or "the experts have several activations", None
        for name, matrices in zip(names, (gates, ups, downs), strict=True):
            linear = getattr(expert, name)
            if type(linear) is not nn.Linear:
                return f"a projection of an expert is a {_named(type(linear))}", None
            if (reason := _touched(linear)) is not None:
                return f"a projection of an expert has {reason}", None
            if linear.bias is not None:
                return "a projection of an expert has a bias", None
            matrices.append(linear.weight.t())
    return None, _Experts(gates, ups, downs, getattr(modules[0], str(meaning.activation)))


def _named(kind: type) -> str:
    """With its package: quantised layers and adapters call theirs Linear, too."""
    return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"


def _touched(module: nn.Module) -> str | None:
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "hooks"
    return "a forward of its own" if "forward" in module.__dict__ else None


def _sorts_by_operator() -> bool:
    """Whether the op `permute` is on: it shares this place with `gmm`, which owns it."""
    import npu_patch

    return bool(npu_patch.strategy()["permute"]["enabled"])


_sorts_by_operator._dynamo_marked_constant = True  # type: ignore[attr-defined]  # asked once, while tracing


def _run(experts: _Experts, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """(tokens, size): the experts' results, weighted and summed in the wider type of the two."""
    count, top_k = ids.shape
    fused = _sorts_by_operator() and permute.unsupported(tokens, ids) is None and weights.is_floating_point()
    counts = (ids.reshape(-1, 1) == torch.arange(len(experts.gates), device=ids.device)).sum(0)
    if fused:
        rows, order = permute.permute(tokens, ids)
    else:
        by_expert = ids.reshape(-1).argsort(stable=True)
        rows, order = tokens[by_expert // top_k], by_expert.argsort()
    rows = rows.to(experts.gates[0].dtype)
    gate = grouped_matmul_list(rows, experts.gates, counts, cumulative=False)
    up = grouped_matmul_list(rows, experts.ups, counts, cumulative=False)
    out = grouped_matmul_list(experts.activation(gate) * up, experts.downs, counts, cumulative=False)
    if fused and permute.unsupported_combine(out, order, weights) is None:
        total = permute.combine(out, order, weights, rounded=False, top_k=top_k)
    else:
        total = (out[order].view(count, top_k, -1) * weights.unsqueeze(-1)).sum(1)
    return total.to(tokens.dtype)
