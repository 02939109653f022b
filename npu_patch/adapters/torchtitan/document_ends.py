"""Where the packed documents of torchtitan's metadata end, known on the host."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...discovery.bracket import plain, quiet
from ...ops.attention import Mask
from ...ops.per_tensor import PerTensor
from ...registry import Target, Unrecognised
from ...sites import Site
from .aside import aside
from .positions import facts
from .typecheck import type_checking

_OP, _LIBRARY = "attention", "torchtitan"
_MAX_DOCUMENTS = 1024  # of one call of the operator


class Metadata(NamedTuple):
    """What the attentions read, under torchtitan's names; for probes."""

    cu_seq_q: Any
    cu_seq_k: Any
    max_q: int
    max_k: int


Part = tuple[tuple[int, int], tuple[int, int], Mask]  # query tokens, key tokens, and what is seen of them


@dataclass(eq=False)
class _Ends:
    """Cumulative lengths on the host, and what the layers of a step share of them."""

    host: tuple[int, ...]
    ready: dict[Any, Any] = field(default_factory=dict)


_ends: PerTensor[_Ends] = PerTensor()


def _ends_of(lengths: Tensor, host: Any = None) -> _Ends:
    """Of a tensor that is seen for the first time, and whose content nobody knows: waits for the device once."""
    known = _ends.get(lengths) or _ends.find(lengths)
    if known is None:
        if host is None:
            with aside():
                host = lengths.detach().to("cpu").tolist()
        known = _ends.put(lengths, _Ends(tuple(int(x) for x in host)))
    return known


def parts_of(metadata: Any, q_total: int, kv_total: int, window: tuple[int, int]) -> list[Part] | str:
    """What the operator is to be called with for the documents of metadata, or why it cannot be."""
    q_lengths, kv_lengths = metadata.cu_seq_q, metadata.cu_seq_k
    for lengths in (q_lengths, kv_lengths):
        if type(lengths) is not Tensor or lengths.dim() != 1:
            return "the ends of documents are not a plain tensor"
    q_ends = _ends_of(q_lengths, getattr(metadata, "cu_seq_q_host", None))
    kv_ends = q_ends if kv_lengths is q_lengths else _ends_of(kv_lengths)
    question = (kv_ends.host if kv_ends is not q_ends else None, q_total, kv_total, tuple(window))
    answer: list[Part] | str | None = q_ends.ready.get(question)
    if answer is None:
        answer = q_ends.ready[question] = _cut(q_ends.host, kv_ends.host, q_total, kv_total, tuple(window))
    return answer


def _cut(
    q_ends: tuple[int, ...], kv_ends: tuple[int, ...], q_total: int, kv_total: int, window: tuple[int, ...]
) -> list[Part] | str:
    """So many documents at a time as the operator takes."""
    if len(q_ends) != len(kv_ends) or len(q_ends) < 2:
        return "as many documents of keys as of queries are needed"
    if (q_ends[0], q_ends[-1], kv_ends[0], kv_ends[-1]) != (0, q_total, 0, kv_total):
        return "documents that do not cover all tokens"
    if window == (-1, 0) or (window[0] >= 0 and window[1] == 0):
        options: dict[str, Any] = {"causal": True, "window": None if window[0] < 0 else window[0] + 1}
    elif window == (-1, -1):
        options = {"causal": False}
    else:
        return f"a window of {window[0]} tokens before and {window[1]} after the query"
    pairs = list(zip(q_ends, kv_ends, strict=True))
    pairs = pairs[:1] + [pair for before, pair in pairwise(pairs) if pair != before]
    parts: list[Part] = []
    for first in range(0, len(pairs) - 1, _MAX_DOCUMENTS):
        group = pairs[first : first + _MAX_DOCUMENTS + 1]
        (q_from, kv_from), (q_to, kv_to) = group[0], group[-1]
        try:
            mask = Mask.documents(
                tuple(q - q_from for q, _ in group[1:]), tuple(kv - kv_from for _, kv in group[1:]), **options
            )
        except ValueError as error:
            return str(error)
        parts.append(((q_from, q_to), (kv_from, kv_to), mask))
    return parts


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The functions of a module that make metadata of positions, or of tokens and the one that ends a document."""
    for path, value in list(vars(module).items()):
        if isinstance(value, FunctionType) and value.__module__ == module.__name__ and _makes_metadata(value):
            yield Target(
                _OP,
                _LIBRARY,
                module.__name__,
                path,
                _metadata_adapter,
                "finds the ends of packed documents",
                (_LIBRARY,),
                supporting=True,
            )


def _makes_metadata(function: FunctionType) -> bool:
    names = list(inspect.signature(function).parameters)
    if names[:1] == ["positions"]:
        rest: tuple[int, ...] = ()
        given = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]], device="cpu")
    elif len(names) == 2 and names[1] == "eos_id":
        rest, given = (9,), torch.tensor([[5, 9, 5, 5], [5, 5, 5, 5]], device="cpu")
    else:
        return False
    try:
        with quiet():
            made = plain(function)(given, *rest)
            fields = set(getattr(type(made), "_fields", ()))
            return fields >= set(Metadata._fields) and made.cu_seq_q.tolist() == [0, 2, 4, 8]
    except Exception:  # foreign code
        return False


def _metadata_adapter(original: Any, site: Site) -> Callable[..., Any]:
    first = next(iter(inspect.signature(original).parameters))

    def make(*args: Any, **kwargs: Any) -> Any:
        given: Any = args[0] if args else kwargs.get(first)
        host = None
        if isinstance(given, Tensor) and given.device.type == "npu" and not is_compiling() and not type_checking():
            host = facts(given)
        if host is None:
            return original(*args, **kwargs)
        made = original(host.host, *args[1:], **{name: x for name, x in kwargs.items() if name != first})
        with aside():
            q_lengths = made.cu_seq_q.to(given.device)
            kv_lengths = q_lengths if made.cu_seq_k is made.cu_seq_q else made.cu_seq_k.to(given.device)
        for lengths, on_host in ((q_lengths, made.cu_seq_q), (kv_lengths, made.cu_seq_k)):
            if _ends.get(lengths) is None:
                _ends.put(lengths, _Ends(tuple(on_host.tolist())))
        return made._replace(cu_seq_q=q_lengths, cu_seq_k=kv_lengths)

    return make
