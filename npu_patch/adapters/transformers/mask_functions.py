"""What the mask functions of transformers show, found out by evaluating them on the host.

A mask function says for (sample, head, query, key) whether the query sees the key.  Device tensors that it uses, such
as the numbers of packed sequences, are replaced by their content where that is known.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ...ops.attention import Mask
from ...ops.guards import keep
from ...ops.mask_meaning import read
from ...ops.per_tensor import PerTensor

on_host: PerTensor[Tensor] = PerTensor()  # the content of device tensors
_computed: PerTensor[Callable[[], Tensor | None]] = PerTensor()  # what is to be computed once it is needed


# ---- the content of device tensors -----------------------------------------------------------------------------------


def root_of(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def view_of(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def fetch(root: Tensor, view: Any) -> Tensor:
    """The content of a view of `root`, which is read from the device once as long as it is unchanged and no larger."""
    host = on_host.get(root)
    if host is None:
        shape = view[0]
        if not _is_whole(root) or root.numel() > shape.numel():
            return root.as_strided(*view).to("cpu")
        host = on_host.put(root, root.to("cpu"))
    return host.as_strided(*view)


def _is_whole(root: Tensor) -> bool:
    return root.is_contiguous() and root.storage_offset() == 0


def compute_later(result: Tensor, function: Any, argument: Tensor) -> None:
    """Take down that `result` is `function(argument)`: its content is computed on the host if it is needed."""
    root, view = root_of(argument), view_of(argument)
    reference, version = weakref.ref(root), root._version

    def compute() -> Tensor | None:
        alive = reference()
        if alive is None or alive._version != version or not keep(alive):
            return None
        return function(fetch(alive, view))  # type: ignore[no-any-return]

    _computed.put(result, compute)


def first_of(positions: Tensor) -> int | None:
    """The first of consecutive positions; None for others, and where the device cannot be waited for."""
    if positions.is_inference():
        return None
    host = positions
    if positions.device.type != "cpu":
        if not keep(positions):
            return None
        host = fetch(root_of(positions), view_of(positions))
    first = int(host[0])
    return first if torch.equal(host, torch.arange(first, first + len(host), device="cpu")) else None


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
    root = root_of(tensor)
    host = on_host.get(root)
    if host is None and (compute := _computed.get(root)) is not None:
        host = compute()
        if host is not None:
            on_host.put(root, host)
    if host is None or not _is_whole(root):
        raise _NotOnHost
    return host.as_strided(*view_of(tensor))


# ---- what a function shows -------------------------------------------------------------------------------------------


class Question(NamedTuple):
    """Queries q_offset … of q_len and keys kv_offset … of kv_len tokens; `by_element` as in `BuilderMeaning`."""

    function: Any
    by_element: bool
    batch: int
    q_len: int
    kv_len: int
    q_offset: int
    kv_offset: int


_answers: dict[Any, Mask | None] = {}


def meaning(question: Question) -> Mask | None:
    """What the function shows over these lengths, or None where that has no compact form."""
    function, by_element, batch, q_len, kv_len, q_offset, kv_offset = question
    facts = _facts(function, 6)
    asked = (facts, *question[1:])
    if facts is not None and asked in _answers:
        return _answers[asked]

    def look(b: Tensor, q: Tensor, kv: Tensor, head: Tensor | int = 0) -> Tensor:
        indices = torch.broadcast_tensors(b, torch.as_tensor(head, device="cpu"), q + q_offset, kv + kv_offset)
        with _Host():
            shown = _each(function, *indices) if by_element else function(*indices)
            return shown.to("cpu").bool().expand(indices[0].shape)  # type: ignore[no-any-return]

    try:
        with torch.inference_mode(False), torch.no_grad():
            if q_len == kv_len and q_offset == kv_offset == 0:
                found = read(look, batch, q_len)
                mask = None if found is None else found.compact()
            else:
                mask = _over_cache(look, batch, q_len, kv_len)
    except Exception:  # a function of tensors whose content is not known on the host, or of another kind
        mask = None
    if facts is not None:
        if len(_answers) >= 1024:  # one question for each token that is generated
            _answers.clear()
        _answers[asked] = mask
    return mask


def _each(function: Any, *indices: Tensor) -> Tensor:
    """`function` of one index at a time, as vmap defines it, for expanded tensors of one shape."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    shape = indices[0].shape
    varying = [[size != 1 and index.stride(d) != 0 for d, size in enumerate(shape)] for index in indices]
    mapped = function
    for d in range(len(shape) - 1, -1, -1):  # what does not depend on an index is not evaluated for all of its values
        axes = tuple(0 if varies[d] else None for varies in varying)
        if 0 in axes:
            mapped = torch.vmap(mapped, in_dims=axes)
    compact = [
        index[tuple(slice(None) if v else 0 for v in varies)] for index, varies in zip(indices, varying, strict=True)
    ]
    with TransformGetItemToIndex():
        shown = mapped(*compact)
    together = [any(parts) for parts in zip(*varying, strict=True)]
    return shown.reshape([size if varies else 1 for size, varies in zip(shape, together, strict=True)])  # type: ignore


def _over_cache(look: Any, batch: int, q_len: int, kv_len: int) -> Mask | None:
    """Causal, or a window, counted from the last key, which is that of the last query, or causal from the first key."""
    if kv_len < q_len:
        return None
    b, rows = torch.arange(batch, device="cpu").reshape(-1, 1, 1), torch.arange(q_len, device="cpu").reshape(1, -1, 1)
    keys = torch.arange(kv_len, device="cpu").reshape(1, 1, -1)
    some = torch.unique(torch.linspace(0, q_len - 1, 32, device="cpu").long()).reshape(1, -1, 1)
    count = int(look(b[:1], rows[:, -1:], keys).sum())
    if count == 0:
        return None

    def shown(ahead: int, window: int) -> bool:
        def agrees(row: Tensor, key: Tensor) -> bool:
            wanted = (key <= row + ahead) & (key > row + ahead - window)
            return torch.equal(look(b, row, key), wanted.expand(batch, *wanted.shape[1:]))

        upper, lower = rows + ahead, (rows + ahead - window + 1).clamp(min=0)
        edges = torch.cat((lower - 1, lower, upper, upper + 1), -1).clamp(0, kv_len - 1)
        return agrees(rows, edges) and agrees(some, keys)

    if shown(kv_len - q_len, count):
        if count < kv_len:
            return Mask.band(count)
        return Mask.full() if q_len == 1 else Mask.causal()
    if count == q_len and shown(0, kv_len):  # a static cache, empty before
        return Mask.causal("upper_left")
    return None


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
