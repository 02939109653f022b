"""Rope functions of a modeling file, recognised by what they compute."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...discovery import NotRecognised, RotaryMeaning, recognise_rotary
from ...discovery.rotary import HALF_WIDTH, TABLES, deinterleaved
from ...ops import rope as op
from ...ops.per_tensor import Derived
from ...registry import Target, Unrecognised
from ...sites import Site
from . import LIBRARY, REMOTE, foreign
from .rope_forms import FORMS, Factory

_OP = "rope"
_NAMES = re.compile(r"apply.*(rotary|rope)|rotary_pos_emb")


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The rope functions that a module defines, and the methods that look like one."""
    for name, value in list(vars(module).items()):
        if isinstance(value, type):
            yield from _methods(module, name, value)
            continue
        if not _NAMES.search(name) or not callable(value):
            continue
        if getattr(value, "__module__", None) != module.__name__ and not foreign(value):
            continue
        try:
            meaning = recognise_rotary(value)
            factory = adapter(meaning)
        except Exception as error:  # foreign code was run
            reason = str(error) if isinstance(error, NotRecognised) else f"{type(error).__name__}: {error}"
            yield Unrecognised(_OP, LIBRARY, module.__name__, name, reason)
            continue
        yield Target(_OP, LIBRARY, module.__name__, name, factory, str(meaning), rebind=(LIBRARY, REMOTE))


def _methods(module: ModuleType, name: str, cls: type) -> Iterator[Unrecognised]:
    if cls.__module__ != module.__name__ or not issubclass(cls, nn.Module):
        return
    for attribute, value in vars(cls).items():
        function = getattr(value, "__func__", value)
        if callable(function) and _NAMES.search(attribute):
            path = f"{name}.{attribute}"
            yield Unrecognised(_OP, LIBRARY, module.__name__, path, "is a method, not a function of the module")


def adapter(meaning: RotaryMeaning) -> Factory:
    """A factory for one function, by its parameters.

    Raises:
        NotRecognised: its parameters are arranged in a way that no call site here has.
    """
    key = (meaning.form, meaning.tensors)
    build = _ARRANGEMENTS.get(key) or FORMS.get(key)
    if build is None:
        raise NotRecognised("takes its parameters in an order that is not known")
    return build(_Rotation(meaning))


class _Rotation:
    """One meaning, as the call: which table, which part of a head, which dtype."""

    def __init__(self, meaning: RotaryMeaning) -> None:
        self.mode = "interleave" if meaning.mode == "interleave" else "half"
        self.deinterleave = meaning.mode == "deinterleave"
        self.partial = meaning.partial
        self.dims = meaning.dims
        self.results = meaning.results
        self.scale = 2 if meaning.table in HALF_WIDTH else 1
        self.table = None if meaning.table == "given" else Derived(TABLES[meaning.table])
        self.negated = Derived(Tensor.neg) if meaning.negated else None
        self.trailing = meaning.trailing

    def mismatch(self, tensors: tuple[Tensor, ...], cos: Tensor, sin: Tensor, dim: int) -> str | None:
        """What `unsupported` of the operator cannot know: how tensors and tables fit together."""
        if dim not in self.dims:
            return f"unsqueeze_dim {dim}"
        if cos.dtype is not sin.dtype or cos.shape != sin.shape:
            return "cos and sin differ"
        for x in tensors:
            if not isinstance(x, Tensor):
                return "a tensor is missing"
            if x.dtype is not tensors[0].dtype:
                return "query and key differ in type"
            head = x.shape[-1]
            if (width := cos.shape[-1] * self.scale) != head and not (self.partial and width < head):
                return "the tables' width is not the head size"
        return None

    def __call__(
        self, tensors: tuple[Tensor, ...], cos: Tensor, sin: Tensor, dim: int, site: Site
    ) -> tuple[str | None, tuple[Tensor, ...]]:
        """(reason, ()) or (None, rotated tensors)."""
        reason = self.mismatch(tensors, cos, sin, dim)
        if reason is not None:
            return reason, ()
        result: torch.dtype | None = None
        parts = tensors
        if tensors[0].dtype is not cos.dtype:
            result = self.results.get((tensors[0].dtype, cos.dtype))
            if result is None:
                return "a pair of dtypes that was not recognised", ()
            dtype = torch.promote_types(tensors[0].dtype, cos.dtype)  # what multiplying the two gives
            cos, sin = _as(cos, dtype), _as(sin, dtype)
            parts = tuple(x.to(dtype) for x in tensors)
        if self.table is not None:
            cos, sin = self.table(cos), self.table(sin)
        if self.negated is not None:
            sin = self.negated(sin)
        width = cos.shape[-1]
        whole = width == tensors[0].shape[-1] and width == tensors[-1].shape[-1]
        if not whole:
            parts = tuple(x[..., -width:] if self.trailing else x[..., :width] for x in parts)
        wide_cos, wide_sin = cos.unsqueeze(dim), sin.unsqueeze(dim)
        reason = op.unsupported(parts[0], wide_cos, wide_sin, self.mode)
        if reason is None and len(parts) > 1 and not _fewer_heads(parts[1], parts[0], dim):
            reason = op.unsupported(parts[1], wide_cos, wide_sin, self.mode)
        if reason is not None:
            return reason, ()
        site.hit()
        adjoint = op.adjoint_sine(sin, self.mode).unsqueeze(dim) if op.needs_adjoint(*parts) else None
        if self.deinterleave:
            parts = tuple(deinterleaved(x) for x in parts)
        outputs = tuple(op.rotate(x, wide_cos, wide_sin, self.mode, adjoint) for x in parts)
        if result is not None:
            outputs = tuple(y.to(result) for y in outputs)
        if not whole:
            outputs = tuple(_with_rest(y, x, width, self.trailing) for y, x in zip(outputs, tensors, strict=True))
        return None, outputs


def _fewer_heads(key: Tensor, query: Tensor, dim: int) -> bool:
    """Whether a key is like the query but for its heads: what the operator takes for many heads it takes for fewer."""
    k, q = key.shape, query.shape
    if type(key) is not type(query) or key.device != query.device or len(k) != len(q) or not 0 < k[dim] <= q[dim]:
        return False
    return all(k[i] == q[i] for i in range(len(q)) if i != dim % len(q))


def _with_rest(y: Tensor, x: Tensor, width: int, trailing: bool) -> Tensor:
    """The rotated part of each head, and the part that the tables do not reach."""
    if width == x.shape[-1]:
        return y
    if trailing:
        return torch.cat((x[..., :-width].to(y.dtype), y), -1)
    return torch.cat((y, x[..., width:].to(y.dtype)), -1)


_FLOAT32 = Derived(Tensor.float)


def _as(table: Tensor, dtype: torch.dtype) -> Tensor:
    return table if table.dtype == dtype else _FLOAT32(table) if dtype == torch.float32 else table.to(dtype)


# ---- one call site per arrangement of parameters ---------------------------------------------------------------------


def _pair_dim(rotation: _Rotation) -> Callable[[Any, Site], Callable[..., Any]]:
    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
            reason, rotated = rotation((q, k), cos, sin, unsqueeze_dim, site)
            if reason is None:
                return rotated
            site.fallback(reason)
            return original(q, k, cos, sin, unsqueeze_dim)

        return apply_rotary

    return factory


def _pair_positions_dim(rotation: _Rotation) -> Callable[[Any, Site], Callable[..., Any]]:
    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary(
            q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
        ) -> Any:
            if position_ids is None:
                reason, rotated = rotation((q, k), cos, sin, unsqueeze_dim, site)
                if reason is None:
                    return rotated
            else:
                reason = "position_ids"
            site.fallback(reason)
            return original(q, k, cos, sin, position_ids, unsqueeze_dim)

        return apply_rotary

    return factory


def _pair(rotation: _Rotation) -> Callable[[Any, Site], Callable[..., Any]]:
    dim = rotation.dims[0]

    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            reason, rotated = rotation((q, k), cos, sin, dim, site)
            if reason is None:
                return rotated
            site.fallback(reason)
            return original(q, k, cos, sin)

        return apply_rotary

    return factory


def _single_dim(rotation: _Rotation) -> Callable[[Any, Site], Callable[..., Any]]:
    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
            reason, rotated = rotation((x,), cos, sin, unsqueeze_dim, site)
            if reason is None:
                return rotated[0]
            site.fallback(reason)
            return original(x, cos, sin, unsqueeze_dim)

        return apply_rotary

    return factory


_ARRANGEMENTS: dict[tuple[str, int], Callable[[_Rotation], Factory]] = {
    ("dim", 2): _pair_dim,
    ("unused positions, dim", 2): _pair_positions_dim,
    ("tables", 2): _pair,
    ("dim", 1): _single_dim,
}
