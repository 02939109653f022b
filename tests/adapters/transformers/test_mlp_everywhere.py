"""Every gated MLP of every modeling file: what is recognised computes what the original computes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tests.conftest  # noqa: F401  # brings the device up, before torch is imported

# isort: split
import torch
from torch import nn

from npu_patch import functions
from npu_patch.adapters.transformers import mlp, modules
from npu_patch.discovery.mlp import GatedMeaning, recognise_gated_mlp
from npu_patch.registry import Target
from npu_patch.sites import Site
from tests.support.numerics import relative_error

HIDDEN, INNER = 6, 10


def instance(cls: type[nn.Module], meaning: GatedMeaning, act: nn.Module, dtype: torch.dtype) -> nn.Module:
    """An instance with real sub-modules where the class has them, whatever its constructor takes."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    torch.manual_seed(0)
    for name in meaning.projections:
        setattr(module, name, nn.Linear(HIDDEN, INNER * (2 if meaning.packed else 1)))
    for name in meaning.between:
        setattr(module, name, nn.LayerNorm(INNER))
    setattr(module, meaning.down, nn.Linear(INNER, HIDDEN))
    if meaning.activation is not None:
        setattr(module, meaning.activation, act)
    return module.to("npu", dtype)


def results(forward, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    y = forward(module, x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]


@pytest.mark.slow
def test_every_recognised_class_computes_the_same_patched():
    """In a process of its own, since it imports every modeling file."""
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(
        [sys.executable, "-m", __name__], env=environment, cwd=root, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]


def check() -> None:
    packed = separate = hits = 0
    for name in modules():
        try:
            file = importlib.import_module(name)
        except ImportError:  # needs a package that is not installed
            continue
        for target in mlp.find(file):
            if not isinstance(target, Target) or not target.path.endswith(".forward"):  # a gate of experts
                continue
            cls = getattr(file, target.path.removesuffix(".forward"))
            meaning = recognise_gated_mlp(cls)
            packed, separate = packed + meaning.packed, separate + (not meaning.packed)
            for act in (nn.SiLU(), nn.GELU("tanh"), nn.ReLU()):
                site = Site(target.name, target.op, {"separate": True})
                forward = functions.clone(target.adapter(cls.forward, site), cls.forward)
                for dtype, room in ((torch.float32, 2e-6), (torch.bfloat16, 3e-2)):
                    module = instance(cls, meaning, act, dtype)
                    x = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(1)).to("npu", dtype)
                    x.requires_grad_()
                    for ours, theirs in zip(results(forward, module, x), results(cls.forward, module, x), strict=True):
                        assert ours.dtype is theirs.dtype, target.name
                        assert relative_error(ours, theirs) <= room, target.name
                hits += site.hits
    assert packed >= 10
    assert separate >= 60
    assert hits >= 2 * 2 * (packed + separate) - 20  # silu and gelu in two types, but for gates in the second half


if __name__ == "__main__":
    check()
