"""Library-neutral fused operators, one file each: `unsupported(...) -> reason | None` and the call.

Nothing here knows a model library, and nothing imports torch_npu: operators are reached through `torch.ops.npu`.

The package has the name of a function of the public surface, `npu_patch.ops()`.  Python binds a sub-package to that
name as soon as it is imported, so the sub-package is callable too and stands for the function.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..tables import OpsTable


class _Ops(types.ModuleType):
    def __call__(self) -> OpsTable:
        """The enable table; see `npu_patch.ops`."""
        import npu_patch

        return npu_patch.ops_table()


sys.modules[__name__].__class__ = _Ops
