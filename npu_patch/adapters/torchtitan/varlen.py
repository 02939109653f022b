"""torchtitan's attentions over packed documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention.varlen import varlen_attn

from ...discovery.bracket import NotRecognised, plain, quiet
from ...ops import attention as op
from ...ops import attention_lse
from ...ops.guards import FUNCTORCH, NOT_ON_NPU, transforming
from ...sites import Site
from .document_ends import Metadata, parts_of
from .layouts import BLNH, BNLH, TNH, Layout
from .sinks import sinks_of
from .stand_in import standing_in
from .typecheck import TYPE_CHECKING_REASON, type_checking

MEANING = "attention over packed documents"
KEYWORDS = {"attention_masks", "scale", "out_transform"}


@dataclass(frozen=True)
class Meaning:
    """How a forward hands its arguments to `varlen_attn`, and back what that returns.

    Args:
        layout: of query, key and value.
        packed: the output is (T, N, H) whatever the layout.
        cast: the type that they are cast to; None leaves them as they are.
        window: tokens before and after a query that it sees; None reads the module's `window_size`.
    """

    layout: Layout
    packed: bool
    cast: torch.dtype | None
    window: tuple[int, int] | None


def recognise(forward: FunctionType, transforms: bool = False) -> Meaning:
    """The meaning of a forward whose parameters are those of an attention over packed documents.

    Args:
        transforms: it takes an `out_transform` of the output and the log-sum-exp.

    Raises:
        NotRecognised: it does something else than call `varlen_attn` once.
    """
    given: dict[str, Any] = {}

    def stub(*args: Any, **kwargs: Any) -> Any:
        if given:
            raise NotRecognised("calls varlen_attn twice")
        given.update(args=args, kwargs=kwargs)
        out = args[0] * 2.0 + 1.0
        return (out, out[..., 0].float().transpose(0, 1)) if kwargs.get("return_aux") is not None else out

    probe = standing_in(plain(forward), varlen_attn, stub)
    if probe is None:
        raise NotRecognised("does not call varlen_attn")
    failure: Exception | None = None
    for layout in (BLNH, BNLH, TNH):
        try:
            with quiet():
                first, second = [_meaning(probe, given, layout, window) for window in ((2, 0), (3, 0))]
                if first is None:
                    continue
                if transforms and not _transforms(probe, given, layout):
                    raise NotRecognised("hands its out_transform something unknown")
            if first != second:
                raise NotRecognised("its window is not known")
            return first
        except NotRecognised:
            raise
        except Exception as error:  # foreign code, on a layout that it may not take
            failure = failure or error
    if failure is not None:
        raise NotRecognised(f"fails on a small input: {type(failure).__name__}: {str(failure)[:80]}")
    raise NotRecognised("does more than varlen_attn")


_BATCH, _LENGTH = 2, 6


def _inputs(probe: FunctionType, layout: Layout) -> tuple[list[Tensor], dict[str, Any]]:
    """Query, key and value as (T, N, H), and the other arguments."""
    generator = torch.Generator().manual_seed(5)
    packed = [torch.randn(_BATCH * _LENGTH, 3, 4, generator=generator) for _ in range(3)]
    lengths = torch.tensor([0, 2, 6, 12], dtype=torch.int32)
    metadata = _annotated(probe)(lengths, lengths, 6, 6)
    return packed, {"attention_masks": metadata, "scale": 0.3}


def _outside(packed: Tensor, layout: Layout) -> Tensor:
    return packed if layout is TNH else layout.outside(packed.unflatten(0, (_BATCH, _LENGTH)))


def _meaning(probe: FunctionType, given: dict[str, Any], layout: Layout, window: tuple[int, int]) -> Meaning | None:
    """The meaning that a run on small tensors shows; None where it is not one in this layout."""
    given.clear()
    inputs, options = _inputs(probe, layout)
    out = probe(SimpleNamespace(window_size=window), *(_outside(x, layout) for x in inputs), **options)
    args, kwargs = given["args"], dict(given["kwargs"])
    dtype, lengths = args[0].dtype, options["attention_masks"].cu_seq_q
    if not all(torch.equal(a, b.to(dtype)) for a, b in zip(args[:3], inputs, strict=True)):
        return None
    if args[3] is not lengths or args[4] is not lengths or args[5:] != (6, 6) or kwargs.pop("scale", None) != 0.3:
        return None
    used = kwargs.pop("window_size", (-1, -1))
    if {name for name, value in kwargs.items() if value} - {"num_splits"}:
        return None
    packed = args[0] * 2.0 + 1.0
    wanted = _outside(packed.float(), layout)
    as_packed = layout is not TNH and torch.equal(out, packed)
    if not as_packed and not (out.shape == wanted.shape and torch.equal(out, wanted)):
        return None
    cast = None if dtype is torch.float32 else dtype
    return Meaning(layout, as_packed, cast, None if used == window else used)


def _transforms(probe: FunctionType, given: dict[str, Any], layout: Layout) -> bool:
    """Whether an `out_transform` gets the output and the log-sum-exp in this layout, and its result comes back."""
    given.clear()
    inputs, options = _inputs(probe, layout)
    module, tensors = SimpleNamespace(window_size=(-1, 0)), [_outside(x, layout) for x in inputs]
    out, lse = probe(module, *tensors, **options, out_transform=lambda *given: given)
    made = given["args"][0] * 2.0 + 1.0
    rows = made[..., 0].float()
    statistics = rows if layout is TNH else layout.lse(rows.unflatten(0, (_BATCH, _LENGTH)))
    return torch.equal(out, _outside(made.to(out.dtype), layout)) and torch.equal(lse, statistics)


def _annotated(probe: FunctionType) -> Callable[..., Any]:
    """The class that the forward says its metadata are of, if it is a plain one."""
    annotation = probe.__globals__.get("VarlenMetadata")
    return annotation if isinstance(annotation, type) and issubclass(annotation, tuple) else Metadata


# ---- call sites ------------------------------------------------------------------------------------------------------


def adapter(meaning: Meaning, original: Any, site: Site) -> Callable[..., Tensor]:
    """For forwards with an `out_transform`."""

    def forward(
        self: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        window = meaning.window or self.window_size
        shared = q.dim() == meaning.layout.rank and bool(kwargs.get("enable_gqa"))
        result = _attend(meaning, q, k, v, attention_masks, scale, shared, window, out_transform, site)
        if isinstance(result, Tensor):
            return result
        site.fallback(result)
        return original(
            self, q, k, v, attention_masks=attention_masks, scale=scale, out_transform=out_transform, **kwargs
        )

    return forward


def wrapper_adapter(meaning: Meaning, original: Any, site: Site) -> Callable[..., Tensor]:
    """For forwards that share key heads unasked, and know no `out_transform`."""

    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, attention_masks: Any, scale: float | None = None) -> Tensor:
        window = meaning.window or self.window_size
        result = _attend(meaning, q, k, v, attention_masks, scale, True, window, None, site)
        if isinstance(result, Tensor):
            return result
        site.fallback(result)
        return original(self, q, k, v, attention_masks, scale)

    return forward


def _attend(
    meaning: Meaning,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    metadata: Any,
    scale: float | None,
    shared: bool,
    window: tuple[int, int],
    out_transform: Callable[[Tensor, Tensor], Tensor] | None,
    site: Site,
) -> Tensor | str:
    """The original's result, or why the operator cannot make it."""
    layout = meaning.layout
    if not isinstance(q, Tensor) or q.device.type != "npu":
        return NOT_ON_NPU
    if type_checking():
        return TYPE_CHECKING_REASON
    if transforming():
        return FUNCTORCH
    if is_compiling():
        return "the ends of documents under torch.compile"
    if q.dim() != layout.rank or k.dim() != layout.rank or v.dim() != layout.rank:
        return f"query, key and value are not {layout.name}"
    inside = [layout.inside(x) for x in (q, k, v)]
    batch, length, heads, _ = inside[0].shape
    if inside[1].shape[:2] != (batch, length) or inside[2].shape[:2] != (batch, length):
        return "key and value do not have the query's length"
    if inside[1].shape[2] != heads and not shared:
        return "fewer key heads than query heads without enable_gqa"
    query, key, value = (x.reshape(-1, *x.shape[2:]) for x in inside)
    if meaning.cast is not None:
        query, key, value = query.to(meaning.cast), key.to(meaning.cast), value.to(meaning.cast)
    parts = parts_of(metadata, query.shape[0], key.shape[0], window)
    if isinstance(parts, str):
        return parts
    cut = [(query[a:b], key[c:d], value[c:d], mask) for (a, b), (c, d), mask in parts]
    sinks = None if out_transform is None else sinks_of(out_transform)
    if sinks is not None and any(op.unsupported(*part, layout="TND", scale=scale, sinks=sinks) for part in cut):
        sinks = None
    with_lse = out_transform is not None and sinks is None
    ask = attention_lse.unsupported if with_lse else op.unsupported
    for part in cut:
        if reason := ask(*part, layout="TND", scale=scale):
            return reason
    site.hit()
    if not with_lse:
        out = _joined([op.attention(*part, layout="TND", scale=scale, sinks=sinks) for part in cut])
        if meaning.packed:
            return out
        return layout.outside(out.view(batch, length, heads, -1).to(q.dtype))
    pairs = [attention_lse.attention(*part, layout="TND", scale=scale) for part in cut]
    out, lse = (_joined([pair[i] for pair in pairs]).unflatten(0, (batch, length)) for i in (0, 1))
    assert out_transform is not None
    return out_transform(layout.outside(out.to(q.dtype)), layout.lse(lse))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
