"""Patched single calls: a module of the test's own goes through the finders as a modeling file would."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import types
from typing import Any

import torch

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


def takes_positions(build: Any) -> bool:
    """Whether a mask builder gets the queries' indices as a tensor on the device, as transformers 4 has it."""
    return "cache_position" in inspect.signature(build).parameters


def create_mask(
    build: Any, config: Any, embeddings: Any, padding: Any = None, cache: Any = None, positions: Any = None, **more: Any
) -> Any:
    """What one of transformers' mask builders makes, whichever parameters the installed version has."""
    arguments = [config, embeddings, padding]
    if takes_positions(build):
        start = 0 if cache is None else int(cache.get_query_offset(0))
        arguments.append(torch.arange(start, start + embeddings.shape[1], device=embeddings.device))
    return build(*arguments, cache, positions, **more)


def without_sdpa(family: str) -> types.ModuleType | None:
    """The modeling file of a family, if the installed transformers has it and runs it without sdpa."""
    name = f"transformers.models.{family}"
    if importlib.util.find_spec(name) is None:
        return None
    module = importlib.import_module(f"{name}.modeling_{family}")
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    found = any(isinstance(value, type) and vars(value).get("_supports_sdpa") is False for value in own)
    return module if found else None
