"""What the engine knows of one place in a foreign module, and how that reads in a status row."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .installing import Installed, Slot, holds
from .registry import OptionValue, Target, Unrecognised
from .report import Row

if TYPE_CHECKING:
    from .sites import Site


@dataclass
class Record:
    """One place.

    Args:
        found: what a finder said of it.
        installed: the replacement, while there is one.
        site: its counters, from the first installation on.
        recognised: the function that the finder saw there.
        problem: why it cannot be installed.
        missing: the problem is that the library does not have it.
    """

    found: Target | Unrecognised
    recognised: Any = None
    installed: Installed | None = None
    site: Site | None = None
    problem: str = ""
    missing: bool = False

    @property
    def on(self) -> bool:
        return self.installed is not None and self.installed.on

    def stale(self, module: types.ModuleType | None, wanted: bool) -> bool:
        """Whether the place holds something that was not recognised, or belongs to a module that was executed anew."""
        if module is None:
            return False
        if self.installed is not None and (self.on or wanted):
            return not self.installed.fits() if not self.on else self.installed.gone()
        return wanted and holds(self.found, module) is not self.recognised

    def _changed(self) -> Any:
        """A part of what was recognised that somebody has replaced since."""
        return next((part for part in getattr(self.found, "parts", ()) if part.changed()), None)

    def follows(self, other: Record) -> bool:
        """Whether this is another name for the function of the other place, which is rebound together with it.

        Replaced a second time, the one name would wrap the replacement of the other, and neither could be taken out.
        """
        mine, theirs = self.found, other.found
        return (
            isinstance(mine, Target)
            and isinstance(theirs, Target)
            and mine.key != theirs.key
            and self.recognised is not None
            and self.recognised is other.recognised
            and any(f"{mine.module}.".startswith(f"{head}.") for head in theirs.rebind)
        )

    def wanted(self, enabled: bool, options: Mapping[str, OptionValue], strict: bool) -> bool:
        """Whether it should be installed, its op being on or not."""
        if isinstance(self.found, Unrecognised):
            return enabled and strict
        if not enabled or (self.found.only_if and not options[self.found.only_if]):
            return False
        return self._changed() is None

    def row(self, enabled: bool) -> Row:
        """The place as users see it; `enabled`: whether its op is on."""
        state, reason = self._state(enabled)
        return Row(
            op=self.found.op,
            library=self.found.library,
            target=self.found.name,
            state=state,
            meaning=getattr(self.found, "meaning", ""),
            hits=self.site.hits if self.site is not None else 0,
            fallbacks=dict(self.site.fallbacks) if self.site is not None else {},
            reason=reason,
            supporting=getattr(self.found, "supporting", False),
        )

    def _state(self, enabled: bool) -> tuple[str, str]:
        if isinstance(self.found, Unrecognised):
            return "unrecognised", self.found.reason
        if self.problem:
            return ("missing" if self.missing else "unrecognised"), self.problem
        if enabled and (part := self._changed()) is not None:
            return "overridden", f"{part.name}, which it calls, was replaced by {_describe(part.current())}"
        if self.installed is None or not self.installed.on:
            if enabled and self.found.only_if:
                return "off", f"needs the option {self.found.only_if}: {self.found.op}:{self.found.only_if}=1"
            return ("waiting" if enabled else "off"), ""
        if not self.installed.in_place():
            moved = self.installed.place.moved()
            if moved is not None:
                return "overridden", f"its class is replaced by {_describe(moved)}"
            other = _describe(self.installed.place.current())
            return "overridden", f"{other} sits on top" if self.installed.reached() else f"replaced by {other}"
        beneath = self.installed.beneath()
        reason = "" if beneath is None else f"on top of {_describe(beneath)}"
        return ("compiled" if self.site is not None and self.site.compiled else "active"), reason


def hidden_in(model: Any, records: Iterable[Record]) -> list[Row]:
    """Rows for modules of a model whose own `forward` attribute hides a patched class."""
    patched = [
        (record.installed.place.parent, record.found)
        for record in records
        if record.installed is not None and isinstance(record.installed.place, Slot)
    ]
    rows = []
    for name, module in model.named_modules():
        if "forward" not in vars(module):
            continue
        reason = f"{name or 'the model'} has a forward of its own: {_describe(vars(module)['forward'])}"
        rows += [
            Row(found.op, found.library, found.name, "overridden", reason=reason)
            for owner, found in patched
            if isinstance(owner, type) and isinstance(module, owner)
        ]
    return rows


def tripwire(found: Unrecognised) -> Target:
    """A target that raises in strict mode when something unrecognised is called."""

    def adapter(original: Any, site: Site) -> Any:
        def unrecognised(*args: Any, **kwargs: Any) -> Any:
            site.fallback(f"unrecognised: {found.reason}")
            return original(*args, **kwargs)

        return unrecognised

    return Target(found.op, found.library, found.module, found.path, adapter)


def _describe(thing: Any) -> str:
    thing = getattr(thing, "__func__", thing)
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    return f"{module}.{name}" if module and name else type(thing).__name__
