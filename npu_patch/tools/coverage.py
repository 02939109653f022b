"""`npu-patch coverage`: what of a model library is recognised, as what, and what is not and why.

It imports every module with targets and asks the finders, which recognise by running foreign code on small CPU
tensors; no NPU is needed and nothing is patched.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

from .. import registry
from ..registry import Library, Target
from ..tables import text_table

RECOGNISED, UNRECOGNISED, NOT_IMPORTED = "recognised", "unrecognised", "not imported"


class UsageError(ValueError):
    """The arguments name something that is not there."""


@dataclass(frozen=True)
class Row:
    """One candidate, or one module that cannot be imported.

    Args:
        op: name of the op; "-" for a module.
        library: root package.
        target: "module:path", or the module.
        state: "recognised", "unrecognised" or "not imported".
        meaning: what it was recognised as.
        reason: why it was not.
    """

    op: str
    library: str
    target: str
    state: str
    meaning: str = ""
    reason: str = ""


def main(library: str | None, model: str | None, as_json: bool) -> int:
    """Print the coverage; returns the exit status.

    Raises:
        UsageError: an unknown library or model, or a library that is not installed.
    """
    chosen = _libraries(library)
    modules = {one.name: _modules(one) for one in chosen}
    if model is not None:
        modules = _of_model(modules, model)
    rows: list[Row] = []
    with _undisturbed():
        for one in chosen:
            rows += examine(one, modules.get(one.name, ()))
    print(json.dumps([asdict(row) for row in rows], indent=1) if as_json else render(rows, names=model is not None))
    return 0


def examine(library: Library, modules: Iterable[str]) -> list[Row]:
    """One row per candidate in the given modules of a library, which get imported."""
    rows: dict[tuple[str, str], Row] = {}
    for name in modules:
        try:
            module = importlib.import_module(name)
        except (Exception, SystemExit) as error:  # whatever is wrong with it, the others can be looked at
            row = Row("-", library.name, name, NOT_IMPORTED, reason=f"{type(error).__name__}: {_line(error)}")
            rows["-", name] = row
            continue
        for op, finder in library.finders.items():
            try:
                found = list(registry.load(finder)(module))
            except Exception as error:
                reason = f"could not be examined: {type(error).__name__}: {_line(error)}"
                rows[op, name] = Row(op, library.name, name, UNRECOGNISED, reason=reason)
                continue
            for one in found:
                if isinstance(one, Target):
                    row = Row(op, library.name, one.name, RECOGNISED, meaning=one.meaning)
                else:
                    row = Row(op, library.name, one.name, UNRECOGNISED, reason=one.reason)
                rows.setdefault((op, one.name), row)
    order = {op.name: position for position, op in enumerate(registry.OPS)}
    return sorted(rows.values(), key=lambda row: order.get(row.op, len(order)))


def render(rows: Iterable[Row], names: bool) -> str:
    """As text: counts by meaning (or the names, for one model), then everything that is not recognised."""
    rows = list(rows)
    good = [row for row in rows if row.state == RECOGNISED]
    rest = [row for row in rows if row.state != RECOGNISED]
    parts = []
    if names:
        cells = [(row.op, row.target, row.meaning or "-") for row in good]
        parts.append(text_table(("op", "target", "recognised as"), cells, width=160))
    else:
        counts = Counter((row.library, row.op, row.meaning) for row in good)
        ranks = {key: rank for rank, key in enumerate(dict.fromkeys((row.library, row.op) for row in good))}
        ordered = sorted(counts.items(), key=lambda item: (ranks[item[0][:2]], -item[1], item[0][2]))
        table = [(library, op, meaning or "-", str(count)) for (library, op, meaning), count in ordered]
        parts.append(text_table(("library", "op", "recognised as", "targets"), table, width=160))
    if rest:
        cells = [(row.op, row.target, f"{row.state}: {row.reason}") for row in rest]
        parts.append(text_table(("op", "target", "why not"), cells, width=160))
    for library, op in dict.fromkeys((row.library, row.op) for row in rows if row.op != "-"):
        of_op = [row.state == RECOGNISED for row in rows if (row.library, row.op) == (library, op)]
        parts.append(f"{library} {op}: {sum(of_op)} of {len(of_op)} recognised")
    return "\n".join(parts)


# ---- what to look at -------------------------------------------------------------------------------------------------


def _libraries(name: str | None) -> list[Library]:
    known = {library.name: library for library in registry.LIBRARIES}
    if name is not None and name not in known:
        raise UsageError(f"unknown library {name!r}; known: {', '.join(known)}{_hint(name, known)}")
    chosen = [known[name]] if name is not None else list(known.values())
    here = [library for library in chosen if _installed(library.name)]
    if not here:
        raise UsageError(f"not installed: {', '.join(library.name for library in chosen)}")
    return here


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _modules(library: Library) -> list[str]:
    find: Callable[[], Iterable[str]] = registry.load(library.modules)
    return list(find())


def _of_model(modules: dict[str, list[str]], model: str) -> dict[str, list[str]]:
    """The modules of one model, and those that serve every model.

    Raises:
        UsageError: no library has such a model.
    """
    models = {parts[2] for names in modules.values() for parts in map(_parts, names) if _is_model(parts)}
    if model not in models:
        raise UsageError(f"unknown model {model!r}{_hint(model, models)}")
    return {
        library: [name for name in names if not _is_model(_parts(name)) or _parts(name)[2] == model]
        for library, names in modules.items()
        if any(_is_model(_parts(name)) and _parts(name)[2] == model for name in names)
    }


def _parts(name: str) -> list[str]:
    return name.split(".")


def _is_model(parts: list[str]) -> bool:
    return len(parts) > 3 and parts[1] == "models"


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0][:160]


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Libraries get imported as on a machine without an NPU, whatever they print goes to stderr, warnings nowhere."""
    simulated = bool(os.environ.get("NPU_PATCH_SIMULATE"))
    if "torch" not in sys.modules and not simulated:
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    absent = "torch_npu" not in sys.modules and not simulated
    if absent:  # a wheel without CANN fails to import, and transformers imports it where it finds it
        sys.modules["torch_npu"] = None  # type: ignore[assignment]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # probes are small: threads only wait for each other
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if absent:
            del sys.modules["torch_npu"]
