"""What a mask shows, found out by looking at it: a function that says for indices whether a query sees a key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .masks import Mask

_PAIRS = 1 << 22  # as many (sample, query, key) as one sample of 2048 tokens has
_CHUNK = 1 << 22  # looked at together
_HEADS = 256  # as many as the fused operator takes


class Look(Protocol):
    """`look(sample, query, key, head)`: whether it is seen; bool, on the host, for indices there that broadcast."""

    def __call__(self, b: Tensor, q: Tensor, kv: Tensor, head: Tensor | int = 0) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Meaning:
    """Query t of sample b sees the keys lower[b, t] … upper[b, t], and no others.

    Args:
        lower, upper: (B, L) on the host, both inclusive.
        starts: (B, L), True where a document begins.
        causal: no query sees a later key.
        window: how many keys a query sees at most, itself included; None without a window.
    """

    lower: Tensor
    upper: Tensor
    starts: Tensor
    causal: bool
    window: int | None

    def compact(self) -> Mask:
        """The same for the fused operator, without a written-out mask."""
        if bool(self.starts[:, 1:].any()):
            starts = torch.nonzero(self.starts.flatten()).flatten().tolist()
            ends = (*starts[1:], self.starts.numel())
            return Mask.documents(ends, ends, causal=self.causal, window=self.window)
        if self.window is not None:
            return Mask.band(self.window)
        return Mask.causal() if self.causal else Mask.full()

    def select(self, rows: Any) -> Meaning:
        """The meaning for some of the samples."""
        return Meaning(self.lower[rows], self.upper[rows], self.starts[rows], self.causal, self.window)


def read(look: Look, batch: int, length: int, heads: int = _HEADS, pairs: int = _PAIRS) -> Meaning | None:
    """The meaning of a mask over (batch, length, length); None where it has no such form.

    Document boundaries are where a token does not see the one before it; the window is what the last token of the
    longest document sees.  Then the form is verified (`shows`), and that a sample of tokens is seen alike by the heads.

    Args:
        heads: so many are compared; 1 where it is known that the mask is the same for all.
        pairs: about how many (sample, query, key) are looked at.
    """
    b = torch.arange(batch, device="cpu").unsqueeze(1)
    t = torch.arange(length, device="cpu").unsqueeze(0)
    before, after = (t - 1).clamp(min=0), (t + 1).clamp(max=length - 1)
    own, back, ahead = look(b.unsqueeze(2), t.unsqueeze(2), torch.stack((t, before, after), -1)).unbind(-1)
    if not bool(own.all()):
        return None
    causal = not bool(ahead[:, :-1].any())
    if not causal and not torch.equal(ahead[:, :-1], back[:, 1:]):
        return None
    starts = ~back
    starts[:, 0] = True
    window = None
    if length > 1 and bool(starts.all()):
        starts[:, 1:] = False  # every token sees itself alone: a window of one
        window = 1 if causal else None
    first, last = _bounds(starts, t)
    if causal and window is None:
        distance = t - first
        sample, query = divmod(int(distance.argmax()), length)
        keys = torch.arange(int(first[sample, query]), query + 1, device="cpu")
        seen = look(torch.tensor(sample, device="cpu"), torch.tensor(query, device="cpu"), keys)
        count = int(seen.sum())
        if not bool(seen[-count:].all()):
            return None
        window = count if count < len(keys) else None
    lower = first if window is None else torch.maximum(first, t - window + 1)
    upper = t.expand(batch, -1) if causal else last
    meaning = Meaning(lower, upper, starts, causal, window)
    return meaning if shows(look, meaning, pairs) and _alike(look, meaning, heads) else None


def _bounds(starts: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """First and last token of the document of every token."""
    length = starts.shape[1]
    first = torch.where(starts, t, 0).cummax(1).values
    following = torch.cat((starts[:, 1:], torch.ones_like(starts[:, :1])), 1)  # the next token begins a document
    last = torch.where(following, t, length).flip(1).cummin(1).values.flip(1)
    return first, last


def shows(look: Look, meaning: Meaning, pairs: int = _PAIRS) -> bool:
    """Whether head 0 of a mask shows what the meaning says.

    Up to `pairs` (sample, query, key) every one is looked at.  Above, for every query the ends of what it sees and what
    lies beyond them, and whole rows and columns: those around document boundaries, others spread evenly, and random
    ones.  A mask that differs inside a document, in no such row or column, is not told from its meaning there.
    """
    batch, length = meaning.lower.shape
    b = torch.arange(batch, device="cpu").reshape(-1, 1, 1)
    t = torch.arange(length, device="cpu")
    lower, upper = (bound.int().unsqueeze(-1) for bound in (meaning.lower, meaning.upper))

    def agrees(queries: Tensor, keys: Tensor) -> bool:
        at, row = keys.int(), queries.reshape(-1)
        wanted = (at >= lower[:, row]) & (at <= upper[:, row])
        return torch.equal(look(b, queries, keys), wanted)

    def agree(queries: Tensor, keys: Tensor) -> bool:
        parts = queries.split(max(1, _CHUNK // (batch * len(keys))))
        return all(agrees(part.reshape(1, -1, 1), keys.reshape(1, 1, -1)) for part in parts)

    if batch * length * length <= pairs:
        return agree(t, t)
    edges = torch.cat((lower, lower - 1, upper, upper + 1), -1).clamp(0, length - 1).long()
    wanted = (edges >= lower) & (edges <= upper)
    if not torch.equal(look(b, t.reshape(1, -1, 1), edges), wanted):
        return False
    lines = _sample(meaning.starts, max(8, pairs // (4 * batch * length)))
    return agree(lines, t) and agree(t, lines)


def _alike(look: Look, meaning: Meaning, heads: int) -> bool:
    """Whether every head sees what the meaning says, in some of the samples and tokens."""
    if heads == 1:
        return True
    b = torch.arange(min(2, len(meaning.lower)), device="cpu").reshape(-1, 1, 1, 1)
    tokens = _sample(meaning.starts, 16)
    query, key = tokens.reshape(1, 1, -1, 1), tokens.reshape(1, 1, 1, -1)
    seen = look(b, query, key, torch.arange(1, heads, device="cpu").reshape(1, -1, 1, 1))
    wanted = (key >= meaning.lower[b, query]) & (key <= meaning.upper[b, query])
    return torch.equal(seen, wanted.expand(seen.shape))


def _sample(starts: Tensor, count: int) -> Tensor:
    """About `count` token indices: both ends, some boundaries with their neighbours, some in between, random ones."""
    length = starts.shape[1]
    boundaries = torch.nonzero(starts.any(0)).flatten()
    some = boundaries[:: max(1, len(boundaries) * 6 // count)]
    near = (some.unsqueeze(1) + torch.tensor([-1, 0, 1], device="cpu")).flatten().clamp(0, length - 1)
    spread = torch.linspace(0, length - 1, max(2, count // 4), device="cpu").long()
    generator = torch.Generator().manual_seed(length)
    random = torch.randint(0, length, (count // 4,), generator=generator, device="cpu")
    return torch.unique(torch.cat((near, spread, random)))
