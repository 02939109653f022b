"""Every router of every modeling file: what is recognised routes as the original does, with fewer launches."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

import tests.conftest  # noqa: F401  # brings the device up, before torch is imported

# isort: split
import torch
from torch import nn

import npu_patch.simulator
from npu_patch import functions
from npu_patch.adapters.transformers import modules, routers
from npu_patch.discovery.routers import RouterMeaning, recognise_router
from npu_patch.registry import Target
from npu_patch.sites import Site
from tests.support.numerics import relative_error
from tests.support.routers import call, gradients, instance, tokens


@pytest.mark.slow
@pytest.mark.long
def test_every_recognised_class_routes_as_the_original():
    """In a process of its own, since it imports every modeling file."""
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(
        [sys.executable, "-m", __name__], env=environment, cwd=root, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def check(names: Iterable[str] = ()) -> None:
    """All of them, or those of some modeling files; prints their number."""
    count = 0
    for name in names or modules():
        path = importlib.util.find_spec(name.rpartition(".")[0])
        file = (
            Path(next(iter(path.submodule_search_locations or ())), f"{name.rpartition('.')[2]}.py") if path else None
        )
        if file is None or not file.exists() or "topk" not in file.read_text():
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:  # needs a package that is not installed
            continue
        count += sum(_check(module, target) for target in routers.find(module) if isinstance(target, Target))
    print(count, "router classes")
    assert names or count >= (40 if importlib.metadata.version("transformers").startswith("5") else 6), count


def _check(module: ModuleType, target: Target) -> int:
    cls = getattr(module, target.path.removesuffix(".forward"))
    meaning = recognise_router(cls)
    methods = ("greedy", "group_limited_greedy") if "limited" in meaning.roles else (None,)
    for divides in (True, False) if "divides" in meaning.roles else (True,):
        for method in methods:
            changes = {"divides": divides, **({"limited": method} if method else {})}
            for dtype in (torch.float32, torch.bfloat16) if meaning.half else (torch.float32,):
                _compare(cls, meaning, target, instance(cls, meaning, dtype, **changes), dtype)
    return 1


def _compare(
    cls: type[nn.Module], meaning: RouterMeaning, target: Target, module: nn.Module, dtype: torch.dtype
) -> None:
    site = Site(target.name, target.op, {})
    forward = functions.clone(target.adapter(cls.forward, site), cls.forward)
    x = tokens(meaning, dtype)
    ours, theirs = call(forward, module, x, meaning), call(cls.forward, module, x, meaning)
    if "groups" not in meaning.roles and meaning.choice.score == "sigmoid" and not _divides(meaning, module):
        assert [reason for reason in site.fallbacks if "launches as much" in reason], (target.name, site.fallbacks)
        return
    assert (site.hits, site.fallbacks) == (1, {}), (target.name, site.fallbacks)
    wide = dtype is torch.float32
    assert torch.equal(ours["experts"], theirs["experts"]) or not wide, target.name
    for name, one in ours.items():
        other = theirs[name]
        assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad), target.name
    same = (ours["experts"] == theirs["experts"]).all(-1)
    assert same.float().mean() >= 0.85, target.name  # scores are equal here and there in bfloat16
    assert relative_error(ours["weights"][same], theirs["weights"][same]) <= (2e-6 if wide else 6e-3), target.name
    if bool(same.all()):
        for one, other in zip(gradients(ours, x, module), gradients(theirs, x, module), strict=True):
            assert one.dtype is other.dtype
            assert relative_error(one, other) <= (1e-5 if wide else 2e-2), target.name
    for train in (True, False):
        (launches, moved), (more, most) = (_trace(one, module, x, meaning, train) for one in (forward, cls.forward))
        assert moved < most, (target.name, train, dtype, moved, most)
        assert launches <= more, (target.name, train, dtype, launches, more)


def _divides(meaning: RouterMeaning, module: nn.Module) -> bool:
    return meaning.choice.divides or bool(getattr(module, meaning.roles.get("divides", ""), False))


def _trace(forward: object, module: nn.Module, x: torch.Tensor, meaning: RouterMeaning, train: bool) -> tuple[int, int]:
    """Launches, and bytes read and written."""
    with torch.set_grad_enabled(train), npu_patch.simulator.trace() as trace:
        results = call(forward, module, x, meaning)
        if train:
            gradients(results, x, module)
    return trace.launches, trace.bytes_read + trace.bytes_written


if __name__ == "__main__":
    check()
