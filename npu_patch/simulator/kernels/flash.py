"""The mathematics of fused attention on tensors [B, N, S, D]: forward with softmax statistics, backward from them.

Everything is float32 inside. Hardware rounds the probabilities to the input's dtype before it multiplies them with the
values; that is not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: What a hidden score becomes. Finite, as on the device: a row that hides everything is then the mean of all values.
HIDDEN_SCORE = torch.finfo(torch.float32).min
#: The softmax sum of a fully hidden row where such rows are handled: every probability recomputed from it is 0.
HIDDEN_ROW_SUM = torch.finfo(torch.float32).max


@dataclass
class Attention:
    """The inputs of one call. ``query`` [B, N, Sq, D]; ``key``, ``value`` [B, Nkv, Skv, D or Dv], Nkv dividing N.

    ``hidden`` broadcasts to [B, N, Sq, Skv], True where a key is hidden; ``pse`` likewise; ``sink`` [N].
    ``zero_hidden_rows``: a fully hidden row gives 0 instead of the mean of all values. ``kept`` [B, N, Sq, Skv]: False
    where dropout drops a probability; the others are divided by ``keep_prob``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    hidden: Tensor | None = None
    pse: Tensor | None = None
    sink: Tensor | None = None
    zero_hidden_rows: bool = False
    kept: Tensor | None = None
    keep_prob: float = 1.0

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.key.shape[1]

    def scores(self) -> Tensor:
        scores = self.query.float() @ _repeat(self.key, self.group).transpose(-1, -2)
        if self.pse is not None:
            scores = scores + self.pse.float()
        scores = scores * self.scale
        return scores if self.hidden is None else scores.masked_fill(self.hidden, HIDDEN_SCORE)

    def dropped(self, weights: Tensor) -> Tensor:
        return weights if self.kept is None else weights * self.kept / self.keep_prob

    def sink_column(self) -> Tensor | None:
        return None if self.sink is None else self.sink.float().view(1, -1, 1, 1)


def _repeat(tensor: Tensor, group: int) -> Tensor:
    wide = tensor.float()
    return wide.repeat_interleave(group, 1) if group > 1 else wide


def forward(a: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, N, Sq, Dv] in the query's dtype, and row maximum and row sum [B, N, Sq, 1] in float32."""
    scores = a.scores()
    maximum = (
        scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), HIDDEN_SCORE)
    )
    sink = a.sink_column()
    hidden_rows = (maximum == HIDDEN_SCORE) if a.zero_hidden_rows and sink is None else None
    if sink is not None:
        maximum = torch.maximum(maximum, sink)
    weights = torch.exp(scores - maximum)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - maximum)
    if hidden_rows is not None:
        total = total.masked_fill(hidden_rows, HIDDEN_ROW_SUM)
        weights = weights.masked_fill(hidden_rows, 0.0)
    output = a.dropped(weights / total) @ _repeat(a.value, a.group)
    return output.to(a.query.dtype), maximum, total


@dataclass
class Gradients:
    query: Tensor
    key: Tensor
    value: Tensor
    pse: Tensor | None
    sink: Tensor | None


def backward(a: Attention, grad: Tensor, output: Tensor, maximum: Tensor, total: Tensor) -> Gradients:
    """The gradients, from what forward saved: wrong statistics or a wrong output give wrong gradients."""
    scores = a.scores()
    probabilities = (torch.exp(scores - maximum) / total).masked_fill(total == HIDDEN_ROW_SUM, 0.0)
    g = grad.float()
    value = _repeat(a.value, a.group)
    # What the softmax's derivative subtracts from every column of a row.
    row = (g * output.float()).sum(-1, keepdim=True)
    d_scores = probabilities * (a.dropped(g @ value.transpose(-1, -2)) - row)
    if a.hidden is not None:
        d_scores = d_scores.masked_fill(a.hidden, 0.0)
    d_scaled = d_scores * a.scale
    d_query = d_scaled @ _repeat(a.key, a.group)
    d_key = _sum_groups(d_scaled.transpose(-1, -2) @ a.query.float(), a.group)
    d_value = _sum_groups(a.dropped(probabilities).transpose(-1, -2) @ g, a.group)
    d_pse = None if a.pse is None else d_scaled.sum_to_size(a.pse.shape).to(a.pse.dtype)
    sink = a.sink_column()
    d_sink = None
    if sink is not None:
        d_sink = -(torch.exp(sink - maximum) / total * row).sum((0, 2, 3))
    return Gradients(d_query.to(a.query.dtype), d_key.to(a.key.dtype), d_value.to(a.value.dtype), d_pse, d_sink)


def _sum_groups(tensor: Tensor, group: int) -> Tensor:
    return tensor.unflatten(1, (-1, group)).sum(2) if group > 1 else tensor
