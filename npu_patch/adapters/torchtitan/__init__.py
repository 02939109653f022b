"""torchtitan: which of its modules hold targets."""

from __future__ import annotations


def modules() -> tuple[str, ...]:
    """Full names of the torchtitan modules to look at."""
    common = "torchtitan.models.common"
    return (
        f"{common}.nn_modules",
        f"{common}.rope",
        f"{common}.attention",
        f"{common}.vision_encoder",
        "torchtitan.distributed.activation_checkpoint",
    )
