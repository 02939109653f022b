"""Scores of a mixture of experts, and the choice of the best of them.

Of equal scores the lower expert comes first. Sources: operator documents torch_npu.npu_moe_gating_top_k and
npu_moe_gating_top_k_softmax (op-plugin), aclnnMoeGatingTopK, aclnnMoeGatingTopKBackward, aclnnMoeGatingTopKSoftmax and
aclnnMoeGatingTopKSoftmaxV2 (ops-transformer/moe).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import limits
from .base import UNDEFINED, Call, kernel

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_SIGMOID = 1


def _check_scores(call: Call, x: Tensor, dims: tuple[int, ...]) -> None:
    call.require(x.dtype in _FLOATS, "x", f"dtype {x.dtype} is not supported")
    call.require(x.dim() in dims, "x", f"has {x.dim()} dimensions, not one of {dims}")
    call.require(x.numel() > 0, "x", "empty tensors are not documented")


def _best(values: Tensor, k: int) -> Tensor:
    """The places of the k largest, in falling order."""
    return values.argsort(dim=-1, descending=True, stable=True)[..., :k]


def _check_groups(call: Call, experts: int, k: int, k_group: int, group_count: int) -> None:
    most = limits.MOE_EXPERTS
    call.require(experts <= most, "x", f"{experts} experts, at most {most}")
    call.require(group_count > 0, "group_count", f"{group_count} is not positive")
    call.require(experts % group_count == 0, "group_count", f"{experts} experts cannot be split into {group_count}")
    size = experts // group_count
    call.require(size > 2, "group_count", f"{size} experts in a group, must be more than 2")
    padded = -(-size // 32) * 32 * group_count
    call.require(padded <= most, "group_count", f"groups padded to 32 have {padded} experts, at most {most}")
    call.require(1 <= k_group <= group_count, "k_group", f"{k_group} is not in [1, {group_count}]")
    call.require(1 <= k <= size * k_group, "k", f"{k} is not in [1, {size * k_group}]")


def _without_other_groups(values: Tensor, k_group: int, group_count: int, mode: int) -> Tensor:
    groups = values.unflatten(-1, (group_count, -1))
    of_groups = groups.amax(-1) if mode == 0 else groups.topk(2, -1).values.sum(-1)
    kept = torch.zeros(of_groups.shape, dtype=torch.bool).scatter_(-1, _best(of_groups, k_group), True)
    return groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)


@kernel(
    "npu_moe_gating_top_k",
    models=(
        "x",
        "k",
        "bias",
        "k_group",
        "group_count",
        "group_select_mode",
        "renorm",
        "norm_type",
        "out_flag",
        "routed_scaling_factor",
        "eps",
    ),
)
def npu_moe_gating_top_k(
    call: Call,
    x: Tensor,
    k: int,
    bias: Tensor | None,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
) -> tuple[Tensor, Tensor, object]:
    """``x [N, E]`` → weights of the k best (dtype of x), their experts (int32), scores of all (float32).

    Softmax weights (``norm_type`` 0) are never divided by their sum, sigmoid weights (1) always. The bias takes part in
    the choice alone. Without ``out_flag`` the scores are not written, and the gradient, which reads them, is undefined.
    """
    _check_scores(call, x, (2,))
    _check_groups(call, x.shape[-1], k, k_group, group_count)
    call.require(renorm == 0, "renorm", f"{renorm} is not 0")
    call.require(norm_type in (0, _SIGMOID), "norm_type", f"{norm_type} is neither 0 nor 1")
    call.require(group_select_mode in (0, 1), "group_select_mode", f"{group_select_mode} is neither 0 nor 1")
    scores = x.float().sigmoid() if norm_type == _SIGMOID else x.float().softmax(-1)
    choice = scores
    if bias is not None:
        call.require(bias.dtype == x.dtype, "bias", f"dtype {bias.dtype} is not that of x {x.dtype}")
        call.require(bias.shape == x.shape[-1:], "bias", f"shape {list(bias.shape)} is not [{x.shape[-1]}]")
        choice = scores + bias.float()
    if group_count > 1:
        choice = _without_other_groups(choice, k_group, group_count, group_select_mode)
    index = _best(choice, k)
    weights = scores.gather(-1, index)
    if norm_type == _SIGMOID:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return (weights * routed_scaling_factor).to(x.dtype), index.int(), scores if out_flag else UNDEFINED


@kernel(
    "npu_moe_gating_top_k_backward",
    models=("x_norm", "grad_y", "expertIdx", "renorm", "norm_type", "routed_scaling_factor", "eps"),
)
def npu_moe_gating_top_k_backward(
    call: Call,
    x_norm: Tensor,
    grad_y: Tensor,
    expertIdx: Tensor,
    renorm: int,
    norm_type: int,
    routed_scaling_factor: float,
    eps: float,
) -> Tensor:
    """The gradient of x, in the dtype of ``grad_y``; of sigmoid scores alone."""
    call.require(call.soc.name not in limits.NOT_ON_950, "x_norm", "the operator is not documented for this chip")
    call.require(norm_type == _SIGMOID, "norm_type", f"{norm_type} is not 1: softmax has no gradient")
    call.require(renorm == 0, "renorm", f"{renorm} is not 0")
    call.require(x_norm.dtype == torch.float32, "x_norm", f"dtype {x_norm.dtype} is not float32")
    call.require(grad_y.dtype in _FLOATS, "grad_y", f"dtype {grad_y.dtype} is not supported")
    call.require(expertIdx.dtype == torch.int32, "expertIdx", f"dtype {expertIdx.dtype} is not int32")
    call.require(x_norm.dim() == 2 and x_norm.numel() > 0, "x_norm", "must be [N, E], not empty")
    call.require(2 <= x_norm.shape[1] <= limits.MOE_EXPERTS, "x_norm", f"{x_norm.shape[1]} experts")
    call.require(grad_y.shape == expertIdx.shape, "expertIdx", f"shape {list(expertIdx.shape)} is not that of grad_y")
    call.require(grad_y.dim() == 2 and grad_y.shape[0] == x_norm.shape[0], "grad_y", f"shape {list(grad_y.shape)}")
    call.require(expertIdx.is_contiguous(), "expertIdx", "must be contiguous")
    index = expertIdx.long()
    inside = (index >= 0) & (index < x_norm.shape[1])
    call.require(bool(inside.all()), "expertIdx", f"experts must be in [0, {x_norm.shape[1]})")
    chosen = x_norm.gather(1, index)
    total = chosen.sum(-1, keepdim=True) + eps
    grad = grad_y.float() * routed_scaling_factor
    grad = (grad - (grad * chosen / total).sum(-1, keepdim=True)) / total
    grad = torch.zeros_like(x_norm).scatter_add(1, index, grad)
    return (grad * x_norm * (1 - x_norm)).to(grad_y.dtype)


def _softmax_and_best(
    call: Call, x: Tensor, finished: Tensor | None, k: int, of_scores: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of all, the k best experts (by score or by x), and those experts as they are handed out."""
    _check_scores(call, x, (2, 3))
    most = min(x.shape[-1], limits.MOE_SOFTMAX_TOP_K)
    call.require(0 < k <= most, "k", f"{k} is not in [1, {most}]")
    scores = x.float().softmax(-1)
    index = _best(scores if of_scores else x.float(), k)
    shown = index
    if finished is not None:
        call.require(finished.dtype == torch.bool, "finished", f"dtype {finished.dtype} is not bool")
        call.require(finished.shape == x.shape[:-1], "finished", f"shape {list(finished.shape)} is not that of x")
        shown = index.masked_fill(finished.unsqueeze(-1), x.shape[-1])
    return scores, index, shown.int()


@kernel("npu_moe_gating_top_k_softmax", models=("x", "finished", "k"))
def npu_moe_gating_top_k_softmax(
    call: Call, x: Tensor, finished: Tensor | None, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax, then the k best: weights (dtype of x), experts (int32), and for each the row ``slot * rows + row``.

    Experts of finished rows are their number.
    """
    scores, index, shown = _softmax_and_best(call, x, finished, k)
    rows = index.numel() // k
    row = torch.arange(rows * k, dtype=torch.int32).view(k, rows).t().contiguous().view(index.shape)
    return scores.gather(-1, index).to(x.dtype), shown, row


@kernel("npu_moe_gating_top_k_softmax_v2", models=("x", "k", "finished", "renorm", "output_softmax"))
def npu_moe_gating_top_k_softmax_v2(
    call: Call, x: Tensor, k: int, finished: Tensor | None, renorm: int | None, output_softmax: bool | None
) -> tuple[Tensor, Tensor, object]:
    """``renorm`` 0: softmax, then the k best; 1: the k best, then softmax of them.

    The third result is the softmax of all in float32, with ``renorm`` 0 and ``output_softmax``; else it is not written.
    """
    call.require(renorm in (None, 0, 1), "renorm", f"{renorm} is neither 0 nor 1")
    scores, index, shown = _softmax_and_best(call, x, finished, k, of_scores=not renorm)
    weights = x.float().gather(-1, index).softmax(-1) if renorm else scores.gather(-1, index)
    third = scores if output_softmax and not renorm else UNDEFINED
    return weights.to(x.dtype), shown, third
