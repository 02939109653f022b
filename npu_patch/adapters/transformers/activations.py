"""Which activation a module computes: the library's activation classes, each run once."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch.nn.functional as F
from torch import nn

from ...discovery.bracket import quiet
from ...discovery.mlp import recognise_activation

_MODULE = "transformers.activations"
_LIKELY = ("silu", "swish", "gelu")

# type → (its forward, names of its own attributes, [(their values, what it then computes)]).  Filled before any forward
# runs, so that torch.compile finds it complete.
_known: dict[type, tuple[Any, tuple[str, ...], list[tuple[tuple[Any, ...], str]]]] = {}
_base = frozenset(vars(nn.Module()))


def learn() -> None:
    """Run the activations of torch and of the library; a second call does nothing unless a class is new."""
    if not _known:
        with quiet():
            for module in (nn.SiLU(), nn.GELU(), nn.GELU("tanh")):
                _learn(module)
    table = getattr(sys.modules.get(_MODULE), "ACT2FN", None)
    if table is None or _MODULE in _seen:
        return
    _seen.add(_MODULE)
    for name in table:
        if any(part in name for part in _LIKELY):
            try:
                with quiet():
                    _learn(table[name])
            except Exception:  # foreign code; what cannot be built is not known
                continue


_seen: set[str] = set()


def _learn(module: Any) -> None:
    if (
        not isinstance(module, nn.Module)
        or any(True for _ in module.parameters())
        or any(True for _ in module.buffers())
    ):
        return
    if next(iter(module.children()), None) is not None:
        return
    names = tuple(name for name in vars(module) if name not in _base)
    kind = recognise_activation(module)
    _, own_names, kinds = _known.setdefault(type(module), (type(module).forward, names, []))
    if kind is not None and own_names == names:
        kinds.append((_values(module, names), kind))


def _values(module: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    if len(names) == 1:  # a generator would cost as much as all the rest
        return (_plain(getattr(module, names[0])),)
    return tuple(_plain(getattr(module, name)) for name in names)


def _plain(value: Any) -> Any:
    if isinstance(value, functools.partial):
        return (value.func, value.args, tuple(sorted(value.keywords.items())))
    return value


def activation(module: Any) -> tuple[str | None, str]:
    """(reason, "") or (None, "silu" | "gelu" | "gelu_tanh") for an activation module or function."""
    if module is F.silu:
        return None, "silu"
    if module is F.gelu:
        return None, "gelu"
    entry = _known.get(type(module))
    if entry is None:
        return f"the activation {_name(module)} is not known", ""
    forward, names, kinds = entry
    if "forward" in module.__dict__ or type(module).forward is not forward:
        return "the forward of the activation was replaced", ""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "the activation has hooks", ""
    own = _values(module, names) if names else ()
    for values, kind in kinds:
        if values == own:
            return None, kind
    return f"the activation {_name(module)} is not known", ""


def _name(module: Any) -> str:
    return type(module).__name__ if isinstance(module, nn.Module) else getattr(module, "__name__", repr(module))
