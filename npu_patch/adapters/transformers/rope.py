"""Rope functions of a modeling file, recognised by what they compute."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ...discovery import NotRecognised, RotaryMeaning, foreign_code, recognise_rotary
from ...discovery.rotary import HALF_WIDTH, TABLES, deinterleaved
from ...ops import rope as op
from ...ops.guards import FUNCTORCH, subclass_reason, transforming
from ...ops.per_tensor import Derived
from ...ops.verdicts import Verdicts
from ...registry import Target, Unrecognised
from ...sites import Site
from . import LIBRARY, REMOTE, foreign
from .rope_forms import FORMS, Factory

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
    return build(_Rotation(meaning))


class _Plan(NamedTuple):
    """How tensors of known shapes and types are rotated.

    Args:
        dtype: of the rotation.
        result: dtype of the results where it is another.
        width: of the rotated part of each head.
        whole: there is no other part.
        swaps: for the operator, of each tensor.
        learned: the tables get a gradient.
        as_given: tensors and tables go to the operator, and its results to the caller, as they are.
    """

    dtype: torch.dtype
    result: torch.dtype | None
    width: int
    whole: bool
    swaps: tuple[bool, bool]
    learned: bool
    as_given: bool


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
        self._plans = Verdicts(self._judge)
        self._adjoint_of = op.ADJOINTS[self.mode]

    def _plan(self, tensors: tuple[Tensor, ...], cos: Tensor, sin: Tensor, dim: int) -> str | _Plan:
        """How to rotate, or why the operator cannot."""
        first, last = tensors[0], tensors[-1]
        plain = type(first) is type(last) is type(cos) is type(sin) is Tensor
        if not plain:
            if not isinstance(first, Tensor) or not isinstance(last, Tensor):
                return "a tensor is missing"
            if reason := subclass_reason(first, last, cos, sin):
                return reason
        if transforming():
            return FUNCTORCH
        dtype, device, table, table_dtype = first.dtype, first.device, cos.shape, cos.dtype
        if last.dtype is not dtype:
            return "query and key differ in type"
        if sin.dtype is not table_dtype or sin.shape != table:
            return "cos and sin differ"
        index = first.get_device()  # -1 is the host; beside it a process with an NPU has no other kind of device
        if last.get_device() != index or cos.get_device() != index or sin.get_device() != index:
            return "query, key and tables are not on one device"
        learned = (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled()
        facts = (first.shape, last.shape, dtype, table, table_dtype, device, dim, learned)
        return self._plans[facts] if plain and not is_compiling() else self._judge(*facts)

    def _judge(
        self,
        first: Sequence[int],
        last: Sequence[int],
        dtype: torch.dtype,
        table: Sequence[int],
        table_dtype: torch.dtype,
        device: torch.device,
        dim: int,
        learned: bool,
    ) -> str | _Plan:
        """The answer for tensors of these shapes and types, on one device; `first` and `last` may be the same."""
        if dim not in self.dims:
            return f"unsqueeze_dim {dim}"
        width = table[-1] * self.scale
        for shape in (first, last):
            if width != shape[-1] and not (self.partial and width < shape[-1]):
                return "the tables' width is not the head size"
        result = None
        if dtype is not table_dtype:
            result = self.results.get((dtype, table_dtype))
            if result is None:
                return "a pair of dtypes that was not recognised"
            dtype = torch.promote_types(dtype, table_dtype)  # what multiplying the two gives
        wide = [*table[:-1], width]
        wide.insert(dim if dim >= 0 else dim + len(table) + 1, 1)
        parts = ([*first[:-1], width], [*last[:-1], width])
        for part in parts:
            if reason := op.judge(part, wide, dtype, device, self.mode, learned):
                return reason
        swaps = (op.is_bnsd(parts[0], wide), op.is_bnsd(parts[1], wide))
        whole = width == first[-1] and width == last[-1]
        made = self.table is not None or self.negated is not None or self.deinterleave
        return _Plan(dtype, result, width, whole, swaps, learned, whole and result is None and not made)

    def __call__(
        self, tensors: tuple[Tensor, ...], cos: Tensor, sin: Tensor, dim: int, site: Site
    ) -> tuple[str | None, tuple[Tensor, ...]]:
        """(reason, ()) or (None, rotated tensors)."""
        plan = self._plan(tensors, cos, sin, dim)
        if isinstance(plan, str):
            return plan, ()
        site.hit()
        _, _, _, _, (first_swap, last_swap), learned, as_given = plan
        parts = tensors
        if not as_given:
            parts, cos, sin = self._prepared(plan, tensors, cos, sin)
        adjoint = None
        if torch.is_grad_enabled() and (tensors[0].requires_grad or tensors[-1].requires_grad):
            adjoint = self._adjoint_of(sin).unsqueeze(dim)
        cos, sin = cos.unsqueeze(dim), sin.unsqueeze(dim)
        mode = self.mode
        rotate = op.rotate if learned else op.rotate_by_constants
        first = rotate(parts[0], cos, sin, mode, adjoint, first_swap)
        outputs = (first,) if len(parts) == 1 else (first, rotate(parts[1], cos, sin, mode, adjoint, last_swap))
        return None, outputs if as_given else self._finished(plan, tensors, outputs)

    def _prepared(
        self, plan: _Plan, tensors: tuple[Tensor, ...], cos: Tensor, sin: Tensor
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """What the operator gets for these tensors and tables."""
        parts, width = tensors, plan.width
        if plan.result is not None:
            cos, sin = _as(cos, plan.dtype), _as(sin, plan.dtype)
            parts = _each(parts, lambda x: x.to(plan.dtype))
        if self.table is not None:
            cos, sin = self.table(cos), self.table(sin)
        if self.negated is not None:
            sin = self.negated(sin)
        if not plan.whole:
            start = -width if self.trailing else 0
            parts = _each(parts, lambda x: x.narrow(-1, start, width))
        if self.deinterleave:
            parts = _each(parts, deinterleaved)
        return parts, cos, sin

    def _finished(self, plan: _Plan, tensors: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the function returns for what the operator returned."""
        if plan.result is not None:
            outputs = _each(outputs, lambda y: y.to(plan.result))
        if plan.whole:
            return outputs
        first = _with_rest(outputs[0], tensors[0], plan.width, self.trailing)
        if len(outputs) == 1:
            return (first,)
        return first, _with_rest(outputs[1], tensors[1], plan.width, self.trailing)


def _each(tensors: tuple[Tensor, ...], change: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    """One or two tensors changed; this is called in every layer, where a generator would cost as much as the rest."""
    first = change(tensors[0])
    return (first,) if len(tensors) == 1 else (first, change(tensors[1]))


def _with_rest(y: Tensor, x: Tensor, width: int, trailing: bool) -> Tensor:
    """The rotated part of each head, and the part that the tables do not reach."""
    size = x.shape[-1]
    if width == size:
        return y
    rest = x.narrow(-1, 0 if trailing else width, size - width)
    if rest.dtype is not y.dtype:
        rest = rest.to(y.dtype)
    return torch.cat((rest, y) if trailing else (y, rest), -1)


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
