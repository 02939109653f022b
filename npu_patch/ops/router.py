"""Scores of experts, the best of them, and their weights: `npu_moe_gating_top_k` and `npu_moe_gating_top_k_softmax`.

Three plans, by what the operators can do.

* Sigmoid scores whose weights are divided by their sum: `npu_moe_gating_top_k`, which always divides them, and its
  gradient.
* Softmax scores whose weights are divided by their sum, of all experts without bias, groups or use for the scores of
  the others: that is the softmax of the chosen logits, `npu_moe_gating_top_k_softmax_v2` with renorm.
* Everything else: the operators give the choice and the scores, PyTorch the rest.

Only the first has a gradient in torch_npu, and none for softmax: "the backward supports sigmoid alone".  The others are
written here.  Scores are float32 in each of them, as in the models.  Of experts with equal scores the lower comes
first; torch.topk leaves that open.

Source: operator documents torch_npu.npu_moe_gating_top_k and npu_moe_gating_top_k_softmax (op-plugin),
aclnnMoeGatingTopK, aclnnMoeGatingTopKBackward, aclnnMoeGatingTopKSoftmaxV2 (ops-transformer/moe).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .availability import is_ascend950, schema_has
from .guards import FLOATS, FUNCTORCH, NOT_ON_NPU, PLAIN_TYPES, dtype_name, subclass_reason, transforming

_EXPERTS, _SOFTMAX_TOP_K = 2048, 1024
_NOTHING = 1e-12
"""Less than this beside a sum of the largest of at most 2048 probabilities is lost in float32."""


@dataclass(frozen=True)
class Routing:
    """How experts are chosen.

    Args:
        score: "softmax" or "sigmoid".
        top_k: how many are chosen.
        eps: weights are divided by their sum and this; None: they are not divided.
        scale: factor of the weights.
        groups: experts are split into so many groups, of which only some count.
        kept: how many groups count.
        of_group: the score of a group is the sum of its best two ("top2") or its best one ("max").
    """

    score: str
    top_k: int
    eps: float | None = None
    scale: float = 1.0
    groups: int = 1
    kept: int = 1
    of_group: str = "top2"


def SAVE_OPS() -> list[Any]:
    """The operator overloads that selective activation checkpointing should save, as far as they exist here."""
    names = ("npu_moe_gating_top_k", "npu_moe_gating_top_k_softmax", "npu_moe_gating_top_k_softmax_v2")
    return [getattr(torch.ops.npu, name).default for name in names if schema_has(name)]


def unavailable(x: Tensor) -> str | None:
    """Why nothing can be fused, as far as a tensor tells that the logits are computed from."""
    if x.device.type != "npu":
        return NOT_ON_NPU
    if transforming():
        return FUNCTORCH
    if type(x) not in PLAIN_TYPES and (reason := subclass_reason(x)):
        return reason
    return None


def unsupported(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> str | None:
    """Why the fused operators cannot take this call, or None.

    Args:
        logits: (tokens, experts).
        routing: see there.
        bias: (experts,), added to the scores for the choice alone.
    """
    if (reason := unavailable(logits)) is not None:
        return reason
    if logits.dtype not in FLOATS:
        return f"logits of type {dtype_name(logits.dtype)}"
    if logits.dim() != 2:
        return "logits are not (tokens, experts)"
    return unfit(logits.shape[0], logits.shape[1], routing, bias, logits.device)


def unfit(tokens: int, experts: int, routing: Routing, bias: Tensor | None, device: torch.device) -> str | None:
    """The same, as far as it can be told without logits."""
    k = routing.top_k
    if tokens == 0:
        return "no tokens"
    if not 2 < experts <= _EXPERTS:
        return f"not 3 to {_EXPERTS} experts"
    if bias is not None and (reason := _unfit(bias, experts, device)) is not None:
        return reason
    groups, kept = routing.groups, routing.kept
    if groups < 1 or experts % groups or not 1 <= kept <= groups:
        return f"{kept} of {groups} groups of {experts} experts"
    size = experts // groups
    if size <= 2 or -(-size // 32) * 32 * groups > _EXPERTS:
        return f"groups of {size} of {experts} experts"
    if not 1 <= k <= min(size * kept, _SOFTMAX_TOP_K):
        return f"{k} of {size * kept} experts"
    if routing.score == "sigmoid" and routing.eps is None and groups == 1:
        return "sigmoid scores that are not divided by their sum: fused, that launches as much"
    return _absent(routing, bias)


def _unfit(bias: Tensor, experts: int, device: torch.device) -> str | None:
    if type(bias) not in PLAIN_TYPES and (reason := subclass_reason(bias)):
        return reason
    if bias.device != device:
        return "the bias is on another device"
    if bias.shape != (experts,):
        return "the bias is not (experts,)"
    if bias.dtype not in FLOATS:
        return f"a bias of type {dtype_name(bias.dtype)}"
    return None


def _absent(routing: Routing, bias: Tensor | None) -> str | None:
    simple = _simple(routing, bias)
    name = "npu_moe_gating_top_k_softmax_v2" if simple else "npu_moe_gating_top_k"
    return None if schema_has(name) else f"torch_npu has no {name}"


def _simple(routing: Routing, bias: Tensor | None) -> bool:
    """Whether softmax over all experts is all there is to the scores."""
    return routing.score == "softmax" and bias is None and routing.groups == 1


def route(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, *, dtype: torch.dtype, scores: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Chooses experts for tokens.

    Args:
        logits: (tokens, experts); scores are computed from them in float32.
        routing: see there.
        bias: (experts,), added to the scores for the choice alone; it gets no gradient.
        dtype: of the weights, which are rounded once.
        scores: the scores of all experts are wanted, too.

    Returns:
        Weights (tokens, top_k) of type `dtype`, in the order of falling scores; experts (tokens, top_k), int64; scores
        of all experts (tokens, experts), float32, or None.  Weights and scores have a gradient for the logits.

    Raises:
        RuntimeError: the operator refuses the arguments; ask `unsupported` first.
    """
    train = torch.is_grad_enabled() and logits.requires_grad
    divides, scale = routing.eps is not None, routing.scale
    if _simple(routing, bias) and divides and not scores and (routing.eps or 0.0) < _NOTHING:
        narrow = not train and dtype is logits.dtype and scale == 1.0
        weights, experts = _SoftmaxOfBest.apply(logits, routing.top_k, dtype if narrow else torch.float32)
        return _finished(weights, scale, dtype), experts, None
    if routing.score != "softmax" or divides or bias is not None or dtype is not logits.dtype:
        logits = logits.float()  # else the operator's own rounding of the weights is the one that is wanted
    if bias is not None:
        bias = bias.float()
    if routing.score == "sigmoid" and divides:
        weights, experts, found = _Divided.apply(logits, bias, routing, train, scores)
        return _finished(weights, 1.0, dtype), experts, found if scores else None
    weights, experts, found = _Chosen.apply(logits, bias, routing, train, scores)
    if divides:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.eps)
    return _finished(weights, 1.0 if _scales(routing) else scale, dtype), experts, found if scores else None


def _finished(weights: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return (weights if scale == 1.0 else weights * scale).to(dtype)


def _gate(logits: Tensor, bias: Tensor | None, routing: Routing, scale: float, out: bool) -> tuple[Tensor, ...]:
    """Weights, experts and, if asked for, scores."""
    results: tuple[Tensor, ...] = torch.ops.npu.npu_moe_gating_top_k.default(
        logits,
        routing.top_k,
        bias=bias,
        k_group=routing.kept,
        group_count=routing.groups,
        group_select_mode=1 if routing.of_group == "top2" else 0,
        norm_type=1 if routing.score == "sigmoid" else 0,
        out_flag=out,
        routed_scaling_factor=scale,
        eps=routing.eps or 0.0,
    )
    return results


def _through_scores(scores: Tensor, grad: Tensor, score: str) -> Tensor:
    """The gradient of the logits from that of all scores."""
    if score == "sigmoid":
        return torch.ops.aten.sigmoid_backward(grad, scores)
    return torch._softmax_backward_data(grad, scores, -1, scores.dtype)


class _Divided(torch.autograd.Function):
    """Sigmoid scores, weights divided by their sum.

    Saves the scores, as the original does, and the choice.  The scores are a result, so that as saved they belong to
    the graph: the gradient has one too.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, bias: Tensor | None, routing: Routing, train: bool, wanted: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        keep = train or wanted
        # Without the flag the operator leaves the scores unwritten, and its gradient would read them.
        weights, index, scores = _gate(logits, bias, routing, routing.scale, keep)
        experts = index.long()
        ctx.mark_non_differentiable(experts)
        ctx.routing = routing
        if train:
            ctx.save_for_backward(scores, index)
        return weights, experts, scores if keep else None

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, _: Any, grad_scores: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None]:
        scores, index = ctx.saved_tensors
        routing = ctx.routing
        result = None
        if grad is not None and _has_gradient():
            result = torch.ops.npu.npu_moe_gating_top_k_backward.default(
                scores, grad, index, norm_type=1, routed_scaling_factor=routing.scale, eps=routing.eps
            )
        elif grad is not None:
            experts = index.long()
            chosen = scores.gather(1, experts)
            total = chosen.sum(-1, keepdim=True) + routing.eps
            of_chosen = grad * routing.scale
            of_chosen = (of_chosen - (of_chosen * chosen / total).sum(-1, keepdim=True)) / total
            spread = torch.zeros_like(scores) if grad_scores is None else grad_scores
            grad_scores = spread.scatter_add(1, experts, of_chosen)
        if grad_scores is not None:
            through = _through_scores(scores, grad_scores, "sigmoid")
            result = through if result is None else result + through
        return result, None, None, None, None


def _has_gradient() -> bool:
    """Whether the backward operator can be used here: it has neither a derivative nor a shape function of its own."""
    if torch.is_grad_enabled() or is_compiling() or is_ascend950():
        return False
    return schema_has("npu_moe_gating_top_k_backward")


def _scales(routing: Routing) -> bool:
    """Whether the operator multiplies by the scale, where weights are not divided by their sum."""
    return routing.score == "softmax" and routing.eps is None


class _Chosen(torch.autograd.Function):
    """Scores of the best, undivided; saves the scores, as the original does, and the choice."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, bias: Tensor | None, routing: Routing, train: bool, wanted: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        keep = train or wanted
        scale = routing.scale if _scales(routing) else 1.0
        if _simple(routing, bias) and scale == 1.0:
            weights, index, scores = torch.ops.npu.npu_moe_gating_top_k_softmax_v2.default(
                logits, k=routing.top_k, renorm=0, output_softmax=keep
            )
            experts = index.long()
        else:
            sigmoid = routing.score == "sigmoid"
            weights, index, scores = _gate(logits, bias, routing, scale, keep or sigmoid)
            experts = index.long()
            if sigmoid:  # the operator has divided them
                weights = scores.gather(1, experts)
        ctx.mark_non_differentiable(experts)
        ctx.score, ctx.scale, ctx.dtype = routing.score, scale, logits.dtype
        if train:
            ctx.save_for_backward(scores, experts)
        return weights, experts, scores if keep else None

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, _: Any, grad_scores: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None]:
        scores, experts = ctx.saved_tensors
        if grad is not None:
            grad = grad.float() if ctx.scale == 1.0 else grad.float() * ctx.scale
            if grad_scores is None:
                grad_scores = torch.zeros_like(scores).scatter(1, experts, grad)
            else:
                grad_scores = grad_scores.scatter_add(1, experts, grad)
        result = None if grad_scores is None else _through_scores(scores, grad_scores, ctx.score).to(ctx.dtype)
        return result, None, None, None, None


class _SoftmaxOfBest(torch.autograd.Function):
    """Softmax of the k largest logits; saves these weights and the choice, and nothing of the other experts."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        weights, index, _ = torch.ops.npu.npu_moe_gating_top_k_softmax_v2.default(
            logits.to(dtype), k=k, renorm=1, output_softmax=False
        )
        experts = index.long()
        ctx.mark_non_differentiable(experts)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        ctx.save_for_backward(weights, experts)
        return weights, experts

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, _: Any
    ) -> tuple[Tensor | None, None, None]:
        if grad is None:
            return None, None, None
        weights, experts = ctx.saved_tensors
        grad = _through_scores(weights, grad, "softmax").to(ctx.dtype)
        return grad.new_empty(ctx.shape).zero_().scatter(1, experts, grad), None, None
