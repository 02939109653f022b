"""What a rotary class computes, found out by running it on small CPU inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...discovery.bracket import NotRecognised, quiet, same
from .rope_tables import FULL_WIDTH, MODES

__all__ = [
    "NotRecognised",
    "RotaryClass",
    "agrees",
    "asks_for_rows",
    "recognise_forward",
    "recognise_rotation",
    "rotated",
    "sample_cache",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
B, L, D, HEADS = 2, 5, 8, 4
_INVERSE = "inverse"


@dataclass(frozen=True)
class RotaryClass:
    """What the rotation of a class takes and computes.

    Args:
        kind: of its cache, a key of `FULL_WIDTH`.
        ranks: numbers of dimensions of query and key that it takes: 4 for (B, L, N, D), 3 for (T, N, D).
        inverse: it has a keyword `inverse`, and its key may be None.
    """

    kind: str
    ranks: frozenset[int]
    inverse: bool = False

    def __str__(self) -> str:
        return f"{MODES[self.kind]}, in float32" + (", of packed tokens" if self.ranks == {3} else "")


def rotated(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """The rotation in the type of what is multiplied."""
    if mode == "half":
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    return x * cos + turned * sin


def sample_cache(kind: str, *shape: int, generator: torch.Generator) -> Tensor:
    """A cache of a kind with arbitrary entries, of the given shape before its last dimensions."""
    if kind == "half":
        return torch.randn(*shape, 2 * D, generator=generator)
    if kind == "matrices":
        return torch.randn(*shape, D // 2, 2, 2, generator=generator)
    return torch.view_as_complex(torch.randn(*shape, D // 2, 2, generator=generator))


def _inputs(shape: tuple[int, ...], count: int, generator: torch.Generator, dtype: torch.dtype) -> list[Tensor]:
    """The second one has one head only; rows of 0, of 1e-4 and of 1e4."""
    made = []
    for i in range(count):
        x = torch.randn([1 if i and n == HEADS else n for n in shape], generator=generator)
        if not i:
            rows = x.view(-1, *shape[-2:])
            rows[0], rows[1], rows[-1] = 0.0, rows[1] * 1e-4, rows[-1] * 1e4
        made.append(x.to(dtype).requires_grad_())
    return made


def agrees(
    call: Callable[..., Any],
    cos: Tensor,
    sin: Tensor,
    mode: str,
    dtype: torch.dtype,
    shape: tuple[int, ...] = (B, L, HEADS, D),
    count: int = 2,
    wide: bool = True,
) -> bool:
    """Whether results and gradients of a call are those of a rotation by the tables.

    Args:
        call: takes the tensors; gives a tuple of as many, or one tensor for one.
        cos, sin: that broadcast to them.
        mode: "half" or "interleave".
        dtype: of the tensors.
        shape: of the first one.
        count: how many tensors.
        wide: rotated in float32, else in their type.
    """
    generator = torch.Generator().manual_seed(7)
    inputs = _inputs(shape, count, generator, dtype)
    results = call(*inputs)
    results = (results,) if count == 1 else results
    if not (isinstance(results, tuple) and len(results) == count):
        return False
    for x, y in zip(inputs, results, strict=True):
        if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
            return False
        if wide:
            wanted = rotated(x.float(), cos, sin, mode).type_as(x)
        else:
            wanted = rotated(x, cos.to(dtype), sin.to(dtype), mode)
        gradient = torch.randn(y.shape, generator=generator).to(dtype)
        ours = torch.autograd.grad(y, x, gradient, retain_graph=True)[0]
        theirs = torch.autograd.grad(wanted, x, gradient)[0]
        # float32: products of two large numbers may cancel, in whatever order they are added.
        if not same(y, wanted, loose=dtype is torch.float32) or not same(ours, theirs, loose=True):
            return False
    return True


def _parameters(function: Any) -> tuple[list[str], bool]:
    """Names of positional parameters, and whether there is a keyword `inverse` beside them."""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    others = [p for p in parameters if p.name not in names]
    inverse = [p.name for p in others] == [_INVERSE] and others[0].default is False
    if others and not inverse:
        raise NotRecognised(f"takes {', '.join(p.name for p in others)}")
    return names, inverse


_LAYOUTS = {4: (B, L, HEADS, D), 3: (L, HEADS, D)}


def recognise_rotation(cls: Any) -> RotaryClass:
    """What `cls.apply_rotary_emb(query, key, rope_cache)` computes.

    Raises:
        NotImplementedError: it is abstract.
        NotRecognised: it computes something else.
    """
    function = cls.apply_rotary_emb
    names, inverse = _parameters(function)
    if names != ["query", "key", "rope_cache"]:
        raise NotRecognised("takes other arguments than query, key and a rotary cache")
    reason = "computes no known rotation"
    with quiet():
        for kind in ("interleave", "half"):
            ranks = set()
            for rank, shape in _LAYOUTS.items():
                try:
                    if _rotates(function, kind, shape, inverse):
                        ranks.add(rank)
                except NotImplementedError as error:
                    if not str(error):
                        raise
                    reason = f"fails on a small input: NotImplementedError: {str(error)[:80]}"
                except Exception as error:
                    reason = f"fails on a small input: {type(error).__name__}: {str(error)[:80]}"
            if ranks:
                return RotaryClass(kind, frozenset(ranks), inverse)
    raise NotRecognised(reason)


def _rotates(function: Any, kind: str, shape: tuple[int, ...], inverse: bool) -> bool:
    generator = torch.Generator().manual_seed(3)
    fronts = [(batch, L, 1) for batch in (1, B)] if len(shape) == 4 else [(L, 1)]
    for front in fronts:
        cache = sample_cache(kind, *front, generator=generator)
        tables = FULL_WIDTH[kind](cache)
        for dtype in DTYPES:
            if not agrees(partial(function, rope_cache=cache), *tables, MODES[kind], dtype, shape):
                return False
        alone = partial(function, key=None, rope_cache=cache)
        if inverse and not agrees(alone, *tables, MODES[kind], torch.float32, shape, count=1):
            return False
    return True


def recognise_forward(cls: Any, rotation: RotaryClass) -> frozenset[int]:
    """Check that `cls.forward(query, key, positions)` rotates by the rows `positions` of `self.cache`.

    Returns:
        The numbers of dimensions for which it does.

    Raises:
        NotRecognised: it does something else.
    """
    names, inverse = _parameters(cls.forward)
    if names != ["self", "query", "key", "positions"] or inverse != rotation.inverse:
        raise NotRecognised("takes other arguments than query, key and positions")
    reason = "does not rotate by the rows of its cache that the positions name"
    ranks = set()
    with quiet():
        for rank in rotation.ranks:
            try:
                if _gathers(cls, rotation, rank):
                    ranks.add(rank)
            except Exception as error:
                reason = f"fails on a small input: {type(error).__name__}: {str(error)[:80]}"
    if not ranks:
        raise NotRecognised(reason)
    return frozenset(ranks)


def _gathers(cls: Any, rotation: RotaryClass, rank: int) -> bool:
    generator = torch.Generator().manual_seed(5)
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    cache = sample_cache(rotation.kind, 3 * L, generator=generator)
    module.register_buffer("cache", cache, persistent=False)
    cos, sin = FULL_WIDTH[rotation.kind](cache)
    rows = torch.randint(0, 3 * L, (B, L), generator=generator)
    several = (None, rows, rows[:1], torch.arange(L).expand(B, L)) if rank == 4 else (None, rows[0], torch.arange(L))
    for positions in several:
        index = torch.arange(L) if positions is None else positions
        tables = cos[index].unsqueeze(-2), sin[index].unsqueeze(-2)
        for dtype in DTYPES:
            call = partial(module, positions=positions)
            if not agrees(call, *tables, MODES[rotation.kind], dtype, _LAYOUTS[rank]):
                return False
    return True


def asks_for_rows(cls: Any, rotation: RotaryClass) -> bool:
    """Whether `forward` of a module rotates by what its `_reshape_cache(query, positions)` gives, whatever that is."""
    generator = torch.Generator().manual_seed(9)
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    given: list[Any] = []
    positions = torch.randint(0, L, (B, L, 3), generator=generator, device="cpu")
    with quiet():
        for _ in range(2):
            cache = sample_cache(rotation.kind, B, L, 1, generator=generator)

            def reshape_cache(query: Tensor, positions: Any, cache: Tensor = cache) -> Tensor:
                given.append((query.shape, positions))
                return cache

            vars(module)["_reshape_cache"] = reshape_cache
            call = partial(module, positions=positions)
            try:
                if not agrees(call, *FULL_WIDTH[rotation.kind](cache), MODES[rotation.kind], torch.float32):
                    return False
            except Exception:  # foreign code
                return False
    return all(shape == _LAYOUTS[4] and handed is positions for shape, handed in given)
