"""Whatever is patched, in real libraries: what holds for every place that is written to, and for every other one."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import npu_patch
from npu_patch.registry import OPS
from npu_patch.simulator import trace
from tests.adapters.torchtitan.generation import PREVIOUS

FILES = {
    "transformers": (
        "transformers.modeling_utils",
        "transformers.loss.loss_utils",
        "transformers.masking_utils",
        "transformers.integrations.sdpa_attention",
        *(
            f"transformers.models.{m}.modeling_{m}"
            for m in ("llama", "gemma3", "phi3", "glm4", "gpt_oss", "deepseek_v3", "clvp")
        ),
    ),
    "torchtitan": (
        *(f"torchtitan.models.common.{m}" for m in ("attention", "decoder", "nn_modules", "rope", "feed_forward")),
        "torchtitan.components.loss",
    ),
}
TORCH = (torch, torch.nn, torch.nn.functional, torch.nn.init, torch.Tensor, torch.autograd, torch.nn.attention)


@functools.cache
def files(library: str) -> tuple[types.ModuleType, ...]:
    if library == "torchtitan" and importlib.util.find_spec("torchtitan.models.common") is None:
        pytest.skip("an earlier torchtitan has its models' parts elsewhere")
    return tuple(importlib.import_module(name) for name in FILES[library])


@contextlib.contextmanager
def everything(library: str) -> Iterator[dict[str, Any]]:
    """Every op on; gives what was installed in this library: name → the engine's record."""
    files(library)
    with npu_patch.scope(*(op.name for op in OPS)):
        records = npu_patch._patcher._records.values()
        yield {r.found.name: r for r in records if r.on and r.found.library == library}


def contents(owner: Any) -> dict[str, Any]:
    return dict(vars(owner))


def classes(module: Any) -> list[type]:
    return [value for value in vars(module).values() if isinstance(value, type)]


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    absent = object()
    return {name for name in {*before, *after} if before.get(name, absent) is not after.get(name, absent)}


def owners(library: str) -> dict[str, Any]:
    """Modules of the library, and the classes that they define or import."""
    found: dict[str, Any] = {}
    for module in files(library):
        found[module.__name__] = module
        found.update({f"{cls.__module__}.{cls.__qualname__}": cls for cls in classes(module)})
    return found


@pytest.mark.parametrize("library", FILES)
def test_torch_itself_is_never_written_to(library: str) -> None:
    """A function of torch.nn.functional serves every model there is, also those that nobody recognised."""
    import torch._dynamo  # marks functions of torch for itself

    files(library)
    places = [*TORCH, *classes(torch.nn)]
    before = [contents(place) for place in places]
    with everything(library) as installed:
        assert installed
        during = [contents(place) for place in places]
    for place, one, other in zip(places, before, during, strict=True):
        # imported meanwhile, warned of meanwhile
        modules = {name for name, value in other.items() if name not in one and isinstance(value, types.ModuleType)}
        # torchtitan 0.2.2 has no norm of its own
        known = {"forward"} if place is torch.nn.RMSNorm and PREVIOUS else set()
        assert not changed(one, other) - modules - known - {"__warningregistry__"}, place
    assert not any(record.found.module.partition(".")[0] == "torch" for record in installed.values())


@pytest.mark.parametrize("library", FILES)
def test_off_leaves_every_module_and_class_as_it_was(library: str) -> None:
    """The same class objects with the same contents: what was built before and while it was on is an instance still."""
    before = {name: (owner, contents(owner)) for name, owner in owners(library).items()}
    with everything(library):
        during = owners(library)
        assert any(changed(before[name][1], contents(owner)) for name, owner in during.items())
        assert {name: id(owner) for name, owner in during.items() if isinstance(owner, type)} == {
            name: id(owner) for name, (owner, _) in before.items() if isinstance(owner, type)
        }
    after = owners(library)
    assert after.keys() == before.keys()
    for name, owner in after.items():
        assert owner is before[name][0]
        assert not changed(before[name][1], contents(owner)), name


@pytest.mark.parametrize("library", FILES)
def test_a_replacement_has_the_face_of_what_it_replaces(library: str) -> None:
    with everything(library) as installed:
        assert len(installed) > 5
        for name, record in installed.items():
            ours, original = record.installed.replacement, record.installed.original
            assert type(ours) is types.FunctionType
            assert inspect.signature(ours) == inspect.signature(original), name
            for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
                assert getattr(ours, attribute) == getattr(original, attribute, None), (name, attribute)
            assert ours.__wrapped__ is original
    assert not any(name.endswith("__init__") for name in installed)


def _without_experts_registry() -> bool:
    """transformers 4: `permute` works at the places of `gmm`, whole blocks, and has none of its own."""
    return importlib.util.find_spec("transformers.integrations.moe") is None


@pytest.mark.parametrize("library", FILES)
def test_every_place_that_is_named_is_there(library: str) -> None:
    """A name that the installed version does not have would only show as a row."""
    with everything(library):
        rows = [row for row in npu_patch.status() if row.library == library]
    waits_for_an_option = [row.op for row in rows if row.reason.startswith("needs the option")]
    assert {row.op for row in rows if row.state in ("active", "compiled")} | {*waits_for_an_option} == {
        op for one in npu_patch._patcher._libraries if one.name == library for op in one.finders
    } - ({"permute"} if library == "transformers" and _without_experts_registry() else set())
    assert [row.target for row in rows if row.state == "missing"] == []


# ---- what a replacement reads and writes on the objects of others ----------------------------------------------------


@contextlib.contextmanager
def watching(found: list[type]) -> Iterator[dict[type, set[str]]]:
    """Which attributes of instances of these classes are read."""
    reads: dict[type, set[str]] = {cls: set() for cls in found}

    def recorder(cls: type) -> Any:
        plain = cls.__getattribute__

        def read(self: Any, name: str) -> Any:
            reads[cls].add(name)
            return plain(self, name)

        return read

    for cls in found:
        cls.__getattribute__ = recorder(cls)  # type: ignore[method-assign]
    try:
        yield reads
    finally:
        for cls in found:
            del cls.__getattribute__


def model_of(library: str) -> tuple[nn.Module, Any]:
    if library == "torchtitan":
        from .torchtitan import models

        model = models.build("qwen3")
        return model, models.loss_of(model, models.packed_positions((20, 28), (48,)))
    from .transformers import tiny

    model, ids = tiny.any_model(library), tiny.tokens()
    return model, lambda: model(input_ids=ids, labels=ids, use_cache=False).loss


def unpatched(kind: str) -> Any:
    """Where the unpatched model can run: torchtitan's needs a compiler, or this."""
    if kind == "torchtitan":
        from .torchtitan import models

        return models.uncompiled()
    return contextlib.nullcontext()


def instance_contents(model: nn.Module) -> list[set[str]]:
    tables = ("_parameters", "_buffers", "_modules")
    return [set(vars(m)) | {name for table in tables for name in vars(m)[table]} for m in model.modules()]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "phi3", "torchtitan"])
def test_instances_built_before_are_enough_and_nothing_is_hung_on_them(kind: str) -> None:
    """A replacement reads attributes that the original reads, and no others: others might not be there."""
    library = "torchtitan" if kind == "torchtitan" else "transformers"
    files(library)
    model, loss = model_of(kind)
    with everything(library) as installed:
        patched_classes = {
            record.installed.place.parent
            for record in installed.values()
            if isinstance(getattr(record.installed.place, "parent", None), type)
        }
    found = [cls for cls in {type(m) for m in model.modules()} if cls in patched_classes]
    assert found
    with unpatched(kind), watching(found) as stock:
        loss().backward()
    before, on_classes = instance_contents(model), {cls: set(vars(cls)) for cls in found}
    with everything(library), trace() as counted:
        with watching(found) as patched:
            loss().backward()
        assert {cls: set(vars(cls)) - {"forward"} for cls in found} == {
            cls: names - {"forward"} for cls, names in on_classes.items()
        }
    assert counted.launches_by_op["npu.npu_rms_norm"] > 0
    assert instance_contents(model) == before
    for cls in found:
        assert patched[cls] <= stock[cls], (cls, patched[cls] - stock[cls])


def fused_operators(loss: Any) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU]) as events:
        loss().backward()
    return {event.key for event in events.key_averages() if event.key.startswith("npu::")}


def hits() -> dict[str, int]:
    return {row.target: row.hits for row in npu_patch.status()}


@pytest.mark.parametrize("kind", ["llama", "torchtitan"])
def test_a_model_built_while_patched_is_the_stock_one_afterwards(kind: str) -> None:
    """torch_npu itself runs some fused operators, beneath scaled_dot_product_attention: these stay."""
    library = "torchtitan" if kind == "torchtitan" else "transformers"
    files(library)
    with unpatched(kind):
        stock = fused_operators(model_of(kind)[1])
    with everything(library):
        model, loss = model_of(kind)
        assert {"npu::npu_rms_norm", "npu::npu_rotary_mul"} <= fused_operators(loss) - stock
    assert all(m.forward.__func__ is type(m).forward for m in model.modules())
    before = hits()
    with unpatched(kind):
        assert fused_operators(loss) == stock
    assert hits() == before
