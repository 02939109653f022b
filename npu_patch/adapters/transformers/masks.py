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
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ...discovery.masks import recognise_builder
from ...ops.attention import Mask
from ...ops.mask_meaning import read
from ...ops.per_tensor import PerTensor
from ...registry import Target
from ...sites import Site
from . import LIBRARY

_OP = "attention"
_REGISTRY = "ALL_MASK_ATTENTION_FUNCTIONS"
_FIND_PACKED = "find_packed_sequence_indices"


@dataclass(frozen=True, eq=False)
class _Built:
    """A mask that a builder returned.

    Args:
        mask: what it shows, where it has a compact form.
        batch, q_len, kv_len: the sizes for which that holds.
    """

    mask: Mask | None
    batch: int
    q_len: int
    kv_len: int


_built: PerTensor[_Built] = PerTensor(anew=True)
_on_host: PerTensor[Tensor] = PerTensor()  # device tensors whose content is known
_packed: PerTensor[dict[Any, Tensor | None]] = PerTensor()
_all_seen: PerTensor[bool] = PerTensor()  # padding masks that hide nothing
_padding: contextvars.ContextVar[Tensor | None] = contextvars.ContextVar("padding mask", default=None)


def known(attention_mask: Tensor, query: Tensor, key: Tensor) -> Mask | None:
    """The compact form of a mask for (B, N, S, D) tensors, or None."""
    if is_compiling():
        return None
    built = _built.get(attention_mask)
    if built is None or (built.batch, built.q_len, built.kv_len) != (query.shape[0], query.shape[2], key.shape[2]):
        return None
    return built.mask


def is_hard(attention_mask: Tensor) -> bool:
    """Whether an additive mask holds nothing but zero and the type's lowest number."""
    return not is_compiling() and _built.get(attention_mask) is not None


# ---- where they are built --------------------------------------------------------------------------------------------


def find(module: ModuleType) -> Iterator[Target]:
    """The entries of the mask registry, and what its callers prepare for them; nothing in versions that differ."""
    registry = getattr(module, _REGISTRY, None)
    if registry is None or getattr(type(registry), "__module__", None) != module.__name__:
        return
    entries = getattr(type(registry), "_global_mapping", {})
    for key, additive in (("sdpa", False), ("eager", True)):
        if key in entries and recognise_builder(entries[key], additive):
            path = f"{_REGISTRY}[{key}]"
            yield Target(_OP, LIBRARY, module.__name__, path, _entry_adapter, "writes a mask out", supporting=True)
    packed = vars(module).get(_FIND_PACKED)
    if isinstance(packed, FunctionType) and list(inspect.signature(packed).parameters) == ["position_ids"]:
        meaning = "numbers packed sequences"
        yield Target(_OP, LIBRARY, module.__name__, _FIND_PACKED, _packed_adapter, meaning, (LIBRARY,), supporting=True)
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
    return names[:3] == ["config", "inputs_embeds", "attention_mask"] and "allow_is_causal_skip" in names


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


def _packed_adapter(original: Any, site: Site) -> Callable[..., Any]:
    def find_packed(position_ids: Tensor) -> Tensor | None:
        if is_compiling() or position_ids.device.type != "npu" or position_ids.is_inference():
            return original(position_ids)  # type: ignore[no-any-return]
        root = _root(position_ids)
        view = (position_ids.shape, position_ids.stride(), position_ids.storage_offset())
        answers = _packed.get(root)
        if answers is None:
            answers = _packed.put(root, {})
        if view not in answers:
            # The original waits for one flag; this waits for the positions themselves, once for all masks of a step.
            small = root.is_contiguous() and root.storage_offset() == 0 and root.numel() <= position_ids.numel()
            host = root.to("cpu").as_strided(*view) if small else position_ids.to("cpu")
            indices = original(host)
            if small and indices is not None:
                _on_host.put(root, host.as_strided(root.shape, root.stride(), 0))
            answers[view] = indices if indices is None else indices.to(position_ids.device)
            if indices is not None:
                _on_host.put(answers[view], indices)  # type: ignore[arg-type]
        return answers[view]

    return find_packed


def _entry_adapter(original: Any, site: Site) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def entry(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not is_compiling():
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            _note(result, bound.arguments)
        return result

    return entry


def _note(result: Any, given: dict[str, Any]) -> None:
    """Remember what a mask shows, or that its padding hides nothing."""
    batch, q_len, kv_len, padding = (given[n] for n in ("batch_size", "q_length", "kv_length", "attention_mask"))
    whole = q_len == kv_len and given["kv_offset"] == 0 and padding is not None and padding.shape[-1] == kv_len
    source = _padding.get()
    if result is None:
        if whole and source is not None and source.shape == padding.shape and source.device.type == "npu":
            _all_seen.put(source, True)  # the original looked, and relies on `is_causal`
        return
    if not isinstance(result, Tensor) or result.device.type != "npu" or tuple(result.shape[2:]) != (q_len, kv_len):
        return
    if padding is not None and not (whole and source is not None and _all_seen.get(source)):
        mask = None
    else:
        mask = _read(given["mask_function"], batch, q_len, kv_len, given["q_offset"], given["kv_offset"], given)
    _built.put(result, _Built(mask, batch, q_len, kv_len))


# ---- evaluating a mask function on the host --------------------------------------------------------------------------


class _NotOnHost(Exception):
    pass


class _Host(TorchDispatchMode):
    """Inside: device tensors with a known content are replaced by it, and nothing else may touch the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, _host, (args, kwargs or {}))
        return func(*args, **kwargs)


def _host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    root = _root(tensor)
    host = _on_host.get(root)
    if host is None or not root.is_contiguous() or root.storage_offset() != 0:
        raise _NotOnHost
    return host.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _root(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


_answers: dict[Any, Mask | None] = {}


def _read(
    function: Any, batch: int, q_len: int, kv_len: int, q_offset: Any, kv_offset: Any, given: dict[str, Any]
) -> Mask | None:
    """What `function(sample, head, query, key)` shows over these lengths, or None where that has no compact form."""
    if given.get("use_vmap") or not isinstance(q_offset, int) or not isinstance(kv_offset, int):
        return None
    facts = _facts(function, 6)
    question = (facts, batch, q_len, kv_len, q_offset, kv_offset)
    if facts is not None and question in _answers:
        return _answers[question]

    def look(b: Tensor, q: Tensor, kv: Tensor, head: Tensor | int = 0) -> Tensor:
        b, h, q, kv = torch.broadcast_tensors(b, torch.as_tensor(head, device="cpu"), q, kv)
        with _Host():
            return function(b, h, q + q_offset, kv + kv_offset).to("cpu").bool().expand(q.shape)

    try:
        with torch.inference_mode(False), torch.no_grad():
            if q_len == kv_len and q_offset == kv_offset == 0:
                meaning = read(look, batch, q_len)
                mask = None if meaning is None else meaning.compact()
            else:
                mask = _lower_right(look, batch, q_len, kv_len)
    except Exception:  # a function of tensors whose content is not known on the host, or of another kind
        mask = None
    if facts is not None:
        if len(_answers) >= 1024:  # one question for each token that is generated
            _answers.clear()
        _answers[question] = mask
    return mask


def _lower_right(look: Any, batch: int, q_len: int, kv_len: int) -> Mask | None:
    """Queries are the last ones of the keys: causal, or a window, counted from the last key."""
    ahead = kv_len - q_len
    if ahead < 0:
        return None
    b, rows = torch.arange(batch, device="cpu").reshape(-1, 1, 1), torch.arange(q_len, device="cpu").reshape(1, -1, 1)
    keys = torch.arange(kv_len, device="cpu").reshape(1, 1, -1)
    count = int(look(b[:1], rows[:, -1:], keys).sum())
    if count == 0:
        return None

    def agrees(row: Tensor, key: Tensor) -> bool:
        wanted = (key <= row + ahead) & (key > row + ahead - count if count < kv_len else key >= 0)
        return torch.equal(look(b, row, key), wanted.expand(batch, *wanted.shape[1:]))

    upper, lower = rows + ahead, (rows + ahead - count + 1).clamp(min=0)
    edges = torch.cat((lower - 1, lower, upper, upper + 1), -1).clamp(0, kv_len - 1)
    some = torch.unique(torch.linspace(0, q_len - 1, 32, device="cpu").long()).reshape(1, -1, 1)
    if not agrees(rows, edges) or not agrees(some, keys):
        return None
    if count < kv_len:
        return Mask.band(count)
    return Mask.full() if q_len == 1 else Mask.causal()


def _facts(thing: Any, depth: int) -> Any:
    """What a function of indices is made of, if that is code and plain values; None where it holds anything else."""
    if thing is None or isinstance(thing, (bool, int, float, str)):
        return (type(thing), thing)
    if depth == 0:
        return None
    if isinstance(thing, tuple):
        parts = [_facts(part, depth - 1) for part in thing]
    elif isinstance(thing, FunctionType) and not thing.__kwdefaults__:
        contents = [cell.cell_contents for cell in thing.__closure__ or ()]
        parts = [thing.__code__, *(_facts(part, depth - 1) for part in (thing.__defaults__ or (), *contents))]
    else:
        return None
    return None if any(part is None for part in parts) else tuple(parts)
