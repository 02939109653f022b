"""Which forwards are torchtitan's flex attentions."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from ...discovery.bracket import NotRecognised, plain, quiet
from .layouts import BLNH, BNLH, Layout
from .stand_in import standing_in

MEANING = "flex attention under a block mask"
KEYWORDS = {"attention_masks", "score_mod", "scale", "enable_gqa", "out_transform"}
WRAPPER_KEYWORDS = {"score_mod", "block_mask", "scale", "return_lse", "enable_gqa"}


def recognise_wrapper(forward: FunctionType) -> Layout:
    """The layout of a forward that hands its arguments to `flex_attention`, and back what that returns.

    Raises:
        NotRecognised: it does something else.
    """
    given: dict[str, Any] = {}

    def stub(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        given.update(query=query, key=key, value=value, **options)
        return query * 2.0 + 1.0, query.sum(-1) - 3.0

    probe = standing_in(plain(forward), flex_attention, stub)
    if probe is None:
        raise NotRecognised("does not call flex_attention")
    try:
        with quiet():
            generator = torch.Generator().manual_seed(3)
            tensors = [torch.randn(2, 3, 5, 4, generator=generator) for _ in range(3)]
            options = {"block_mask": object(), "scale": 0.3, "enable_gqa": True, "return_lse": True}
            out, lse = probe(SimpleNamespace(), *tensors, **options)
            inside = [given.pop(name) for name in ("query", "key", "value")]
            for layout in (BNLH, BLNH):
                swap = layout is BLNH  # flex attention itself takes (B, N, L, H)
                if not all(
                    torch.equal(a, b.transpose(1, 2) if swap else b) for a, b in zip(inside, tensors, strict=True)
                ):
                    continue
                wanted = inside[0] * 2.0 + 1.0, inside[0].sum(-1) - 3.0
                wanted = tuple(x.transpose(1, 2) for x in wanted) if swap else wanted
                kept = {name: given[name] for name in options if name in given} == options
                extra = {name: v for name, v in given.items() if name not in options and v is not None}
                if kept and not extra and torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1]):
                    return layout
    except Exception as error:
        raise NotRecognised(f"fails on a small input: {type(error).__name__}: {str(error)[:80]}") from None
    raise NotRecognised("does more than flex_attention")
