"""Patched single calls: a module of the test's own goes through the finders as a modeling file would."""

from __future__ import annotations

import types
from typing import Any

from npu_patch import functions
from npu_patch.registry import Target, Unrecognised
from npu_patch.sites import Site


def modeling_file(**names: Any) -> types.ModuleType:
    """A module that defines these classes and functions."""
    module = types.ModuleType("transformers.models.mine.modeling_mine")
    for name, value in names.items():
        value.__module__ = module.__name__
        setattr(module, name, value)
    return module


def found(finder: Any, **names: Any) -> dict[str, Target | Unrecognised]:
    return {target.path: target for target in finder(modeling_file(**names))}


def patched(finder: Any, name: str, value: Any) -> tuple[Any, Site, Any]:
    """(what the engine would install, its counters, the original) for the one target of a module."""
    (target,) = found(finder, **{name: value}).values()
    assert isinstance(target, Target), target
    original = value.forward if isinstance(value, type) else value
    site = Site(target.name, target.op, {})
    return functions.clone(target.adapter(original, site), original), site, original
