"""Attention together with the log-sum-exp of its scores, both with gradients.

The operator's own derivative takes the gradient of the output only.  That of the log-sum-exp fits into the same
backward operator: with p the probabilities, `d score = p * (dy @ v.T - rowsum(dy * out) + dlse)`, and the operator
makes `rowsum(dy * out)` of the two tensors that it is given.  So these get columns more, in which their product is
-dlse, and the value columns of zeros, which leave `dy @ v.T` as it is.

Source: operator documents torch_npu.npu_fusion_attention (op-plugin), aclnnFlashAttentionScoreGradV2 and
aclnnFlashAttentionUnpaddingScoreGradV2 (ops-transformer/attention/flash_attention_score_grad).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from . import attention as op
from .attention_limits import AXES
from .availability import schema_has
from .masks import Mask

_MAX_HEAD_SIZE = 768
_ROOM = 16  # added columns: as many as keep a head size a multiple of 16
_PARTS = {torch.float32: 1, torch.bfloat16: 3, torch.float16: 3}  # numbers whose sum is a float32


def unsupported(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, *, layout: str, scale: float | None = None
) -> str | None:
    """Why the fused operator cannot take this call, or None.  The arguments are those of `attention`."""
    reason = op.unsupported(query, key, value, mask, layout=layout, scale=scale)
    if reason is not None:
        return reason
    if layout == "TND" and not schema_has("npu_fusion_attention", "softmax_layout"):
        return "log-sum-exp of packed documents"
    if not _wants_gradient(query, key, value):
        return None
    if is_compiling():
        return "gradient through the log-sum-exp under torch.compile"
    if mask.bias is not None:
        return "gradient through the log-sum-exp with a bias"
    if not schema_has("npu_fusion_attention_grad", "sink"):  # the derivative's name and results in older torch_npu
        return "gradient through the log-sum-exp"
    if value.shape[-1] + _ROOM > _MAX_HEAD_SIZE:
        return "gradient through the log-sum-exp with a head size above 752"
    return None


def _wants_gradient(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, *, layout: str, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of the scaled scores.

    Args: as those of `ops.attention.attention`.

    Returns:
        The output in the layout and dtype of the query; and float32 (B, N, Sq), in TND (T, N).  A query that sees no
        key gets zeros and a log-sum-exp of about -3.4e38.

    Raises:
        RuntimeError: the operator refuses the arguments; ask `unsupported` first.
    """
    if not _wants_gradient(query, key, value):
        result: tuple[Tensor, Tensor] = op.attention(
            query, key, value, mask, layout=layout, scale=scale, return_lse=True
        )
        return result
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    pair: tuple[Tensor, Tensor] = _WithLse.apply(query, key, value, mask, layout, scale)
    return pair


class _WithLse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Mask, layout: str, scale: float
    ) -> tuple[Tensor, Tensor]:
        heads_at, length_at = AXES[layout]
        heads = query.shape[heads_at]
        options = op._mask_options(mask, query, query.shape[length_at], key.shape[length_at])
        if layout == "TND":
            options["softmax_layout"] = "TND"
        out, maximum, total, empty, seed, offset, numels = torch.ops.npu.npu_fusion_attention.default(
            query, key, value, heads, layout, scale=scale, **options
        )
        hidden = options.pop("atten_mask", None)
        ctx.save_for_backward(query, key, value, out, maximum, total, empty, hidden)
        ctx.set_materialize_grads(False)
        ctx.call = (heads, layout, scale, {**options, "seed": seed, "offset": offset, "numels": numels})
        return out, maximum[..., 0] + total[..., 0].log()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None and dlse is None:
            return (None,) * 6
        query, key, value, out, maximum, total, empty, hidden = ctx.saved_tensors
        heads, layout, scale, options = ctx.call
        dy = torch.zeros_like(out) if dy is None else dy
        size, value_size = query.shape[-1], value.shape[-1]
        if dlse is not None:
            if layout == "BSND":
                dlse = dlse.transpose(1, 2)
            dy = torch.cat((dy, _columns(-dlse, dy.dtype)), -1)
            out, value = F.pad(out, (0, _ROOM), value=1.0), F.pad(value, (0, _ROOM))
            missing = value.shape[-1] - size
            if missing > 0:  # the value may not be wider than the key; zeros change no score
                query, key = F.pad(query, (0, missing)), F.pad(key, (0, missing))
        dq, dk, dv = torch.ops.npu.npu_fusion_attention_grad.default(
            query,
            key,
            value,
            dy,
            heads,
            layout,
            softmax_max=maximum,
            softmax_sum=total,
            softmax_in=empty,
            attention_in=out,
            atten_mask=hidden,
            scale_value=scale,
            **options,
        )[:3]
        return dq[..., :size], dk[..., :size], dv[..., :value_size], None, None, None


def _columns(number: Tensor, dtype: torch.dtype) -> Tensor:
    """(…) float32 as (…, 16) numbers of a type whose sum it is."""
    parts, rest = [], number.float()
    for _ in range(_PARTS[dtype]):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].float()
    return F.pad(torch.stack(parts, -1), (0, _ROOM - len(parts)))
