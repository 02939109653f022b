"""Recognise eager attention functions by what they compute: grouped queries, additive masks, sinks, soft caps."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .bracket import NotRecognised, Signal, failure, foreign_code, no_random_draws, plain, quiet
from .branches import Settled, check_branches
from .outside import Part, parts_of
from .watch import Watch

_SCALE, _HEAD_DIM = 0.3, 9  # of the probes; no head size is 9
_HEADS, _KV_HEADS = 4, 2


@dataclass(frozen=True)
class EagerMeaning:
    """What `f(module, query, key, value, attention_mask, …)` computes: `softmax(scale q k + mask) v`, and the weights.

    Args:
        groups: key heads are repeated `module.num_key_value_groups` times; else there are as many as query heads.
        sinks: a logit of each head, `module.sinks`, takes part in the softmax and is then dropped.
        sinks_optional: `module.sinks` may be None.
        default_scale: without one: "query" D ** -0.5, "head_dim" module.head_dim ** -0.5, "" it has to be given.
        parts: other functions of the library that took part.
    """

    groups: bool
    sinks: bool
    sinks_optional: bool
    default_scale: str
    parts: tuple[Part, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        parts = ["eager attention"]
        if self.groups:
            parts.append("grouped queries")
        if self.sinks:
            parts.append("sinks")
        return ", ".join(parts)


class _Unknown(Signal):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _Layer:
    """Stands for the attention module and takes down what is read."""

    def __init__(self, **values: Any) -> None:
        self.__dict__["values"], self.__dict__["read"] = values, set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        if name not in self.values:
            raise _Unknown(name)
        return self.values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        raise _Unknown(name)


@foreign_code()
def recognise_eager(function: object, ignored: Collection[str] = ()) -> EagerMeaning:
    """What an eager attention function means.

    Queries, keys and values are (B, N, S, D); the result is (B, S, N, Dv) and the weights.

    Args:
        function: the function.
        ignored: arguments that the caller takes whatever they are; of any other that is not None the original is told.

    Raises:
        NotRecognised: it computes something else, reads something else from its module, or takes other arguments.
    """
    original = plain(function)
    names = tuple(inspect.signature(original).parameters)
    if names[:5] != ("module", "query", "key", "value", "attention_mask") or "scaling" not in names:
        raise NotRecognised(f"takes ({', '.join(names)})")
    with quiet(), no_random_draws():
        watch = Watch(str(original.__module__))
        try:
            meaning = _recognise(original, watch)
        except _Unknown as error:
            raise NotRecognised(f"reads or writes its module's attribute {error.name!r}") from None
        except BaseException as error:
            raise failure(error) from None
        check_branches(watch, Settled(parameters=frozenset((original.__code__,)), open=frozenset(ignored)))
        return replace(meaning, parts=parts_of(watch))


def _recognise(original: Any, watch: Watch) -> EagerMeaning:
    generator = torch.Generator().manual_seed(5)
    read: set[str] = set()

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Any, **keywords: Any) -> Tensor:
        layer = _Layer(
            num_key_value_groups=q.shape[1] // k.shape[1],
            training=keywords.pop("training", False),
            head_dim=_HEAD_DIM,
            sinks=sinks,
        )
        output, weights = watch.run(original, layer, q, k, v, mask, **{"scaling": _SCALE, **keywords})
        read.update(layer.read)
        if not isinstance(weights, Tensor) or weights.shape != (*q.shape[:3], k.shape[2]):
            raise NotRecognised("returns no attention weights")
        return output  # type: ignore[no-any-return]

    groups = False
    sinks = torch.randn(_HEADS, generator=generator)
    for q, k, v, mask in _inputs(generator):
        if q.shape[1] == k.shape[1] and not groups:  # as many key heads as query heads
            run(q, k, v, mask, sinks)
            groups = "num_key_value_groups" in read
        if not groups:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        own = sinks if "sinks" in read else None
        for training in (False, True):
            _compare(run(q, k, v, mask, sinks, training=training), q, k, v, mask, _SCALE, own)
        _compare(run(q, k, v, mask, sinks, dropout=0.5), q, k, v, mask, _SCALE, own)  # not in training: no dropout
        if bool(run(q, k, v, mask, sinks, dropout=1.0, training=True).any()):
            raise NotRecognised("drops no probabilities in training")
        # Keywords that models hand to every function: what they say is in the mask and the module already.
        ignored: dict[str, Any] = {"sliding_window": 2, "s_aux": sinks + 1.0, "is_causal": True, "position_ids": None}
        _compare(run(q, k, v, mask, sinks, **ignored), q, k, v, mask, _SCALE, own)
    _check_bfloat16(run, generator, sinks)
    scale = _default_scale(original, run, generator, sinks)
    reads_sinks = "sinks" in read
    return EagerMeaning(groups, reads_sinks, reads_sinks and _works_without_sinks(run, generator), scale)


def _inputs(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    for kv_heads, q_len, kv_len, value_size, mask in (
        (_HEADS, 5, 5, 8, None),
        (_KV_HEADS, 5, 5, 8, "soft"),
        (_KV_HEADS, 3, 6, 4, "hard"),
        (1, 1, 6, 8, None),
    ):
        q = torch.randn(2, _HEADS, q_len, 8, generator=generator)
        k = torch.randn(2, kv_heads, kv_len, 8, generator=generator)
        v = torch.randn(2, kv_heads, kv_len, value_size, generator=generator)
        added = None if mask is None else torch.randn(2, 1, q_len, kv_len, generator=generator)
        if mask == "hard":
            hidden = torch.rand(2, 1, q_len, kv_len, generator=generator) > 0.5
            hidden[..., 0] = False
            added = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
        yield q, k, v, added


def _default_scale(original: Any, run: Any, generator: torch.Generator, sinks: Tensor) -> str:
    if inspect.signature(original).parameters["scaling"].default is inspect.Parameter.empty:
        return ""
    q, k, v, mask = next(_inputs(generator))
    output = run(q, k, v, mask, sinks, scaling=None)
    for name, size in (("query", 8), ("head_dim", _HEAD_DIM)):
        for own in (None, sinks):
            if torch.allclose(output, formula(q, k, v, mask, size**-0.5, own), rtol=1e-5, atol=1e-5):
                return name
    raise NotRecognised("has an unknown scale of its own")


def _works_without_sinks(run: Any, generator: torch.Generator) -> bool:
    q, k, v, mask = next(_inputs(generator))
    try:
        output = run(q, k, v, mask, None)
    except Exception:
        return False
    _compare(output, q, k, v, mask, _SCALE, None)
    return True


def _check_bfloat16(run: Any, generator: torch.Generator, sinks: Tensor) -> None:
    q, k, v, mask = next(_inputs(generator))
    output = run(*(x.bfloat16() for x in (q, k, v)), mask, sinks.bfloat16())
    if output.dtype is not torch.bfloat16:
        raise NotRecognised("returns another type than it was given")


def _compare(
    output: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None
) -> None:
    wanted = formula(q, k, v, mask, scale, sinks)
    if output.shape != wanted.shape:
        raise NotRecognised("returns something else than an attention's output")
    if not torch.allclose(output, wanted, rtol=1e-5, atol=1e-5):
        raise NotRecognised("computes no known attention")


def formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None = None) -> Tensor:
    """(B, S, N, Dv) of (B, N, S, D) and an additive mask."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * scale
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)), -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)
