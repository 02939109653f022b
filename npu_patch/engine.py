"""The patching engine: a table of what should be on, and one procedure that makes the loaded modules match it.

What is on is declared: a base table plus one layer per open scope, the last word wins.  Every change ends in
`sync`, which looks at loaded modules only and never imports one; modules that are imported later come in through
post-import hooks. Finders (which run foreign code to recognise it) are called outside the lock; a hook never raises,
since that would fail the user's import and, wrapt forgetting its hooks, only once.
"""

from __future__ import annotations

import logging
import sys
import threading
import types
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import wrapt

from . import functions, records, registry
from .functions import Rebinding
from .installing import Installed, MissingTarget, NotAFunction, Rebind, holds
from .late import LateModules
from .layers import Layer, Layers, Scope
from .records import Record
from .registry import Library, OptionValue, Target
from .report import Row, Status
from .usable import Npu

if TYPE_CHECKING:
    from .ops.availability import Unavailable
    from .sites import Site

log = logging.getLogger("npu_patch")


class Patcher:
    """Holds the enable table and keeps loaded modules in step with it.

    Args:
        libraries: the model libraries to watch.
        unavailable: says why no NPU can be used, or None; asked when the first target would be installed.
    """

    def __init__(
        self,
        libraries: Iterable[Library] = registry.LIBRARIES,
        unavailable: Callable[[], Unavailable | None] | None = None,
    ) -> None:
        self._libraries = tuple(libraries)
        self._npu = Npu(unavailable)
        self._lock = threading.RLock()
        self._table = Layers()
        self._records: dict[tuple[str, str], Record] = {}
        self._sites: dict[tuple[str, str], Site] = {}
        self._examined: set[tuple[str, str]] = set()
        self._hooked: set[str] = set()
        self._modules: dict[str, Library] = {}
        self._late = {one.name: LateModules(one, self.sync) for one in self._libraries if one.loader}
        self.strict = False
        self.named: frozenset[str] = frozenset()

    # ---- the table -------------------------------------------------------------------------------------------------

    def enabled(self, op: str) -> bool:
        return self._table.enabled(op)

    def set(self, table: Mapping[str, bool]) -> None:
        """Change the base table, then make the modules match."""
        with self._lock:
            self._table.update(table)
        self.sync()

    def clear(self) -> None:
        """Switch everything off, in the base table and in every open scope."""
        with self._lock:
            self._table.clear()
        self.sync()

    def scope(self, table: Mapping[str, bool], exact: bool) -> Scope:
        """One more layer while the block runs.  Scopes are process-wide and may close in any order."""
        return Scope(table, exact, self._open, self._close)

    def _open(self, layer: Layer) -> None:
        with self._lock:
            self._table.push(layer)
        try:
            self.sync()
        except BaseException:  # an interrupt: the block will not run
            self._close(layer)
            raise

    def _close(self, layer: Layer) -> None:
        with self._lock:
            self._table.drop(layer)
        self.sync()

    def configure(self, op: str, options: Mapping[str, OptionValue]) -> None:
        with self._lock:
            changed = self._table.configure(op, options)
        if changed:
            self.sync()
            _forget_compiled()

    def strategy(self) -> dict[str, dict[str, OptionValue]]:
        with self._lock:
            return self._table.strategy()

    # ---- making modules match --------------------------------------------------------------------------------------

    def prepare(self, root: str) -> None:
        """Wait for the modules of one library; called when its root package is about to be imported."""
        for library in self._libraries:
            if library.name == root:
                self._names(library)

    def sync(self) -> None:
        """Make loaded modules match the table."""
        loaded = [library for library in self._libraries if library.name in sys.modules]
        names = [name for library in loaded for name in self._names(library)]
        self._drop_stale()
        self._examine(names)
        with self._lock:
            changed = self._settle_all(list(self._records.values()))
            self._watch()
        if changed:
            _forget_compiled()

    def _drop_stale(self) -> None:
        """Forget places that others have changed since, so that what is there now is recognised anew."""
        with self._lock:
            for key, record in list(self._records.items()):
                if record.stale(sys.modules.get(record.found.module), self._wanted(record)):
                    if record.on:
                        self._remove(record)
                    del self._records[key]
                    self._examined.discard((record.found.module, record.found.op))

    def _watch(self) -> None:
        """Look out for modules that come past the import system, while something is on; under the lock."""
        for library in self._libraries:
            if library.loader:
                on = self._npu.known and any(self.enabled(op) for op in library.finders)
                self._late[library.name].watch(on)

    def _forget(self, name: str) -> None:
        """A module was executed anew: its classes are others now, and the earlier ones get their originals back."""
        with self._lock:
            for key, record in list(self._records.items()):
                if record.found.module == name:
                    if record.on:
                        self._remove(record)
                    del self._records[key]
                    self._sites.pop(key, None)  # other code: it counts from zero
            self._examined = {pair for pair in self._examined if pair[0] != name}

    def _names(self, library: Library) -> list[str]:
        """The library's modules of interest; hooks those that are not loaded yet."""
        known = [name for name, owner in self._modules.items() if owner is library]
        if not known:
            try:
                known = list(registry.load(library.modules)())
            except Exception:  # a stand-in for the library, as test suites make them
                log.debug("npu_patch: no modules of %s to look at", library.name, exc_info=True)
            self._modules.update(dict.fromkeys(known, library))
            for name in known:
                if name not in sys.modules:
                    self._hook(name, self._on_module)
        if library.loader:
            late, again = self._late[library.name].look()
            for name in again:
                self._forget(name)
            self._modules.update(dict.fromkeys(late, library))
            known = [*dict.fromkeys((*known, *late))]
        return known

    def _hook(self, name: str, hook: Callable[[types.ModuleType], object]) -> None:
        with self._lock:
            if name in self._hooked:
                return
            self._hooked.add(name)

        def guarded(module: types.ModuleType) -> None:
            try:
                hook(module)
            except Exception:  # a hook that raises fails the user's import
                log.exception("npu_patch: %s is left unpatched", name)

        wrapt.register_post_import_hook(guarded, name)

    def _on_module(self, module: types.ModuleType) -> None:
        if not any(self.enabled(op) for op in self._modules[module.__name__].finders):
            return
        self._examine([module.__name__], importing=module.__name__)
        with self._lock:
            records = list(self._records.values())
            changed = self._settle_all([one for one in records if one.found.module == module.__name__])
            self._watch()
        if changed:
            _forget_compiled()

    def _on_torch_npu(self) -> None:
        registry.load("npu_patch.ops.availability:executed")("torch_npu")
        if self._npu.waiting:
            self._npu.forget()
            self.sync()

    def _examine(self, names: Iterable[str], importing: str | None = None) -> None:
        """Run the finders of the enabled ops over loaded modules that they have not seen; never under the lock."""
        for name in names:
            module = sys.modules.get(name)
            if module is None or (name != importing and _initialising(module)):
                continue
            for op, finder in self._modules[name].finders.items():
                if (name, op) in self._examined or not self.enabled(op):
                    continue
                if _tracing() or not self._usable():
                    return
                try:
                    found = list(registry.load(finder)(module))
                except KeyboardInterrupt:
                    raise
                except BaseException:  # foreign code was run
                    log.exception("npu_patch: %s could not be examined for %r", name, op)
                    found = []
                with self._lock:
                    self._examined.add((name, op))
                    for target in found:
                        record = Record(target, holds(target, module), site=self._sites.get(target.key))
                        if not any(record.follows(other) for other in self._records.values()):
                            self._records.setdefault(target.key, record)

    def _usable(self) -> bool:
        """Whether an NPU can be used; if torch_npu is only half imported, this is asked again when it is whole."""
        usable = self._npu.usable()
        if self._npu.waiting:
            self._hook("torch_npu", lambda module: self._on_torch_npu())
        return usable

    def _settle_all(self, places: Iterable[Record]) -> bool:
        """Bring places into their wanted states; under the lock.  Returns whether anything changed."""
        rebinding = Rebinding()
        try:
            changed = [self._settle(record, rebinding.add) for record in places]
        finally:
            rebinding.run()
        return any(changed)

    def _settle(self, record: Record, rebind: Rebind) -> bool:
        """Bring one place into its wanted state; under the lock.  Returns whether anything changed."""
        want = self._wanted(record)
        left_behind = record.installed is not None and record.installed.left_behind()
        if (want == record.on and not left_behind) or record.problem:
            return False
        try:
            changed = self._install(record, rebind) if want else self._remove(record, rebind)
            log.info("npu_patch: %s %s", "patched" if want else "restored", record.found.name)
            return changed
        except MissingTarget as error:
            record.problem, record.missing = str(error), True
        except Exception as error:
            record.problem = str(error) if isinstance(error, NotAFunction) else f"{type(error).__name__}: {error}"
            if not isinstance(error, NotAFunction):
                log.warning("npu_patch: %s: %s", record.found.name, record.problem)
        return False

    def _wanted(self, record: Record) -> bool:
        op = record.found.op
        return record.wanted(self.enabled(op), self._table.options(op), self.strict)

    def _install(self, record: Record, rebind: Rebind) -> bool:
        from .sites import Site

        if record.installed is None:
            target = record.found if isinstance(record.found, Target) else records.tripwire(record.found)
            if record.site is None:
                record.site = Site(target.name, target.op, self._table.options(target.op), self.strict)
                self._sites[target.key] = record.site
            site = record.site
            module = sys.modules[target.module]
            record.installed = Installed(target, module, lambda original: target.adapter(original, site))
        record.installed.put(rebind)
        return True

    def _remove(self, record: Record, rebind: Rebind = functions.rebind) -> bool:
        assert record.installed is not None
        record.installed.remove(rebind)
        return True

    # ---- reading back ----------------------------------------------------------------------------------------------

    def reached(self, op: str) -> bool:
        """Whether any target of the op was called or compiled."""
        sites = (record.site for record in self._records.values() if record.found.op == op)
        return any(site.hits or site.compiled or site.fallbacks for site in sites if site is not None)

    def touched(self) -> bool:
        """Whether this process has imported anything that could be patched."""
        return any(name in sys.modules for name in self._modules)

    def hopeless(self) -> bool:
        """Whether this process was found to have no usable NPU, and was told so."""
        return self._npu.hopeless

    def after_fork(self) -> None:
        """In a forked child: the child counts its own calls, and threads that are gone hold no lock."""
        self._lock = threading.RLock()
        for record in self._records.values():
            if record.site is not None:
                record.site.hits = 0
                record.site.fallbacks.clear()

    def status(self, model: Any = None) -> Status:
        with self._lock:
            rows = [record.row(self.enabled(record.found.op)) for record in self._records.values()]
            seen = {(row.op, row.library) for row in rows}
            for library in self._libraries:
                rows += [
                    Row(op, library.name, library.name, "waiting", reason=self._why_waiting(library))
                    for op in library.finders
                    if self.enabled(op) and (op, library.name) not in seen
                ]
            if model is not None:
                rows += records.hidden_in(model, self._records.values())
        order = {op.name: position for position, op in enumerate(registry.OPS)}
        rows.sort(key=lambda row: (order.get(row.op, len(order)), row.library, row.target))
        notes = [f"nothing is patched: {self._npu.reason}"] if self._npu.reason else []
        return Status(rows, notes)

    def _why_waiting(self, library: Library) -> str:
        if self._npu.reason:
            return self._npu.reason
        return "no module with targets was imported" if library.name in sys.modules else "not imported"


def _initialising(module: types.ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _tracing() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "compiler") and torch.compiler.is_compiling()


def _forget_compiled() -> None:
    """torch.compile does not guard the forward of a nested class: code compiled before a change would stay stale."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()
