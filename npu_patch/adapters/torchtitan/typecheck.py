"""Whether torchtitan's SPMD type checker is watching."""

from __future__ import annotations

import sys

import torch
from torch.compiler import is_compiling

_function_modes = torch._C._len_torch_function_stack

TYPE_CHECKING_REASON = "spmd type checking does not know the fused operators"


def type_checking() -> bool:
    """True while the type checker of `spmd_types` inspects every operator; it refuses what it does not know."""
    return not is_compiling() and watched()


def watched() -> bool:
    """The same where it is known that nothing is compiled."""
    if not _function_modes():  # the checker is one, and this is asked in every call
        return False
    checker = sys.modules.get("spmd_types")
    return checker is not None and checker.is_type_checking()
