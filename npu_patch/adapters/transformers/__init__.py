"""Hugging Face transformers: norms, rope functions, gated MLPs, the registries of attention and experts, losses."""

from __future__ import annotations

import importlib.util
from pathlib import Path

LIBRARY = "transformers"
REMOTE = "transformers_modules"
"""The package below which transformers puts the modeling files that come with a checkpoint."""
ATTENTION_REGISTRY = "transformers.modeling_utils"
MASKS = "transformers.masking_utils"
ADDITIVE_MASKS = "transformers.modeling_attn_mask_utils"
LOSSES = "transformers.loss.loss_utils"
EXPERTS = "transformers.integrations.moe"
_NOT_TORCH = ("modeling_tf_", "modeling_flax_")


def modules() -> list[str]:
    """Full names of the modules to look at: masks, registries, losses, every model's, found without importing any."""
    spec = importlib.util.find_spec(LIBRARY)
    folders = spec.submodule_search_locations if spec is not None else None
    names = [MASKS, ATTENTION_REGISTRY, LOSSES]
    for folder in folders or ():
        if Path(folder, f"{ADDITIVE_MASKS.rpartition('.')[2]}.py").exists():  # of transformers 4
            names.append(ADDITIVE_MASKS)
        if Path(folder, *EXPERTS.split(".")[1:]).with_suffix(".py").exists():  # of transformers 5
            names.append(EXPERTS)
        files = [
            file for file in Path(folder, "models").glob("*/modeling_*.py") if not file.stem.startswith(_NOT_TORCH)
        ]
        names += sorted(f"{LIBRARY}.models.{file.parent.name}.{file.stem}" for file in files)
    return names


def foreign(value: object) -> bool:
    """Whether something in a modeling file was put there by a third party: it comes from another package."""
    root = str(getattr(value, "__module__", None) or "").partition(".")[0]
    return root not in ("", LIBRARY, REMOTE, "torch", "typing", "builtins", "npu_patch")
