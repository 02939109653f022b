"""Hugging Face transformers: norm classes, rope functions, gated MLPs, the attention registry and the loss."""

from __future__ import annotations

import importlib.util
from pathlib import Path

LIBRARY = "transformers"
ATTENTION_REGISTRY = "transformers.modeling_utils"
LOSSES = "transformers.loss.loss_utils"


def modules() -> list[str]:
    """Full names of the modules to look at: registry, losses and every model's, found without importing any."""
    spec = importlib.util.find_spec(LIBRARY)
    folders = spec.submodule_search_locations if spec is not None else None
    names = [ATTENTION_REGISTRY, LOSSES]
    for folder in folders or ():
        files = Path(folder, "models").glob("*/modeling_*.py")
        names += sorted(f"{LIBRARY}.models.{file.parent.name}.{file.stem}" for file in files)
    return names
