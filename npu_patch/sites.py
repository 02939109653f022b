"""The counters that a patched function carries.

A `Site` belongs to one installed target.  Its methods are called on every patched call, also while torch.compile
traces: tracing must not change Python state, so nothing is counted then, and the site only notes that it was
compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch.compiler import is_compiling

from .registry import OptionValue


class StrictError(RuntimeError):
    """With NPU_PATCH_STRICT=1: a call could not use the fused operator, or reached an unrecognised target."""


class Site:
    """Hits and fallbacks of one installed target, and the options of its op.

    Args:
        target: "module:path", for messages.
        op: name of the op.
        options: the op's current options; a live view.
        strict: raise StrictError instead of falling back.
    """

    __slots__ = ("compiled", "fallbacks", "hits", "mark_compiled", "op", "options", "strict", "target")

    def __init__(self, target: str, op: str, options: Mapping[str, OptionValue], strict: bool = False) -> None:
        self.target = target
        self.op = op
        self.options = options
        self.strict = strict
        self.hits = 0
        self.fallbacks: dict[str, int] = {}
        self.compiled = False
        self.mark_compiled = _marker(self)

    def hit(self) -> None:
        """The fused operator is about to run."""
        if is_compiling():
            self.mark_compiled()
        else:
            self.hits += 1

    def fallback(self, reason: str) -> None:
        """The original is about to run, for this reason.

        Raises:
            StrictError: strict is on (never while tracing).
        """
        if is_compiling():
            self.mark_compiled()
            return
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
        if self.strict:
            raise StrictError(
                f"{self.target} ({self.op}): {reason}. Unset NPU_PATCH_STRICT to run the original instead"
            )


def _marker(site: Site) -> Callable[[], None]:
    def mark() -> None:
        site.compiled = True

    # What torch.compiler.assume_constant_result does, without importing torch._dynamo (seconds) into eager programs:
    # torch.compile runs a function marked so once, while tracing, and puts its result into the graph as a constant.
    mark._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return mark
