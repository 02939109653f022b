"""torchtitan's experts: the products of sorted tokens with one matrix per expert.

0.3.0 makes all of them through one method, `GroupedExperts._grouped_mm`; 0.2.2 has functions that run all experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor

from ...discovery import reason_of
from ...ops import gmm as op
from ...registry import Target, Unrecognised
from ...sites import Site
from . import LIBRARY
from .experts_counts import counts_of
from .experts_functions import adapter as function_adapter
from .experts_meaning import recognise_experts, recognise_product
from .typecheck import TYPE_CHECKING_REASON, type_checking

_OP = "gmm"
_METHOD, _FUNCTIONS = "_grouped_mm", "_run_experts"


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The methods and functions that multiply by the experts' matrices, where a module defines them."""
    name = module.__name__
    for key, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != name:
            continue
        if isinstance(value, type) and isinstance(vars(value).get(_METHOD), FunctionType):
            yield _found(name, f"{key}.{_METHOD}", vars(value)[_METHOD])
        elif isinstance(value, FunctionType) and key.startswith(_FUNCTIONS):
            yield _found(name, key, value)


def _found(module: str, path: str, function: FunctionType) -> Target | Unrecognised:
    try:
        if path.endswith(f".{_METHOD}"):
            recognise_product(function)
            return Target(_OP, LIBRARY, module, path, _adapter, "a product per group of rows")
        meaning = recognise_experts(function)
        return Target(_OP, LIBRARY, module, path, function_adapter(meaning), str(meaning), rebind=(LIBRARY,))
    except Exception as error:  # foreign code was run
        reason = reason_of(error)
        return Unrecognised(_OP, LIBRARY, module, path, reason)


def _adapter(original: Any, site: Site) -> Any:
    def _grouped_mm(self: Any, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        reason = TYPE_CHECKING_REASON if type_checking() else op.unsupported(A, B_t, offs)
        if reason is not None:
            site.fallback(reason)
            result: Tensor = original(self, A=A, B_t=B_t, offs=offs)
            return result
        site.hit()
        # Rows past the last offset are undefined in the original, too: torch._grouped_mm does not write them.  Among
        # several experts they stay out of every gradient; a single one is multiplied by all rows that are not left out.
        counts, tail = counts_of(offs), B_t.shape[0] == 1
        groups = offs if counts is None else counts
        return op.grouped_matmul(A, B_t, groups, cumulative=counts is None, tail=tail)

    return _grouped_mm
