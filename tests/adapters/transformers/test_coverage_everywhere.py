"""Every norm class and rope function of every modeling file: what is recognised computes what the original does."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tests.conftest  # noqa: F401  # brings the device up, before torch is imported

# isort: split
import torch
from torch import Tensor, nn

from npu_patch import functions
from npu_patch.adapters.transformers import modules, norms, rope
from npu_patch.discovery import NormMeaning, RotaryMeaning, recognise_gated_norm, recognise_norm, recognise_rotary
from npu_patch.discovery.rotary import HALF_WIDTH
from npu_patch.discovery.rotary_forms import Form, forms
from npu_patch.discovery.standin import ABSENT
from npu_patch.registry import Target
from npu_patch.sites import Site
from tests.support.numerics import relative_error

PARTS = 4
ROOM = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
LEAST = {"5": (200, 225), "4": (95, 110)}
"""Generation of transformers → norm classes and rope functions that must be recognised."""


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_recognised_class_and_function_computes_the_same_patched(part: int) -> None:
    """In processes of their own, since they import every modeling file."""
    root = Path(__file__).parents[3]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, "-m", __name__, str(part)]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def targets(file: ModuleType, finder: Any) -> list[Target]:
    return [target for target in finder(file) if isinstance(target, Target)]


def patched(target: Target, original: Any) -> tuple[Any, Site]:
    site = Site(target.name, target.op, {})
    return functions.clone(target.adapter(original, site), original), site


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def compare(name: str, ours: list[Tensor], theirs: list[Tensor], room: float) -> None:
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{name}, tensor {i}"
        assert bool(a.isfinite().all()), f"{name}, tensor {i}"
        assert relative_error(a, b) <= room, f"{name}, tensor {i}: {relative_error(a, b)}"


# ---- norms -----------------------------------------------------------------------------------------------------------

WIDTH = 16


def construct(cls: type[nn.Module], meaning: NormMeaning) -> nn.Module | None:
    """An instance by the class's own constructor, with what the meaning wants where that is an argument."""
    arguments: dict[str, Any] = {}
    wanted = {name: value for name, value in meaning.conditions if value is not ABSENT}
    for name, parameter in list(inspect.signature(cls.__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in wanted:
            arguments[name] = wanted[name]
        elif parameter.default is parameter.empty:
            arguments[name] = 2 if "groups" in name else 8 if "group" in name else 1e-5 if "eps" in name else WIDTH
    try:
        return cls(**arguments)
    except Exception:  # it takes a configuration
        return None


def instance(cls: type[nn.Module], meaning: NormMeaning, dtype: torch.dtype) -> tuple[nn.Module, bool]:
    """(an instance that the meaning holds for, whether its constructor made it)."""
    made = construct(cls, meaning)
    module = made
    if module is None:
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        setattr(module, meaning.eps, 1e-5)
        for name, kind in meaning.widths:
            setattr(module, name, WIDTH if kind is int else (WIDTH,))
        for name, kind in meaning.groups:
            setattr(module, name, 2 if kind == "groups" else WIDTH // 2)
    if meaning.weight is not None:
        weight = draw((WIDTH,), torch.float32, 3) * 0.5 + 0.3
        setattr(module, meaning.weight, nn.Parameter(weight))
    for name, value in meaning.conditions:
        if value is ABSENT:
            if hasattr(module, name):
                delattr(module, name)
        else:
            setattr(module, name, value)
    return module.to("npu", dtype), made is not None


def check_norm(file: ModuleType, target: Target) -> tuple[int, int]:
    """(instances, those of them that their own constructor made)."""
    cls = getattr(file, target.path.removesuffix(".forward"))
    gated = cls.forward.__code__.co_argcount == 3
    meanings = (recognise_gated_norm if gated else recognise_norm)(cls)
    built = own = 0
    for meaning in meanings:
        for dtype, room in ROOM.items():
            module, by_itself = instance(cls, meaning, dtype)
            built, own = built + 1, own + by_itself
            inputs = []
            for seed in range(1 + gated):
                x = draw((2, 3, WIDTH), dtype, seed) * 2
                x.view(-1, WIDTH)[:3] *= torch.tensor([[0.0], [1e-4], [100.0]], dtype=dtype)
                inputs.append(x.to("npu").requires_grad_())
            leaves = [*inputs, *module.parameters()]
            forward, site = patched(target, cls.forward)
            results = []
            for function in (forward, cls.forward):
                y = function(module, *inputs)
                gradients = torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)
                results.append([y, *(g for g in gradients if g is not None)])
            compare(f"{target.name}, {meaning}, {dtype}", *results, room)
            assert site.hits == 1, (target.name, meaning, site.fallbacks)
    return built, own


# ---- ropes -----------------------------------------------------------------------------------------------------------

HEAD, TOKENS = 16, 6


class Captured(Exception):
    pass


def arguments(form: Form, dim: int, width: int, dtypes: tuple[torch.dtype, torch.dtype], shared: bool) -> list[Any]:
    """What a function of this form is called with."""
    shapes = {1: (2, None, TOKENS, HEAD), 2: (2, TOKENS, None, HEAD), -2: (TOKENS, None, HEAD)}[dim]
    batch = 1 if shared or form.shared else 2
    if form.name == "angles":
        shapes = (1, *shapes[1:])
    tensors = [
        draw(tuple(heads if size is None else size for size in shapes), dtypes[0], seed)
        for seed, heads in enumerate((4, 2)[: form.tensors])
    ]
    table = (TOKENS, width) if dim == -2 else (batch, TOKENS, width)
    angles = draw(table, torch.float32, 7) * 2
    cos, sin = angles.cos(), angles.sin()
    if not form.angles:  # rows and halves that differ, and numbers beyond one
        cos, sin = cos * 1.3, sin * 0.9
    calls: list[tuple[Any, ...]] = []

    def capture(*args: Any) -> Any:
        calls.append(args)
        raise Captured

    with contextlib.suppress(Captured):
        form.call(capture, tensors, cos.to(dtypes[1]), sin.to(dtypes[1]), dim)
    return [x.to("npu") if isinstance(x, Tensor) else x for x in calls[0]]


def cases(meaning: RotaryMeaning, form: Form) -> Iterator[tuple[int, int, tuple[torch.dtype, torch.dtype]]]:
    full, brain = torch.float32, torch.bfloat16
    scale = 2 if meaning.table in HALF_WIDTH else 1
    widths = [HEAD // scale] + [HEAD // scale // 2] * meaning.partial
    for dim in meaning.dims:
        for width in widths:
            for dtypes in ((full, full), (brain, full), (brain, brain)):
                if dtypes in meaning.results and not (form.name.startswith("complex") and dtypes[1] is brain):
                    yield dim, width, dtypes


def check_rope(file: ModuleType, target: Target) -> int:
    original = getattr(file, target.path)
    meaning = recognise_rotary(original)
    code = original.__code__
    names = code.co_varnames[: code.co_argcount]
    defaults = dict(zip(reversed(names), reversed(original.__defaults__ or ()), strict=False))
    known = forms(names, defaults, bool(code.co_flags & inspect.CO_VARKEYWORDS))
    form = next(form for form in known if form.name == meaning.form and meaning.dims in form.layouts)
    forward, site = patched(target, original)
    calls = 0
    for dim, width, dtypes in cases(meaning, form):
        args = arguments(form, dim, width, dtypes, shared=meaning.mode == "interleave")
        leaves = [x.requires_grad_() for x in args[: form.tensors]]
        results = []
        for function in (forward, original):
            outputs = function(*args)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            heads = [draw(tuple(y.shape), torch.float32, 9).to("npu", y.dtype) for y in outputs]
            results.append([*outputs, *torch.autograd.grad(outputs, leaves, heads)])
        calls += 1
        compare(f"{target.name}, {dim}, {width}, {dtypes}", *results, ROOM[dtypes[0]])
        assert site.hits == calls, (target.name, dim, width, dtypes, site.fallbacks)
    return calls


def check(part: int) -> None:
    built = own = classes = rotations = calls = 0
    for name in modules()[part::PARTS]:
        try:
            file = importlib.import_module(name)
        except ImportError:  # needs a package that is not installed
            continue
        for target in targets(file, norms.find):
            more, by_itself = check_norm(file, target)
            classes, built, own = classes + 1, built + more, own + by_itself
        for target in targets(file, rope.find):
            rotations, calls = rotations + 1, calls + check_rope(file, target)
    import transformers

    least = LEAST[transformers.__version__.partition(".")[0]]
    print(f"{classes} classes, {own} of {built} by their own constructors; {rotations} functions, {calls} calls")
    assert own >= 0.95 * built
    assert classes >= 0.5 * least[0] / PARTS
    assert rotations >= 0.5 * least[1] / PARTS


if __name__ == "__main__":
    check(int(sys.argv[1]))
