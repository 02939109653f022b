"""torchtitan's flex attentions: a `BlockMask` says what each query sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention.flex_attention import BlockMask

from ...ops import attention as op
from ...ops import attention_lse
from ...ops.attention import Mask
from ...ops.guards import FLOATS, FUNCTORCH, NOT_ON_NPU, subclass_reason, transforming
from ...sites import Site
from . import masks
from .block_mask import NpuBlockMask, source_of
from .layouts import BLNH, Layout
from .sinks import sinks_of
from .typecheck import TYPE_CHECKING_REASON, type_checking

_NO_MASK = Mask.full()


def adapter(layout: Layout, original: Any, site: Site) -> Callable[..., Tensor]:
    """For forwards with an `out_transform`."""
    inside, outside, lse_outside = layout.inside, layout.outside, layout.lse
    same = layout is BLNH

    def forward(
        self: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_masks: BlockMask,
        score_mod: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        reason, out, lse = "a score_mod", None, None
        if score_mod is None and q.dim() == layout.rank:
            query, key, value = (q, k, v) if same else (inside(q), inside(k), inside(v))
            sinks = None if out_transform is None else sinks_of(out_transform)
            asked = (attention_masks, scale, enable_gqa, out_transform is not None, site, sinks)
            reason, out, lse = _attend(query, key, value, *asked)  # type: ignore[assignment]
        elif score_mod is None:
            reason = f"query is not {layout.name}"
        if reason is not None:
            site.fallback(reason)
            return original(
                self,
                q,
                k,
                v,
                attention_masks=attention_masks,
                score_mod=score_mod,
                scale=scale,
                enable_gqa=enable_gqa,
                out_transform=out_transform,
                **kwargs,
            )
        assert out is not None
        if out_transform is None or lse is None:
            return out if same else outside(out)
        return out_transform(outside(out), lse_outside(lse))

    return forward


def wrapper_adapter(layout: Layout, original: Any, site: Site) -> Callable[..., Any]:
    """For forwards with `return_lse`."""
    inside, outside, lse_outside = layout.inside, layout.outside, layout.lse

    def forward(
        self: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        score_mod: Any = None,
        block_mask: BlockMask | None = None,
        scale: float | None = None,
        return_lse: bool = False,
        enable_gqa: bool = False,
    ) -> Any:
        reason, out, lse = "a score_mod", None, None
        if score_mod is None and q.dim() == 4:
            asked = (block_mask, scale, enable_gqa, return_lse, site)
            reason, out, lse = _attend(inside(q), inside(k), inside(v), *asked)  # type: ignore[assignment]
        elif score_mod is None:
            reason = f"query is not {layout.name}"
        if reason is not None:
            site.fallback(reason)
            return original(
                self,
                q,
                k,
                v,
                score_mod=score_mod,
                block_mask=block_mask,
                scale=scale,
                return_lse=return_lse,
                enable_gqa=enable_gqa,
            )
        assert out is not None
        if not return_lse:
            return outside(out)
        assert lse is not None
        return outside(out), lse_outside(lse)

    return forward


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    with_lse: bool,
    site: Site,
    sinks: Tensor | None = None,
) -> tuple[str | None, Tensor | None, Tensor | None]:
    """(reason, None, None), or None with the output (B, L, N, H) and, if asked for, the log-sum-exp (B, L, N).

    Args:
        sinks: where the operator takes them the output is rescaled by them, and there is no log-sum-exp.
    """
    if torch.is_autocast_enabled("npu"):
        query, key, value = cast(query, key, value)
    asked = (query, key, value, block_mask, scale, enable_gqa)
    if sinks is not None:
        reason, mask, _ = _choose(*asked, False, site.options)
        if reason is None:
            shape, tensors, layout = query.shape, *_laid_out(query, key, value, mask)
            if op.unsupported(*tensors, mask, layout=layout, scale=scale, sinks=sinks) is None:
                site.hit()
                out = op.attention(*tensors, mask, layout=layout, scale=scale, sinks=sinks)
                return None, out if layout == "BSND" else out.view(*shape[:3], -1), None
    reason, mask, plan = _choose(*asked, with_lse, site.options)
    if reason is not None:
        return reason, None, None
    site.hit()
    if plan is not None and plan[1] == "BSND":
        return None, op.run(plan, query, key, value), None
    batch, length, heads, _ = query.shape
    if plan is not None:
        q, k, v = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        return None, op.run(plan, q, k, v).view(batch, length, heads, -1), None
    tensors, layout = _laid_out(query, key, value, mask)
    if not with_lse:
        out = op.attention(*tensors, mask, layout=layout, scale=scale)
        return None, out if layout == "BSND" else out.view(batch, length, heads, -1), None
    out, lse = attention_lse.attention(*tensors, mask, layout=layout, scale=scale)
    if layout == "BSND":
        return None, out, lse.transpose(1, 2)
    return None, out.view(batch, length, heads, -1), lse.view(batch, length, heads)


def _laid_out(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> tuple[tuple[Tensor, Tensor, Tensor], str]:
    """The tensors as the operator takes them with a mask, and its name for that."""
    if mask.kind != "documents":
        return (query, key, value), "BSND"
    return (query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)), "TND"


def cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as autocast, which is on, hands them to the stock attentions; the operator is not cast by it."""
    dtype = torch.get_autocast_dtype("npu")
    return tuple(t.to(dtype) if t.device.type == "npu" and t.dtype in FLOATS else t for t in tensors)


def shape_reason(query: Tensor, key: Tensor, enable_gqa: bool) -> str | None:
    """Why the original would refuse these (B, L, N, H) tensors, or None."""
    if query.dim() != 4 or key.dim() != 4:
        return "query and key are not (B, L, N, H)"
    if query.shape[2] != key.shape[2] and not enable_gqa:
        return "fewer key heads than query heads without enable_gqa"
    return None


def _choose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    with_lse: bool,
    options: Mapping[str, Any],
) -> tuple[str | None, Mask, op.Plan | None]:
    """Why the operator cannot take the call, or None; the mask for it; and the plan, where one can be had."""
    plain = type(query) is type(key) is type(value) is Tensor
    if not plain and (reason := subclass_reason(query, key, value)):
        return reason, _NO_MASK, None
    if transforming():
        return FUNCTORCH, _NO_MASK, None
    if type_checking():
        return TYPE_CHECKING_REASON, _NO_MASK, None
    source = getattr(block_mask, "source", None)
    dtype, index = query.dtype, query.get_device()  # -1 on the host
    if (
        source is None  # a foreign mask
        or with_lse
        or not plain
        or is_compiling()
        or key.dtype is not dtype
        or value.dtype is not dtype
        or key.get_device() != index
        or value.get_device() != index
    ):
        return *_ask(query, key, value, block_mask, scale, enable_gqa, with_lse, options), None
    # What is left depends on shapes, type and device alone: asked once per mask, for all layers of a step.
    limit = options["dense_mask_limit"]
    question = (query.shape, key.shape, value.shape, dtype, index, scale, enable_gqa, limit)
    answer: tuple[str | None, Mask, op.Plan | None] | None = source.answers.get(question)
    if answer is None:
        reason, mask = _ask(query, key, value, block_mask, scale, enable_gqa, False, options)
        plan = None
        if reason is None:
            tensors, layout = _laid_out(query, key, value, mask)
            found = op.plan(*tensors, mask, layout, scale)
            plan = None if isinstance(found, str) else found
        answer = reason, mask, plan
        if reason is not None or plan is not None:
            source.answers[question] = answer
    return answer


def _ask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    with_lse: bool,
    options: Mapping[str, Any],
) -> tuple[str | None, Mask]:
    if query.device.type != "npu":
        return NOT_ON_NPU, _NO_MASK
    if reason := shape_reason(query, key, enable_gqa):
        return reason, _NO_MASK
    ask = attention_lse.unsupported if with_lse else op.unsupported
    if block_mask is None:
        return ask(query, key, value, _NO_MASK, layout="BSND", scale=scale), _NO_MASK
    if not isinstance(block_mask, BlockMask):
        return f"a {type(block_mask).__name__} for a block mask", _NO_MASK
    batch, length, heads = query.shape[:3]
    limit = masks.limit_of(options)
    if length != key.shape[1] and not isinstance(block_mask, NpuBlockMask):
        return "more keys than queries, as in context parallelism", _NO_MASK
    source = source_of(block_mask, batch, (length, key.shape[1]), query.device)
    if isinstance(source, str):
        return source, _NO_MASK
    mask = source.compact if source.shared(batch) else None
    if mask is not None and mask.kind == "documents":
        if is_compiling():
            mask = source.traced() or mask
        elif mask.q_ends[-1] != batch * length:
            mask = None  # one row of documents for all samples
    if mask is not None:
        tensors, layout = _laid_out(query, key, value, mask)
        reason = ask(*tensors, mask, layout=layout, scale=scale)
        if reason is None or mask.kind != "documents" or length > limit:
            return reason, mask
    # Documents that the operator does not take packed are written out like a mask without a compact form.
    early = ask(query, key, value, _NO_MASK, layout="BSND", scale=scale)
    if early is not None:
        return early, _NO_MASK
    mask = source.dense(batch, heads, limit)
    if mask is None:
        return "a mask that torch.compile would have to write out", _NO_MASK
    return ask(query, key, value, mask, layout="BSND", scale=scale), mask
