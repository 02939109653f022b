"""What a mask shows, found out by looking at it: a function that says for indices whether a query sees a key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .masks import Mask

_EXHAUSTIVE = 1 << 17  # so many (query, key) pairs are all looked at; above, a sample of them
_SAMPLE = 1 << 15


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


def read(look: Look, batch: int, length: int) -> Meaning | None:
    """The meaning of a mask over (batch, length, length); None where it has no such form.

    Document boundaries are where a token does not see the one before it; the window is what the last token of the
    longest document sees.  Then the form is verified: for every query the ends of what it sees and what lies beyond
    them, and all pairs of a sample of tokens around the boundaries; all pairs there are where they are few.
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
    return meaning if _verified(look, meaning) else None


def _bounds(starts: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """First and last token of the document of every token."""
    length = starts.shape[1]
    first = torch.where(starts, t, 0).cummax(1).values
    following = torch.cat((starts[:, 1:], torch.ones_like(starts[:, :1])), 1)  # the next token begins a document
    last = torch.where(following, t, length).flip(1).cummin(1).values.flip(1)
    return first, last


def _verified(look: Look, meaning: Meaning) -> bool:
    batch, length = meaning.lower.shape
    b = torch.arange(batch, device="cpu").reshape(-1, 1, 1)
    t = torch.arange(length, device="cpu").reshape(1, -1, 1)
    lower, upper = meaning.lower.unsqueeze(-1), meaning.upper.unsqueeze(-1)

    def agrees(sample: Tensor, query: Tensor, key: Tensor, head: int = 0) -> bool:
        wanted = (key >= lower[sample, query, 0]) & (key <= upper[sample, query, 0])
        return torch.equal(look(sample, query, key, head), wanted)

    if batch * length * length <= _EXHAUSTIVE:
        if not agrees(b, t, t.reshape(1, 1, -1)):
            return False
    else:
        edges = torch.cat((lower, lower - 1, upper, upper + 1), -1).clamp(0, length - 1)
        tokens = _sample(meaning.starts, max(8, int((_SAMPLE / batch) ** 0.5)))
        if not agrees(b, t, edges) or not agrees(b, tokens.reshape(1, -1, 1), tokens.reshape(1, 1, -1)):
            return False
    tokens = _sample(meaning.starts, 16)  # another head sees the same
    return all(agrees(b[:2], tokens.reshape(1, -1, 1), tokens.reshape(1, 1, -1), head) for head in (1, 2))


def _sample(starts: Tensor, count: int) -> Tensor:
    """Up to `count` token indices: both ends, some boundaries with their neighbours, and others in between."""
    length = starts.shape[1]
    boundaries = torch.nonzero(starts.any(0)).flatten()
    some = boundaries[:: max(1, len(boundaries) * 6 // count)]
    near = (some.unsqueeze(1) + torch.tensor([-1, 0, 1], device="cpu")).flatten().clamp(0, length - 1)
    spread = torch.linspace(0, length - 1, count // 2, device="cpu").long()
    return torch.unique(torch.cat((near, spread)))
