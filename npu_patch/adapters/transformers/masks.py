"""What the masks that transformers builds mean, learned where they are built.

The attention functions get a written-out mask; whether it is a plain causal one, a window or packed sequences cannot be
asked there without waiting for the device.  The builders know: they hold the mask as a function of indices.  That
function is evaluated on the host, and what it shows is remembered for the tensor that the builder returns.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from ...discovery.masks import BuilderMeaning, looks_at_packed, recognise_builder
from ...ops.attention import Mask
from ...ops.per_tensor import PerTensor
from ...registry import Target
from ...sites import Site
from . import LIBRARY
from .mask_functions import Question, compute_later, fetch, first_of, meaning, on_host, root_of, view_of

_OP = "attention"
_REGISTRY = "ALL_MASK_ATTENTION_FUNCTIONS"
_FIND_PACKED = "find_packed_sequence_indices"


@dataclass(eq=False)
class _Built:
    """A mask that a builder returned.

    Args:
        mask: what it shows, where it has a compact form.
        batch, q_len, kv_len: the sizes for which that holds.
        written: the mask as it is, for the operator, once somebody has made that.
    """

    mask: Mask | None
    batch: int
    q_len: int
    kv_len: int
    written: Mask | None = None


_built: PerTensor[_Built] = PerTensor(anew=True)
_packed: PerTensor[dict[Any, Tensor | None]] = PerTensor()
_all_seen: PerTensor[bool] = PerTensor()  # padding masks that hide nothing
_padding: contextvars.ContextVar[Tensor | None] = contextvars.ContextVar("padding mask", default=None)


built = _built.get
"""What is known of a mask that a builder returned; not while compiling."""


def known(attention_mask: Tensor, query: Tensor, key: Tensor) -> Mask | None:
    """The compact form of a mask for (B, N, S, D) tensors, or None."""
    if is_compiling():
        return None
    found = _built.get(attention_mask)
    if found is None or found.mask is None:
        return None
    sizes = query.shape[0], query.shape[2], key.shape[2]
    return found.mask if sizes == (found.batch, found.q_len, found.kv_len) else None


def is_hard(attention_mask: Tensor) -> bool:
    """Whether an additive mask, or the one that it is cut from, holds nothing but zero and the type's lowest number."""
    if is_compiling():
        return False
    base = attention_mask._base
    return _built.get(attention_mask) is not None or (base is not None and _built.get(base) is not None)


def remember_hard(attention_mask: Tensor) -> None:
    """Of a mask that shows something else than can be said without writing it out."""
    if attention_mask.device.type == "npu" and attention_mask.dim() == 4:
        batch, _, q_len, kv_len = attention_mask.shape
        _built.put(attention_mask, _Built(None, batch, q_len, kv_len))


# ---- where they are built --------------------------------------------------------------------------------------------


def find(module: ModuleType) -> Iterator[Target]:
    """The entries of the mask registry, and what its callers prepare for them; nothing in versions that differ."""
    registry = getattr(module, _REGISTRY, None)
    if registry is None or getattr(type(registry), "__module__", None) != module.__name__:
        return
    entries = getattr(type(registry), "_global_mapping", {})
    for key, additive in (("sdpa", False), ("eager", True)):
        how = recognise_builder(entries[key], additive) if key in entries else None
        if how is not None:
            path, entry = f"{_REGISTRY}[{key}]", partial(_entry_adapter, how)
            yield Target(_OP, LIBRARY, module.__name__, path, entry, "writes a mask out", supporting=True)
    packed = vars(module).get(_FIND_PACKED)
    looks = looks_at_packed(packed) if isinstance(packed, FunctionType) else None
    if looks is not None:
        factory = _looking_adapter if looks else _packed_adapter
        says = "numbers packed sequences"
        yield Target(_OP, LIBRARY, module.__name__, _FIND_PACKED, factory, says, (LIBRARY,), supporting=True)
    for name, value in list(vars(module).items()):
        if isinstance(value, FunctionType) and value.__module__ == module.__name__ and _hands_padding_on(value):
            yield Target(
                _OP,
                LIBRARY,
                module.__name__,
                name,
                _caller_adapter,
                "prepares a causal mask",
                (LIBRARY,),
                supporting=True,
            )


def _hands_padding_on(function: FunctionType) -> bool:
    names = list(inspect.signature(function).parameters)
    if len(names) < 3 or (names[0], names[2]) != ("config", "attention_mask") or not names[1].endswith("_embeds"):
        return False
    return "allow_is_causal_skip" in names or {"cache_position", "or_mask_function"} <= set(names)


def _caller_adapter(original: Any, site: Site) -> Callable[..., Any]:
    """The callers make another tensor of the padding mask each time; the one that they were given stays the same."""

    def create(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        given = kwargs.get("attention_mask", args[2] if len(args) > 2 else None)
        token = _padding.set(given if isinstance(given, Tensor) else None)
        try:
            return original(*args, **kwargs)
        finally:
            _padding.reset(token)

    return create


def _looking_adapter(original: Any, site: Site) -> Callable[..., Any]:
    """For a function that waits for one flag: this waits for the positions themselves, once for all masks of a step."""

    def find_packed(position_ids: Tensor) -> Tensor | None:
        if is_compiling() or position_ids.device.type != "npu" or position_ids.is_inference():
            return original(position_ids)  # type: ignore[no-any-return]
        root, view = root_of(position_ids), view_of(position_ids)
        answers = _packed.get(root)
        if answers is None:
            answers = _packed.put(root, {})
        if view not in answers:
            numbers = original(fetch(root, view))
            answers[view] = numbers if numbers is None else numbers.to(position_ids.device)
            if numbers is not None:
                on_host.put(answers[view], numbers)  # type: ignore[arg-type]
        return answers[view]

    return find_packed


def _packed_adapter(original: Any, site: Site) -> Callable[..., Any]:
    """For a function that does not wait: the positions are read only where somebody asks what a mask shows."""

    def find_packed(position_ids: Tensor) -> Tensor:
        numbers: Tensor = original(position_ids)
        if not is_compiling() and numbers.device.type == "npu" and not position_ids.is_inference():
            compute_later(numbers, original, position_ids)
        return numbers

    return find_packed


def _entry_adapter(how: BuilderMeaning, original: Any, site: Site) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def entry(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not is_compiling():
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            _note(result, bound.arguments, how)
        return result

    return entry


def _note(result: Any, given: dict[str, Any], how: BuilderMeaning) -> None:
    """Remember what a mask shows, or that its padding hides nothing."""
    batch, kv_len, kv_offset, padding = (given[n] for n in ("batch_size", "kv_length", "kv_offset", "attention_mask"))
    q_len = given["cache_position"].shape[0] if how.positions else given["q_length"]
    whole = q_len == kv_len and type(kv_offset) is int and kv_offset == 0
    whole = whole and padding is not None and padding.shape[-1] == kv_len
    source = _padding.get()
    if result is None:
        if whole and source is not None and source.shape == padding.shape and source.device.type == "npu":
            _all_seen.put(source, True)  # the original looked, and relies on `is_causal`
        return
    if not isinstance(result, Tensor) or result.device.type != "npu" or tuple(result.shape[2:]) != (q_len, kv_len):
        return
    mask = None
    if not result.is_inference() and (padding is None or (whole and source is not None and _all_seen.get(source))):
        q_offset = given["q_offset"] if not how.positions else _offset(given["cache_position"])
        if type(q_offset) is int and type(kv_offset) is int:
            by_element = how.by_element or bool(given.get("use_vmap"))
            mask = meaning(Question(given["mask_function"], by_element, batch, q_len, kv_len, q_offset, kv_offset))
    _built.put(result, _Built(mask, batch, q_len, kv_len))


def _offset(positions: Tensor) -> int | None:
    """The first query's position, for which the device has to be waited for: not worth it for a single query."""
    return first_of(positions) if len(positions) > 1 else None
