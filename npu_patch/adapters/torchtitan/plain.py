"""torchtitan's wrappers of `scaled_dot_product_attention`: causal or full."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from ...discovery.bracket import NotRecognised, plain, quiet, same
from ...ops import attention as op
from ...ops.attention import Mask
from ...sites import Site
from . import dtensors
from .flex import cast, shape_reason
from .layouts import BLNH, BNLH, TNH, Layout
from .typecheck import TYPE_CHECKING_REASON, type_checking

MEANING = "causal or full attention"
KEYWORDS = {"scale", "enable_gqa", "is_causal"}
_CAUSAL, _FULL = Mask.causal("upper_left"), Mask.full()
_SDPA = F.scaled_dot_product_attention


def recognise(forward: FunctionType) -> Layout:
    """The layout in which a forward computes causal and full attention with grouped queries.

    Raises:
        NotRecognised: it computes something else.
    """
    failure: Exception | None = None
    for layout in (BLNH, BNLH, TNH):
        try:
            with quiet():
                if _computes(plain(forward), layout):
                    return layout
        except Exception as error:  # foreign code, on a layout that it may not take
            failure = failure or error
    if failure is not None:
        raise NotRecognised(f"fails on a small input: {type(failure).__name__}: {str(failure)[:80]}")
    raise NotRecognised("computes no known attention")


def _computes(forward: FunctionType, layout: Layout) -> bool:
    module = SimpleNamespace(sdpa_backends=[SDPBackend.MATH])
    generator = torch.Generator().manual_seed(11)
    batch = 1 if layout is TNH else 2
    q, k, v = (torch.randn(batch, 5, heads, 8, generator=generator) for heads in (4, 2, 2))
    scores = torch.einsum("blnh,bmnh->bnlm", q, k.repeat_interleave(2, 2))
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    tensors = [layout.outside(x) for x in (q, k, v)]
    for causal in (True, False):
        for scale in (None, 0.3):
            scaled = scores * (8**-0.5 if scale is None else scale)
            weights = (scaled.masked_fill(hidden, -torch.inf) if causal else scaled).softmax(-1)
            wanted = layout.outside(torch.einsum("bnlm,bmnh->blnh", weights, v.repeat_interleave(2, 2)))
            if not same(forward(module, *tensors, scale=scale, enable_gqa=True, is_causal=causal), wanted):
                return False
    return True


def adapter(layout: Layout, original: Any, site: Site) -> Callable[..., Tensor]:
    """For forwards that take attention masks and refuse them."""

    def forward(
        self: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        reason: str | None = "attention masks"
        out = None
        if attention_masks is None:
            reason, out = _attend(layout, q, k, v, scale, enable_gqa, is_causal, site)
        if reason is not None:
            site.fallback(reason)
            return original(
                self,
                q,
                k,
                v,
                attention_masks=attention_masks,
                scale=scale,
                enable_gqa=enable_gqa,
                is_causal=is_causal,
                **kwargs,
            )
        assert out is not None
        return out

    return forward


def wrapper_adapter(layout: Layout, original: Any, site: Site) -> Callable[..., Tensor]:
    """For forwards that know no masks."""

    def forward(
        self: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
    ) -> Tensor:
        reason, out = _attend(layout, q, k, v, scale, enable_gqa, is_causal, site)
        if reason is not None:
            site.fallback(reason)
            return original(self, q, k, v, scale=scale, enable_gqa=enable_gqa, is_causal=is_causal)
        assert out is not None
        return out

    return forward


def _attend(
    layout: Layout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    enable_gqa: bool,
    is_causal: bool,
    site: Site,
) -> tuple[str | None, Tensor | None]:
    if type_checking():
        return TYPE_CHECKING_REASON, None
    if F.scaled_dot_product_attention is not _SDPA:
        return "scaled_dot_product_attention is somebody else's, as in context parallelism", None
    if q.dim() != layout.rank or k.dim() != layout.rank or v.dim() != layout.rank:
        return f"query, key and value are not {layout.name}", None
    place, shape = None, (*q.shape[:-1], v.shape[-1])
    if dtensors.is_distributed(q):
        found = dtensors.attention(q, k, v, layout.heads)
        if isinstance(found, str):
            return found, None
        place, (q, k, v) = found
    same, inside = layout is BLNH, layout.inside
    query, key, value = (q, k, v) if same else (inside(q), inside(k), inside(v))
    if reason := shape_reason(query, key, enable_gqa):
        return reason, None
    if torch.is_autocast_enabled("npu"):
        query, key, value = cast(query, key, value)
    mask = _CAUSAL if is_causal else _FULL
    reason, out = op.attend(query, key, value, mask, "BSND", scale)
    if reason is not None:
        return reason, None
    site.hit()
    out = out if same or out is None else layout.outside(out)
    return None, out if place is None or out is None else place.wrap(out, torch.Size(shape))
