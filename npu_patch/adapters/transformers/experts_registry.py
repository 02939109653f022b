"""The registry of functions that run the experts of transformers' models, and what its functions call."""

from __future__ import annotations

from types import ModuleType
from typing import Any

REGISTRY = "ALL_EXPERTS_FUNCTIONS"
GROUPED, BATCHED = "grouped_mm", "batched_mm"
PRODUCT, LINEAR, GATE = "_grouped_mm", "_grouped_linear", "_apply_gate"
ENTRY_PARALLEL = "expert parallel: some ids are no expert's"


def path(key: str) -> str:
    """An entry, as a target names it."""
    return f"{REGISTRY}[{key}]"


def entry(module: ModuleType, key: str) -> Any:
    """What is registered, in the module that defines the registry; None elsewhere."""
    registry = getattr(module, REGISTRY, None)
    if registry is None or getattr(type(registry), "__module__", None) != module.__name__:
        return None
    return getattr(type(registry), "_global_mapping", registry).get(key)
