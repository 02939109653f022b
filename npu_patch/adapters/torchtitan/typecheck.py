"""Whether torchtitan's SPMD type checker is watching."""

from __future__ import annotations

import sys

from torch.compiler import is_compiling

TYPE_CHECKING_REASON = "spmd type checking does not know the fused operators"


def type_checking() -> bool:
    """True while the type checker of `spmd_types` inspects every operator; it refuses what it does not know."""
    if is_compiling():
        return False
    checker = sys.modules.get("spmd_types")
    return checker is not None and checker.is_type_checking()
