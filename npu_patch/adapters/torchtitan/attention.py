"""torchtitan's inner attentions: `FlexAttention` and `ScaledDotProductAttention`, on (B, L, N, H) tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask

from ...discovery.bracket import NotRecognised, quiet, same
from ...ops import attention as op
from ...ops.attention import Mask
from ...ops.guards import FLOATS, FUNCTORCH, NOT_ON_NPU, subclass_reason, transforming
from ...registry import Target, Unrecognised
from ...sites import Site
from . import masks
from .block_mask import source_of
from .typecheck import TYPE_CHECKING_REASON, type_checking

_OP, _LIBRARY = "attention", "torchtitan"
_NO_MASK = Mask.full()
_BLNH = [
    "q_BLNH",
    "k_BLNH",
    "v_BLNH",
]  # torchtitan names its layouts in the parameters; other layouts are another generation


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """Attention classes, mask builders and the activation-checkpoint save list, as far as the module has them."""
    name = module.__name__
    for cls in list(vars(module).values()):
        if not (isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == name):
            continue
        forward = vars(cls).get("forward")
        if not isinstance(forward, FunctionType):
            continue
        positional, keywords = _parameters(forward)
        path = f"{cls.__name__}.forward"
        if positional[1:] != _BLNH:
            continue
        if keywords == {"attention_masks", "score_mod", "scale", "enable_gqa", "out_transform"}:
            yield Target(_OP, _LIBRARY, name, path, _flex_adapter, "flex attention under a block mask")
        elif keywords == {"attention_masks", "scale", "enable_gqa", "is_causal"}:
            try:
                _check_plain(forward)
            except NotRecognised as error:
                yield Unrecognised(_OP, _LIBRARY, name, path, str(error))
                continue
            yield Target(_OP, _LIBRARY, name, path, _plain_adapter, "causal or full attention")
    yield from masks.find(module)
    if isinstance(vars(module).get("_get_default_save_ops"), FunctionType):
        yield Target(
            _OP,
            _LIBRARY,
            name,
            "_get_default_save_ops",
            _save_ops_adapter,
            "operators whose results are kept",
            supporting=True,
        )


def _parameters(function: FunctionType) -> tuple[list[str], set[str]]:
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return positional, {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


def _check_plain(forward: FunctionType) -> None:
    """Check that a forward computes causal and full attention with grouped queries.

    Raises:
        NotRecognised: it computes something else.
    """
    module = SimpleNamespace(sdpa_backends=[SDPBackend.MATH])
    try:
        with quiet():
            generator = torch.Generator().manual_seed(11)
            q, k, v = (torch.randn(2, 5, heads, 8, generator=generator) for heads in (4, 2, 2))
            scores = torch.einsum("blnh,bmnh->bnlm", q, k.repeat_interleave(2, 2))
            hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
            for causal in (True, False):
                for scale in (None, 0.3):
                    scaled = scores * (8**-0.5 if scale is None else scale)
                    weights = (scaled.masked_fill(hidden, -torch.inf) if causal else scaled).softmax(-1)
                    wanted = torch.einsum("bnlm,bmnh->blnh", weights, v.repeat_interleave(2, 2))
                    result = forward(module, q, k, v, scale=scale, enable_gqa=True, is_causal=causal)
                    if not same(result, wanted):
                        raise NotRecognised("computes no known attention")
    except NotRecognised:
        raise
    except Exception as error:
        raise NotRecognised(f"fails on a small input: {type(error).__name__}: {str(error)[:80]}") from None


# ---- call sites ------------------------------------------------------------------------------------------------------


def _shape_reason(query: Tensor, key: Tensor, enable_gqa: bool) -> str | None:
    if query.dim() != 4 or key.dim() != 4:
        return "query and key are not (B, L, N, H)"
    if query.shape[2] != key.shape[2] and not enable_gqa:
        return "fewer key heads than query heads without enable_gqa"
    return None


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as autocast, which is on, hands them to the stock attentions; the operator is not cast by it."""
    dtype = torch.get_autocast_dtype("npu")
    return tuple(t.to(dtype) if t.device.type == "npu" and t.dtype in FLOATS else t for t in tensors)


def _flex_adapter(original: Any, site: Site) -> Callable[..., Tensor]:
    def forward(
        self: Any,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: BlockMask,
        score_mod: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        with_lse = out_transform is not None
        reason: str | None = "a score_mod"
        mask = _NO_MASK
        query, key, value = q_BLNH, k_BLNH, v_BLNH
        if score_mod is None:
            if torch.is_autocast_enabled("npu"):
                query, key, value = _cast(query, key, value)
            reason, mask = _choose(query, key, value, attention_masks, scale, enable_gqa, with_lse, site.options)
        if reason is not None:
            site.fallback(reason)
            return original(
                self,
                q_BLNH,
                k_BLNH,
                v_BLNH,
                attention_masks=attention_masks,
                score_mod=score_mod,
                scale=scale,
                enable_gqa=enable_gqa,
                out_transform=out_transform,
                **kwargs,
            )
        site.hit()
        if mask.kind != "documents":
            if out_transform is None:
                return op.attention(query, key, value, mask, layout="BSND", scale=scale)
            out, lse = op.attention(query, key, value, mask, layout="BSND", scale=scale, return_lse=True)
            return out_transform(out, lse.transpose(1, 2))
        batch, length, heads, _ = query.shape
        q, k, v = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        if out_transform is None:
            return op.attention(q, k, v, mask, layout="TND", scale=scale).view(batch, length, heads, -1)
        out, lse = op.attention(q, k, v, mask, layout="TND", scale=scale, return_lse=True)
        return out_transform(out.view(batch, length, heads, -1), lse.view(batch, length, heads))

    return forward


def _choose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    with_lse: bool,
    options: Mapping[str, Any],
) -> tuple[str | None, Mask]:
    """Why the operator cannot take the call, or None; and the mask for it."""
    plain = type(query) is Tensor and type(key) is Tensor and type(value) is Tensor
    if not plain and (reason := subclass_reason(query, key, value)):
        return reason, _NO_MASK
    if transforming():
        return FUNCTORCH, _NO_MASK
    if type_checking():
        return TYPE_CHECKING_REASON, _NO_MASK
    source = getattr(block_mask, "source", None)
    dtype, device = query.dtype, query.device
    if (
        source is None  # a foreign mask
        or with_lse
        or not plain
        or is_compiling()
        or key.dtype is not dtype
        or value.dtype is not dtype
        or key.device != device
        or value.device != device
    ):
        return _ask(query, key, value, block_mask, scale, enable_gqa, with_lse, options)
    # What is left depends on shapes, type and device alone: asked once per mask, for all layers of a step.
    question = (query.shape, key.shape, value.shape, dtype, device, enable_gqa, options["dense_mask_limit"])
    answer = source.answers.get(question)
    if answer is None:
        answer = _ask(query, key, value, block_mask, scale, enable_gqa, False, options)
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
    if reason := _shape_reason(query, key, enable_gqa):
        return reason, _NO_MASK
    if not isinstance(block_mask, BlockMask):
        return "no block mask", _NO_MASK
    batch, length, heads = query.shape[:3]
    limit = masks.limit_of(options)
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
        packed = mask.kind == "documents"
        q, k, v = (t.flatten(0, 1) if packed else t for t in (query, key, value))
        layout = "TND" if packed else "BSND"
        reason = op.unsupported(q, k, v, mask, layout=layout, scale=scale, return_lse=with_lse)
        if reason is None or not packed or length > limit:
            return reason, mask
    # Documents that the operator does not take packed are written out like a mask without a compact form.
    early = op.unsupported(query, key, value, _NO_MASK, layout="BSND", scale=scale, return_lse=with_lse)
    if early is not None:
        return early, _NO_MASK
    mask = source.dense(batch, heads, limit)
    if mask is None:
        return "a mask that torch.compile would have to write out", _NO_MASK
    return op.unsupported(query, key, value, mask, layout="BSND", scale=scale, return_lse=with_lse), mask


def _plain_adapter(original: Any, site: Site) -> Callable[..., Tensor]:
    def forward(
        self: Any,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        mask = Mask.causal("upper_left") if is_causal else Mask.full()
        reason = TYPE_CHECKING_REASON if type_checking() else None
        if attention_masks is not None:
            reason = "attention masks"
        reason = reason or _shape_reason(q_BLNH, k_BLNH, enable_gqa)
        query, key, value = q_BLNH, k_BLNH, v_BLNH
        if reason is None:
            if torch.is_autocast_enabled("npu"):
                query, key, value = _cast(query, key, value)
            reason = op.unsupported(query, key, value, mask, layout="BSND", scale=scale)
        if reason is not None:
            site.fallback(reason)
            return original(
                self,
                q_BLNH,
                k_BLNH,
                v_BLNH,
                attention_masks=attention_masks,
                scale=scale,
                enable_gqa=enable_gqa,
                is_causal=is_causal,
                **kwargs,
            )
        site.hit()
        return op.attention(query, key, value, mask, layout="BSND", scale=scale)

    return forward


def _save_ops_adapter(original: Any, site: Site) -> Callable[..., set[Any]]:
    def save_ops() -> set[Any]:
        # Recomputing attention in the backward costs as much as computing it; torchtitan keeps its own for that reason.
        return set(original()) | set(op.SAVE_OPS())

    return save_ops
