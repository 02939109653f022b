"""Mixture of experts: tokens sorted by expert and back.

The `grouped_mm` entry of transformers' registry of experts: replacing it reaches models that exist already, and every
class with the same contract.  The products stay the library's `_grouped_linear`, the gate the class's `_apply_gate`:
both may be targets of other ops, or somebody's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ... import functions
from ...discovery import reason_of
from ...discovery.experts import recognise_experts, recognise_linear
from ...ops import permute as op
from ...registry import Target, Unrecognised
from ...sites import Site
from . import LIBRARY
from .experts_registry import ENTRY_PARALLEL, GROUPED, LINEAR, PRODUCT, entry, path

_OP = "permute"


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The entry of the registry, in the module that defines it."""
    grouped = entry(module, GROUPED)
    if grouped is None:
        return
    place = path(GROUPED)
    try:
        recognise_linear(module, getattr(module, LINEAR, None))
        recognise_experts(module, grouped)
    except Exception as error:  # foreign code was run
        reason = reason_of(error)
        yield Unrecognised(_OP, LIBRARY, module.__name__, place, reason)
        return
    meaning = "tokens sorted by expert; the experts' results, weighted and summed by token"
    yield Target(_OP, LIBRARY, module.__name__, place, adapter(module), meaning)


def adapter(module: ModuleType) -> Callable[[Any, Site], Callable[..., Tensor]]:
    """A factory for the entry's function."""

    def fused_product() -> bool:
        """Whether the product of groups is one of this package, which takes offsets in int64."""
        product = getattr(module, PRODUCT)
        return functions.beneath(product) is not product

    fused_product._dynamo_marked_constant = True  # type: ignore[attr-defined]  # asked once, while tracing

    def factory(original: Any, site: Site) -> Callable[..., Tensor]:
        def grouped_mm(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            reason = _unsupported(self, hidden_states, top_k_index, top_k_weights)
            if reason is not None:
                site.fallback(reason)
                result: Tensor = original(self, hidden_states, top_k_index, top_k_weights)
                return result
            site.hit()
            rows, order = op.permute(hidden_states, top_k_index)
            rows = _run(self, module, rows, top_k_index, torch.int64 if fused_product() else torch.int32)
            combined = op.combine(rows, order, top_k_weights, rounded=False)
            return combined.to(hidden_states.dtype)

        return grouped_mm

    return factory


def _unsupported(experts: Any, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> str | None:
    if experts._is_expert_parallel:
        return ENTRY_PARALLEL
    if (reason := op.unsupported(hidden_states, ids)) is not None:
        return reason
    if type(weights) is not Tensor and type(weights) is not torch.nn.Parameter:
        return "the router weights are no plain tensor"
    if weights.shape != ids.shape or weights.dtype not in _WEIGHTS or weights.device != hidden_states.device:
        return "the router weights are not (tokens, top_k) floats"
    return None


_WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)


def _run(experts: Any, module: ModuleType, rows: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The experts on sorted rows, (tokens * top_k, hidden), as the original does it.

    Args:
        ids: (tokens, top_k).
        dtype: of the offsets.
    """
    linear, transposed = getattr(module, LINEAR), experts.is_transposed
    counts = torch.histc(ids, bins=experts.num_experts, min=0, max=experts.num_experts - 1)
    offsets = torch.cumsum(counts, dim=0, dtype=dtype)
    expert_of_row = torch.sort(ids.view(-1))[0] if experts.has_bias else None

    def bias(name: str) -> Tensor | None:
        return None if expert_of_row is None else getattr(experts, name)[expert_of_row]

    if experts.has_gate:
        wide = linear(rows, experts.gate_up_proj, offsets, bias=bias("gate_up_proj_bias"), is_transposed=transposed)
        inner = experts._apply_gate(wide)
    else:
        wide = linear(rows, experts.up_proj, offsets, bias=bias("up_proj_bias"), is_transposed=transposed)
        inner = experts.act_fn(wide)
    result: Tensor = linear(inner, experts.down_proj, offsets, bias=bias("down_proj_bias"), is_transposed=transposed)
    return experts.post_expert_norm(result) if experts.has_post_expert_norm else result
