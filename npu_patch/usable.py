"""Whether an NPU can be used: asked once, when the first target would be installed, and remembered."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from . import registry

if TYPE_CHECKING:
    from .ops.availability import Unavailable

log = logging.getLogger("npu_patch")


class Npu:
    """The answer, once it is known.

    Args:
        ask: says why no NPU can be used, or None; another function than the package's own in tests.
    """

    def __init__(self, ask: Callable[[], Unavailable | None] | None = None) -> None:
        self._ask = ask or (lambda: registry.load("npu_patch.ops.availability:why_unavailable")())
        self._why_not: Unavailable | None = None
        self._usable = False

    @property
    def reason(self) -> str | None:
        """Why none can be used; None if one can, or nobody has asked."""
        return self._why_not.reason if self._why_not is not None else None

    @property
    def known(self) -> bool:
        """Whether one is known to be usable."""
        return self._usable

    @property
    def hopeless(self) -> bool:
        """Whether the answer is no and will stay no; it was warned about once."""
        return self._why_not is not None and self._why_not.final

    @property
    def waiting(self) -> bool:
        """Whether the answer is no until torch_npu has been imported whole."""
        return self._why_not is not None and not self._why_not.final

    def usable(self) -> bool:
        """Ask, unless the answer is final; one warning where it is a final no."""
        if not self._usable and not self.hopeless:
            self._why_not = self._ask()
            self._usable = self._why_not is None
            if self.hopeless:
                log.warning("npu_patch: nothing is patched: %s (see npu-patch doctor)", self.reason)
        return self._usable

    def forget(self) -> None:
        self._why_not = None
