"""Rope functions of a modeling file, recognised by what they compute."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from ...discovery import NotRecognised, RotaryMeaning, foreign_code, recognise_rotary
from ...registry import Target, Unrecognised
from ...sites import Site
from . import LIBRARY, REMOTE, foreign
from .rope_forms import FORMS, Factory
from .rope_rotation import Rotation

_OP = "rope"
_NAMES = re.compile(r"apply.*(rotary|rope)|rotary_pos_emb")


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The rope functions that a module defines, and the methods that look like one."""
    for name, value in list(vars(module).items()):
        try:
            with foreign_code():
                found = _look(module, name, value)
        except NotRecognised as error:
            found = [Unrecognised(_OP, LIBRARY, module.__name__, name, str(error))] if _NAMES.search(name) else []
        yield from found


def _look(module: ModuleType, name: str, value: Any) -> list[Target | Unrecognised]:
    """The targets that something in a module is.

    Raises:
        NotRecognised: it is a function that computes something else.
    """
    if isinstance(value, type):
        return list(_methods(module, name, value))
    if not _NAMES.search(name) or not callable(value):
        return []
    if getattr(value, "__module__", None) != module.__name__ and not foreign(value):
        return []  # another modeling file's
    meaning = recognise_rotary(_inside(value))
    target = Target(
        _OP,
        LIBRARY,
        module.__name__,
        name,
        adapter(meaning),
        str(meaning),
        rebind=(LIBRARY, REMOTE),
        objects=True,
        parts=meaning.parts,
    )
    return [target]


def _inside(value: Any) -> Any:
    """The function itself, where the package `kernels` has made a module instance of it.

    Raises:
        NotRecognised: the instance runs something else.
    """
    if not isinstance(value, nn.Module):
        return value
    if "forward" in vars(value):
        raise NotRecognised("is a module instance whose forward was replaced")
    forward = type(value).forward
    cells = [cell.cell_contents for cell in getattr(forward, "__closure__", None) or ()]
    code = getattr(forward, "__code__", None)
    if len(cells) != 1 or code is None or code.co_freevars != ("func",) or code.co_names:
        raise NotRecognised("is a module instance that does more than to call one function")
    return cells[0]


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
    return build(Rotation(meaning))


# ---- one call site per arrangement of parameters ---------------------------------------------------------------------


def _pair_dim(rotation: Rotation) -> Callable[[Any, Site], Callable[..., Any]]:
    rotated_by = rotation.apply

    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
            reason, rotated = rotated_by((q, k), cos, sin, unsqueeze_dim, site)
            if reason is None:
                return rotated
            site.fallback(reason)
            return original(q, k, cos, sin, unsqueeze_dim)

        return apply_rotary

    return factory


def _pair_positions_dim(rotation: Rotation) -> Callable[[Any, Site], Callable[..., Any]]:
    rotated_by = rotation.apply

    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary(
            q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
        ) -> Any:
            if position_ids is None:
                reason, rotated = rotated_by((q, k), cos, sin, unsqueeze_dim, site)
                if reason is None:
                    return rotated
            else:
                reason = "position_ids"
            site.fallback(reason)
            return original(q, k, cos, sin, position_ids, unsqueeze_dim)

        return apply_rotary

    return factory


def _pair(rotation: Rotation) -> Callable[[Any, Site], Callable[..., Any]]:
    rotated_by = rotation.apply
    dim = rotation.dims[0]

    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            reason, rotated = rotated_by((q, k), cos, sin, dim, site)
            if reason is None:
                return rotated
            site.fallback(reason)
            return original(q, k, cos, sin)

        return apply_rotary

    return factory


def _single_dim(rotation: Rotation) -> Callable[[Any, Site], Callable[..., Any]]:
    rotated_by = rotation.apply

    def factory(original: Any, site: Site) -> Callable[..., Any]:
        def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
            reason, rotated = rotated_by((x,), cos, sin, unsqueeze_dim, site)
            if reason is None:
                return rotated[0]
            site.fallback(reason)
            return original(x, cos, sin, unsqueeze_dim)

        return apply_rotary

    return factory


_ARRANGEMENTS: dict[tuple[str, int], Callable[[Rotation], Factory]] = {
    ("dim", 2): _pair_dim,
    ("unused positions, dim", 2): _pair_positions_dim,
    ("tables", 2): _pair,
    ("dim", 1): _single_dim,
}
