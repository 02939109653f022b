"""Call sites of rope functions with other tables than cos, sin of (B, S, D)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...discovery.rotary import merge_sections
from ...ops.per_tensor import Derived
from ...sites import Site
from .rope_rotation import Rotation

Factory = Callable[[Any, Site], Callable[..., Any]]


_ONE_BATCH = Derived(lambda rows: rows.unsqueeze(0))


def _pair_rows(rotation: Rotation) -> Factory:
    """(q, k, cos, sin): tables (S, D), one for all samples and heads."""
    rotated_by = rotation.apply

    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            reason: str | None = "the tables are not rows of one sequence"
            if cos.dim() == 2 and sin.dim() == 2:
                reason, rotated = rotated_by((q, k), _ONE_BATCH(cos), _ONE_BATCH(sin), 1, site)
                if reason is None:
                    return rotated
            site.fallback(str(reason))
            return original(q, k, cos, sin)

        return apply_rotary

    return factory


def _last_tokens(rotation: Rotation) -> Factory:
    """(q, k, cos, sin): tables (S, D) for the last S tokens."""
    rotated_by = rotation.apply

    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **kwargs: Any) -> Any:
            reason: str | None = "other arguments" if kwargs else "the tables are not rows of one sequence"
            if not kwargs and cos.dim() == 2 and sin.dim() == 2 and q.dim() == 4 and k.dim() == 4:
                before, length = q.shape[-2] - sin.shape[-2], sin.shape[-2]
                if before < 0 or k.shape[-2] != q.shape[-2]:
                    reason = "the tables are longer than the sequence"
                else:
                    parts = (q.narrow(-2, before, length), k.narrow(-2, before, length))
                    reason, rotated = rotated_by(parts, _ONE_BATCH(cos), _ONE_BATCH(sin), 1, site)
                    if reason is None:
                        if not before:
                            return rotated
                        return tuple(
                            torch.cat((x[..., :before, :].to(y.dtype), y), -2)
                            for x, y in zip((q, k), rotated, strict=True)
                        )
            site.fallback(str(reason))
            return original(q, k, cos, sin, **kwargs)

        return apply_rotary

    return factory


def _by_position(rotation: Rotation) -> Factory:
    """(q, k, cos, sin, position_ids): tables (positions, D), of which each token takes a row."""
    rotated_by = rotation.apply

    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary(
            q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, unsqueeze_dim: int = 1
        ) -> Any:
            reason: str | None = "the tables are not rows of all positions"
            if isinstance(position_ids, Tensor) and position_ids.dim() == 2 and cos.dim() == 2 and sin.dim() == 2:
                reason, rotated = rotated_by((q, k), cos[position_ids], sin[position_ids], unsqueeze_dim, site)
                if reason is None:
                    return rotated
            site.fallback(str(reason))
            return original(q, k, cos, sin, position_ids, unsqueeze_dim)

        return apply_rotary

    return factory


def _in_sections(rotation: Rotation) -> Factory:
    """(q, k, cos, sin, mrope_section): tables (3, B, S, D) of time, height and width, each for its channels."""
    rotated_by = rotation.apply
    merged: dict[tuple[int, ...], Derived[Tensor]] = {}

    def merge(sections: tuple[int, ...]) -> Derived[Tensor]:
        if sections not in merged:
            merged[sections] = Derived(lambda table: merge_sections(table, sections))
        return merged[sections]

    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary(
            q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Any, unsqueeze_dim: int = 1
        ) -> Any:
            reason: str | None = "the sections do not fit the tables"
            if type(mrope_section) is list and cos.dim() == 4 and cos.shape == sin.shape:
                sections = tuple(mrope_section)
                if cos.shape[0] == 3 and 2 * sum(sections) == cos.shape[-1]:
                    of = merge(sections)
                    reason, rotated = rotated_by((q, k), of(cos), of(sin), unsqueeze_dim, site)
                    if reason is None:
                        return rotated
            site.fallback(str(reason))
            return original(q, k, cos, sin, mrope_section, unsqueeze_dim)

        return apply_rotary

    return factory


_REAL = Derived(lambda table: torch.view_as_real(table)[..., 0].contiguous())
_IMAGINARY = Derived(lambda table: torch.view_as_real(table)[..., 1].contiguous())


def _complex(rotation: Rotation) -> Factory:
    """(q, k, freqs_cis): a complex table (B, S, D/2)."""
    rotated_by = rotation.apply
    dim = rotation.dims[0]

    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary(q: Tensor, k: Tensor, freqs_cis: Tensor) -> Any:
            reason: str | None = "the table is not complex64 of (B, S, D/2)"
            if freqs_cis.dtype is torch.complex64 and freqs_cis.dim() == 3 and not freqs_cis.is_conj():
                reason, rotated = rotated_by((q, k), _REAL(freqs_cis), _IMAGINARY(freqs_cis), dim, site)
                if reason is None:
                    return rotated
            site.fallback(str(reason))
            return original(q, k, freqs_cis)

        return apply_rotary

    return factory


_REAL_ROWS = Derived(lambda table: torch.view_as_real(table)[..., 0].transpose(0, 1).contiguous())
_IMAGINARY_ROWS = Derived(lambda table: torch.view_as_real(table)[..., 1].transpose(0, 1).contiguous())


def _complex_rows(rotation: Rotation) -> Factory:
    """(q, k, freqs_ci): a complex table (S, 1, D/2), one for all samples and heads."""
    rotated_by = rotation.apply
    dim = rotation.dims[0]

    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary(query: Tensor, key: Tensor, freqs_ci: Tensor) -> Any:
            reason: str | None = "the table is not complex64 of (S, 1, D/2)"
            plain = freqs_ci.dtype is torch.complex64 and freqs_ci.dim() == 3 and not freqs_ci.is_conj()
            if plain and freqs_ci.shape[1] == 1:
                cos, sin = _REAL_ROWS(freqs_ci), _IMAGINARY_ROWS(freqs_ci)
                reason, rotated = rotated_by((query, key), cos, sin, dim, site)
                if reason is None:
                    return rotated
            site.fallback(str(reason))
            return original(query, key, freqs_ci)

        return apply_rotary

    return factory


_WITHOUT = {dim: Derived(lambda table, dim=dim: table.squeeze(dim)) for dim in (1, 2)}  # type: ignore[misc]


def _ready(rotation: Rotation) -> Factory:
    """(x, cos, sin): tables with a dimension of size 1 for the heads."""
    rotated_by = rotation.apply

    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Any:
            reason: str | None = "the tables have no dimension for the heads"
            if cos.dim() == 4 and cos.shape == sin.shape and x.dim() == 4:
                for dim in rotation.dims:
                    if cos.shape[dim] == 1 and cos.shape[3 - dim] == x.shape[3 - dim]:
                        of = _WITHOUT[dim]
                        reason, rotated = rotated_by((x,), of(cos), of(sin), dim, site)
                        if reason is None:
                            return rotated[0]
                        break
            site.fallback(str(reason))
            return original(x, cos, sin)

        return apply_rotary

    return factory


def _sine_first(rotation: Rotation) -> Factory:
    """(x, sin, cos)."""
    rotated_by = rotation.apply
    dim = rotation.dims[0]

    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary(x: Tensor, sin: Tensor, cos: Tensor) -> Any:
            reason, rotated = rotated_by((x,), cos, sin, dim, site)
            if reason is None:
                return rotated[0]
            site.fallback(reason)
            return original(x, sin, cos)

        return apply_rotary

    return factory


def _single(rotation: Rotation) -> Factory:
    """(x, cos, sin)."""
    rotated_by = rotation.apply
    dim = rotation.dims[0]

    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Any:
            reason, rotated = rotated_by((x,), cos, sin, dim, site)
            if reason is None:
                return rotated[0]
            site.fallback(reason)
            return original(x, cos, sin)

        return apply_rotary

    return factory


def _single_unused_positions(rotation: Rotation) -> Factory:
    """(x, cos, sin, position_ids, unsqueeze_dim), where the positions must be None."""
    rotated_by = rotation.apply

    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1) -> Any:
            reason: str | None = "position_ids"
            if position_ids is None:
                reason, rotated = rotated_by((x,), cos, sin, unsqueeze_dim, site)
                if reason is None:
                    return rotated[0]
            site.fallback(str(reason))
            return original(x, cos, sin, position_ids, unsqueeze_dim)

        return apply_rotary

    return factory


_COSINE = Derived(lambda angles: angles.cos().unsqueeze(0))
_SINE = Derived(lambda angles: angles.sin().unsqueeze(0))


def _angles(rotation: Rotation) -> Factory:
    """(x, freqs): angles (S, D/2), one for all samples and heads."""
    rotated_by = rotation.apply
    dim = rotation.dims[0]

    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary(x: Tensor, freqs: Tensor) -> Any:
            reason: str | None = "the angles are not float32 of (S, D/2)"
            if freqs.dtype is torch.float32 and freqs.dim() == 2:
                reason, rotated = rotated_by((x,), _COSINE(freqs), _SINE(freqs), dim, site)
                if reason is None:
                    return rotated[0]
            site.fallback(str(reason))
            return original(x, freqs)

        return apply_rotary

    return factory


FORMS: dict[tuple[str, int], Callable[[Rotation], Factory]] = {
    ("rows", 2): _pair_rows,
    ("patches", 2): _last_tokens,
    ("positions, dim", 2): _by_position,
    ("sections, dim", 2): _in_sections,
    ("complex", 2): _complex,
    ("complex rows", 2): _complex_rows,
    ("ready tables", 1): _ready,
    ("sine first", 1): _sine_first,
    ("tables", 1): _single,
    ("unused positions, dim", 1): _single_unused_positions,
    ("angles", 1): _angles,
}
"""(form, number of rotated tensors) → how to make the factory of a call site."""
