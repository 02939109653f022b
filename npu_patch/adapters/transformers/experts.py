"""Mixture of experts: the experts' grouped matrix multiplications.

All products of the `grouped_mm` entry of transformers' registry go through one function, `_grouped_mm`.  The entry
`batched_mm`, to which `generate` switches while it decodes, copies the matrices of each token's experts: it becomes the
`grouped_mm` entry, whichever of the two that is patched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ... import functions
from ...discovery import reason_of
from ...discovery.experts import recognise_experts, recognise_product
from ...ops import gmm as op
from ...registry import Target, Unrecognised
from ...sites import Site
from . import EXPERTS, LIBRARY, moe_blocks
from .classes import defined
from .experts_registry import BATCHED, ENTRY_PARALLEL, GROUPED, PRODUCT, REGISTRY, entry, path

_OP = "gmm"


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The product and the entry, in the module of the registry; classes that no entry reaches, in modeling files."""
    grouped, batched = entry(module, GROUPED), entry(module, BATCHED)
    if grouped is None or batched is None:
        yield from moe_blocks.find(module)
        yield from _undispatched(module)
        return

    def product() -> Target:
        recognise_product(module, getattr(module, PRODUCT, None))
        return Target(_OP, LIBRARY, module.__name__, PRODUCT, _product, "a product per group of rows", (LIBRARY,))

    def decoding() -> Target:
        recognise_experts(module, grouped)
        recognise_experts(module, batched)
        meaning = "experts one token after another, as groups"
        return Target(_OP, LIBRARY, module.__name__, path(BATCHED), _batched(module), meaning)

    for name, recognise in ((PRODUCT, product), (path(BATCHED), decoding)):
        try:
            yield recognise()
        except Exception as error:  # foreign code was run
            reason = reason_of(error)
            yield Unrecognised(_OP, LIBRARY, module.__name__, name, reason)


def _product(original: Any, site: Site) -> Callable[..., Tensor]:
    def grouped_mm(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        rows = input if input.dtype is weight.dtype else input.to(weight.dtype)
        reason = op.unsupported(rows, weight, offs)
        if reason is not None:
            site.fallback(reason)
            result: Tensor = original(rows, weight, offs.int())
            return result
        site.hit()
        # What lies past the last offset is masked around this function.  Among several experts such rows stay out of
        # every gradient; a single one is multiplied by all rows that are not left out.
        summed, single = bool(site.options.get("main_grad")), weight.shape[0] == 1
        return op.grouped_matmul(rows, weight, offs, cumulative=True, tail=single, main_grad=summed)

    return grouped_mm


def _batched(module: ModuleType) -> Callable[[Any, Site], Callable[..., Tensor]]:
    registry = getattr(module, REGISTRY)
    recognised = functions.beneath(entry(module, GROUPED))

    def replaced() -> bool:
        """Whether somebody put a function of their own at `grouped_mm`."""
        return functions.beneath(registry[GROUPED]) is not recognised

    replaced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # asked once, while tracing

    def factory(original: Any, site: Site) -> Callable[..., Tensor]:
        def batched_mm(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            reason = "another function is registered at grouped_mm" if replaced() else _ungrouped(self, hidden_states)
            result: Tensor
            if reason is not None:
                site.fallback(reason)
                result = original(self, hidden_states, top_k_index, top_k_weights)
                return result
            site.hit()
            result = registry[GROUPED](self, hidden_states, top_k_index, top_k_weights)
            return result

        return batched_mm

    return factory


def _ungrouped(experts: Any, hidden_states: Tensor) -> str | None:
    """Why these experts cannot be run as groups: what `_grouped_mm` would say, and where batches compute otherwise."""
    if experts._is_expert_parallel:
        return ENTRY_PARALLEL
    if torch.is_autocast_enabled(hidden_states.device.type):
        return "autocast"  # casts the products of batches, not those of groups
    counts = hidden_states.new_empty(experts.num_experts, dtype=torch.int32)
    wide = experts.gate_up_proj if experts.has_gate else experts.up_proj
    for rows, weight in ((hidden_states, wide), (None, experts.down_proj)):
        weight = weight if experts.is_transposed else weight.transpose(-2, -1)
        rows = hidden_states.new_empty(0, weight.shape[-2]) if rows is None else rows
        if (reason := op.unsupported(rows, weight, counts)) is not None:
            return reason
    return None


def _undispatched(module: ModuleType) -> Iterator[Unrecognised]:
    """Classes of routed experts that do not go through the registry: nothing that is patched reaches them."""
    if EXPERTS not in sys.modules:
        return
    for name, cls in defined(module):
        if "Experts" not in name or "Shared" in name:
            continue
        forward = functions.beneath(cls.forward)
        if getattr(forward, "__globals__", {}).get("__name__") != EXPERTS:
            reason = f"runs its experts itself, not through {REGISTRY}"
            yield Unrecognised(_OP, LIBRARY, module.__name__, f"{name}.forward", reason)
