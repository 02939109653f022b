"""Other packages patch the same classes and functions: theirs and ours are reported, and each takes out its own."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.qwen3 import modeling_qwen3 as modeling

from npu_patch.adapters.transformers import norms, rope
from npu_patch.engine import Patcher
from npu_patch.registry import Target, Unrecognised
from npu_patch.report import Row

from .call import modeling_file

NORM, ROPE = "Qwen3RMSNorm.forward", "apply_rotary_pos_emb"
STOCK_NORM, STOCK_ROPE = modeling.Qwen3RMSNorm.forward, modeling.apply_rotary_pos_emb
CALLS = 5  # norms of a model with one layer: input, after attention, last, and one each for query and key


@pytest.fixture(autouse=True)
def stock() -> Iterator[None]:
    yield
    modeling.Qwen3RMSNorm.forward, modeling.apply_rotary_pos_emb = STOCK_NORM, STOCK_ROPE


@pytest.fixture
def patcher() -> Iterator[Patcher]:
    """One that has not looked at any module yet."""
    patcher = Patcher()
    yield patcher
    patcher.clear()


def on(patcher: Patcher) -> None:
    patcher.set({"rms_norm": True, "rope": True})


def row(patcher: Patcher, path: str, model: Any = None) -> Row:
    name = f"{modeling.__name__}:{path}"
    return next(row for row in patcher.status(model).rows if row.target == name)


def tiny() -> Any:
    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
    )
    return transformers.Qwen3ForCausalLM(config).npu()


def run(model: Any) -> torch.Tensor:
    ids = torch.arange(12).view(2, 6).npu()
    return model(input_ids=ids, labels=ids).loss.detach()


class Count:
    def __init__(self) -> None:
        self.calls = 0


def liger_like(count: Count) -> Callable[..., Any]:
    def liger_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        count.calls += 1
        return STOCK_NORM(self, hidden_states)

    return liger_forward


def verl_like(count: Count) -> Callable[..., Any]:
    def verl_rope(q, k, cos, sin, unsqueeze_dim=1):
        count.calls += 1
        return STOCK_ROPE(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    return verl_rope


# ---- a class attribute, a function of the module ---------------------------------------------------------------------


def test_a_forward_that_is_assigned_afterwards_wins_and_stays(patcher: Patcher) -> None:
    count = Count()
    on(patcher)
    theirs = modeling.Qwen3RMSNorm.forward = liger_like(count)
    run(tiny())
    found = row(patcher, NORM)
    assert (found.state, found.hits, count.calls) == ("overridden", 0, CALLS)
    assert found.reason.startswith("replaced by")
    assert "liger_forward" in found.reason
    patcher.clear()
    assert modeling.Qwen3RMSNorm.forward is theirs
    run(tiny())
    assert count.calls == 2 * CALLS


def test_a_wrapper_around_ours_is_reported_and_ours_is_reached(patcher: Patcher) -> None:
    count = Count()
    on(patcher)
    ours = modeling.Qwen3RMSNorm.forward

    def around(self, hidden_states):
        count.calls += 1
        return ours(self, hidden_states)

    modeling.Qwen3RMSNorm.forward = around
    model = tiny()
    run(model)
    found = row(patcher, NORM)
    assert (found.state, found.hits, count.calls) == ("overridden", CALLS, CALLS)
    patcher.clear()
    assert modeling.Qwen3RMSNorm.forward is around
    run(model)
    assert (row(patcher, NORM).hits, count.calls) == (CALLS, 2 * CALLS)


def test_a_forward_that_was_assigned_before_is_built_upon_where_it_computes_the_same(patcher: Patcher) -> None:
    def liger_forward(self, hidden_states):
        return STOCK_NORM(self, hidden_states)

    theirs = modeling.Qwen3RMSNorm.forward = liger_forward
    theirs.__module__ = "liger_kernel.transformers.rms_norm"
    on(patcher)
    run(tiny())
    found = row(patcher, NORM)
    assert (found.state, found.hits) == ("active", CALLS)
    assert found.reason.startswith("on top of liger_kernel")
    patcher.clear()
    assert modeling.Qwen3RMSNorm.forward is theirs


def test_a_forward_that_was_assigned_before_and_counts_its_calls_is_left_with_a_reason(patcher: Patcher) -> None:
    count = Count()
    modeling.Qwen3RMSNorm.forward = liger_like(count)
    on(patcher)
    run(tiny())
    assert (row(patcher, NORM).state, row(patcher, NORM).reason) == (
        "unrecognised",
        "reads count, a Count that may change",
    )
    assert count.calls > CALLS  # the probe's among them


def test_a_forward_that_was_assigned_before_and_needs_its_own_device_is_left_with_a_reason(patcher: Patcher) -> None:
    def triton_forward(self, hidden_states):
        if hidden_states.device.type != "npu":
            raise RuntimeError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        return STOCK_NORM(self, hidden_states)

    modeling.Qwen3RMSNorm.forward = triton_forward
    on(patcher)
    run(tiny())
    found = row(patcher, NORM)
    assert found.state == "unrecognised"
    assert "Pointer argument" in found.reason
    assert modeling.Qwen3RMSNorm.forward is triton_forward


def test_a_function_that_is_assigned_afterwards_wins_and_stays(patcher: Patcher) -> None:
    count = Count()
    on(patcher)
    theirs = modeling.apply_rotary_pos_emb = verl_like(count)
    run(tiny())
    found = row(patcher, ROPE)
    assert (found.state, found.hits, count.calls) == ("overridden", 0, 1)
    patcher.clear()
    assert modeling.apply_rotary_pos_emb is theirs


def test_a_function_that_was_assigned_before_is_built_upon_where_it_computes_the_same(patcher: Patcher) -> None:
    def verl_rope(q, k, cos, sin, unsqueeze_dim=1):
        return STOCK_ROPE(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    theirs = modeling.apply_rotary_pos_emb = verl_rope
    on(patcher)
    run(tiny())
    found = row(patcher, ROPE)
    assert (found.state, found.hits) == ("active", 1)
    assert "verl_rope" in found.reason
    patcher.clear()
    assert modeling.apply_rotary_pos_emb is theirs


def test_a_function_that_was_assigned_before_and_computes_something_else_is_left_with_a_reason(
    patcher: Patcher,
) -> None:
    modeling.apply_rotary_pos_emb = lambda q, k, cos, sin, unsqueeze_dim=1: (q, k)
    on(patcher)
    found = row(patcher, ROPE)
    assert (found.state, found.reason) == ("unrecognised", "computes no known rotation")


# ---- the class itself ------------------------------------------------------------------------------------------------


class OtherRMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, hidden_states):
        return STOCK_NORM(self, hidden_states)


def test_a_class_that_takes_the_name_is_reported(patcher: Patcher, monkeypatch: pytest.MonkeyPatch) -> None:
    on(patcher)
    old = modeling.Qwen3RMSNorm
    with monkeypatch.context() as patch:
        patch.setattr(modeling, "Qwen3RMSNorm", OtherRMSNorm)
        found = row(patcher, NORM)
        assert found.state == "overridden"
        assert "OtherRMSNorm" in found.reason
        patcher.clear()
        assert old.forward is STOCK_NORM
        assert modeling.Qwen3RMSNorm is OtherRMSNorm


def test_a_class_that_took_the_name_before_is_reported() -> None:
    module = modeling_file()
    module.MineRMSNorm = OtherRMSNorm  # type: ignore[attr-defined]
    (found,) = norms.find(module)
    assert isinstance(found, Unrecognised)
    assert "OtherRMSNorm is in its place" in found.reason


# ---- kernels: forwards of instances, functions made into modules -----------------------------------------------------


def kernelize_like(model: nn.Module, forward: Callable[..., Any] | None) -> None:
    """Each instance gets a forward of its own: the kernel's, or where there is none that of its class."""
    for module in model.modules():
        if isinstance(module, modeling.Qwen3RMSNorm):
            module.forward = types.MethodType(forward or type(module).forward, module)


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_a_kernel_on_instances_is_reported_for_the_model(patcher: Patcher, first: str) -> None:
    count, model = Count(), tiny()
    steps = [lambda: kernelize_like(model, liger_like(count)), lambda: on(patcher)]
    for step in steps if first == "theirs" else reversed(steps):
        step()
    run(model)
    assert (row(patcher, NORM).hits, count.calls) == (0, CALLS)
    hidden = [r for r in patcher.status(model).rows if r.state == "overridden"]
    assert len(hidden) == CALLS
    assert all("liger_forward" in r.reason for r in hidden)
    patcher.clear()
    run(model)
    assert count.calls == 2 * CALLS


def test_instances_that_hold_our_forward_run_the_original_after_disable(patcher: Patcher) -> None:
    model = tiny()
    on(patcher)
    kernelize_like(model, None)
    run(model)
    assert row(patcher, NORM).hits == CALLS
    patcher.clear()
    run(model)
    assert row(patcher, NORM).hits == CALLS
    assert modeling.Qwen3RMSNorm.forward is STOCK_NORM


def kernels_function(func: Callable[..., Any]) -> nn.Module:
    class Func(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return func(*args, **kwargs)

    return Func()


def test_a_function_made_into_a_module_instance_is_patched_and_put_back(patcher: Patcher) -> None:
    instance = modeling.apply_rotary_pos_emb = kernels_function(STOCK_ROPE)
    on(patcher)
    expected = run(tiny())
    found = row(patcher, ROPE)
    assert (found.state, found.hits, found.meaning) == ("active", 1, "half")
    assert isinstance(modeling.apply_rotary_pos_emb, types.FunctionType)
    patcher.clear()
    assert modeling.apply_rotary_pos_emb is instance
    torch.testing.assert_close(run(tiny()), expected, rtol=1e-5, atol=0.0)


def test_a_module_instance_that_was_kernelized_or_does_more_is_left_with_a_reason() -> None:
    module = modeling_file()
    kernelized, other = kernels_function(STOCK_ROPE), nn.Identity()
    kernelized.forward = lambda *args: args[:2]
    module.apply_rotary_pos_emb, module.apply_rotary_other = kernelized, other  # type: ignore[attr-defined]
    other.__module__ = module.__name__
    found = {one.path: one for one in rope.find(module)}
    assert not any(isinstance(one, Target) for one in found.values())
    assert "forward was replaced" in found["apply_rotary_pos_emb"].reason  # type: ignore[union-attr]
    assert "does more" in found["apply_rotary_other"].reason  # type: ignore[union-attr]


# ---- PEFT and accelerate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_adapters_that_train_a_copy_of_a_norm_run_the_fused_norm(patcher: Patcher, first: str) -> None:
    peft = pytest.importorskip("peft")
    expected = run(tiny())
    if first == "ours":
        on(patcher)
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"], r=2)
    model = peft.get_peft_model(tiny(), config)
    on(patcher)
    torch.testing.assert_close(run(model), expected, rtol=1e-5, atol=0.0)
    assert row(patcher, NORM).hits == CALLS
    with torch.no_grad():
        model.base_model.model.model.norm.modules_to_save["default"].weight.mul_(3.0)
    assert not torch.allclose(run(model), expected, rtol=1e-3)
    with model.disable_adapter():
        torch.testing.assert_close(run(model), expected, rtol=1e-5, atol=0.0)
    assert row(patcher, NORM).hits == 3 * CALLS
    patcher.clear()
    assert modeling.Qwen3RMSNorm.forward is STOCK_NORM


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_hooks_of_accelerate_are_stacked_upon_or_reported(patcher: Patcher, first: str) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = tiny()

    def theirs() -> None:
        for module in model.modules():
            if isinstance(module, modeling.Qwen3RMSNorm):
                hooks.add_hook_to_module(module, hooks.ModelHook())

    steps = [theirs, lambda: on(patcher)]
    for step in steps if first == "theirs" else reversed(steps):
        step()
    expected = run(model)
    assert row(patcher, NORM).hits == (0 if first == "theirs" else CALLS)
    hidden = [r for r in patcher.status(model).rows if r.state == "overridden"]
    assert len(hidden) == CALLS
    patcher.clear()
    torch.testing.assert_close(run(model), expected, rtol=1e-5, atol=0.0)
    assert row(patcher, NORM).hits == (0 if first == "theirs" else CALLS)
    for module in model.modules():
        hooks.remove_hook_from_module(module)
    run(model)
    assert row(patcher, NORM).hits == (0 if first == "theirs" else CALLS)
