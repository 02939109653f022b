"""Functions that run experts are recognised by what they compute, and nothing else is."""

from __future__ import annotations

import inspect
import types

import pytest
import torch

from npu_patch.discovery import NotRecognised
from npu_patch.discovery.experts import recognise_experts, recognise_gate, recognise_linear, recognise_product

moe = pytest.importorskip("transformers.integrations.moe")
NAMES = ("_grouped_mm", "_grouped_linear", "grouped_mm_experts_forward", "batched_mm_experts_forward")
GROUPED, BATCHED = NAMES[2:]


def changed(name: str, old: str, new: str) -> types.ModuleType:
    """The library's functions in a module of their own, one of them with another text."""
    module = types.ModuleType("changed")
    vars(module).update({key: value for key, value in vars(moe).items() if not key.startswith("__")})
    for one in NAMES:
        source = inspect.getsource(getattr(moe, one))
        if one == name:
            assert old in source
            source = source.replace(old, new)
        exec(source, vars(module))
    return module


def judge(module: types.ModuleType) -> None:
    recognise_product(module, module._grouped_mm)
    recognise_linear(module, module._grouped_linear)
    recognise_experts(module, module.grouped_mm_experts_forward)
    recognise_experts(module, module.batched_mm_experts_forward)


def test_the_stock_functions_are_recognised():
    judge(moe)
    judge(changed(GROUPED, "", ""))
    recognise_gate(moe._default_apply_gate)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (GROUPED, "perm // num_top_k", "perm % num_tokens"),
        (GROUPED, "sample_weights[perm]", "sample_weights[perm].detach()"),
        (GROUPED, "sample_weights[perm]", "sample_weights"),
        (GROUPED, "self._apply_gate(proj_out)", "self.act_fn(proj_out.chunk(2, -1)[0]) * proj_out.chunk(2, -1)[1]"),
        (GROUPED, "proj_out = self.act_fn(proj_out)", "pass"),
        (GROUPED, "proj_out = self.post_expert_norm(proj_out)", "pass"),
        (GROUPED, ".sum(dim=1)", ".mean(dim=1)"),
        (GROUPED, "self.down_proj_bias[expert_ids_g]", "self.down_proj_bias[expert_ids_g] * 0"),
        (GROUPED, "self.up_proj_bias[expert_ids_g]", "self.up_proj_bias[expert_ids_g] * 2"),
        (GROUPED, "expert_ids_g >= self.num_experts", "expert_ids_g > self.num_experts"),
        (GROUPED, "final_hidden_states.to(hidden_states.dtype)", "final_hidden_states"),
        (GROUPED, "torch.sort(expert_ids)", "torch.sort(expert_ids, descending=True)"),
        (GROUPED, "num_top_k = top_k_index.size(-1)", "num_top_k = self.config.num_experts_per_tok"),
        (BATCHED, "sample_weights = sample_weights.masked_fill(sentinel_mask, 0.0)", "pass"),
        (BATCHED, "expert_ids.clamp(0, self.num_experts - 1)", "expert_ids.clamp_(0, self.num_experts - 1)"),
        (BATCHED, "self.gate_up_proj[expert_ids]", "self.gate_up_proj[expert_ids - 1]"),
        ("_grouped_linear", "out.add_(bias)", "out.sub_(bias)"),
        ("_grouped_linear", "weight.transpose(-2, -1)", "weight"),
        ("_grouped_mm", "input.to(weight.dtype)", "input"),
        ("_grouped_mm", "offs=offs", "offs=offs.flip(0).cummax(0)[0]"),
        ("_grouped_mm", "input.to(weight.dtype), weight,", "input.to(weight.dtype).detach(), weight,"),
    ],
)
def test_what_computes_something_else_is_not(name, old, new):
    with pytest.raises(NotRecognised):
        judge(changed(name, old, new))


def half(x):
    return x.chunk(2, -1)


@pytest.mark.parametrize(
    "gate",
    [
        lambda self, x: self.act_fn(half(x)[1]) * half(x)[0],
        lambda self, x: self.act_fn(x[..., ::2]) * x[..., 1::2],
        lambda self, x: torch.nn.functional.silu(half(x)[0]) * half(x)[1],
        lambda self, x: self.act_fn(half(x)[0].clamp(max=7.0)) * half(x)[1],
        lambda self, x: self.act_fn(half(x)[0]) * (half(x)[1] + 1),
        lambda self, x: self.act_fn(half(x)[0]) * half(x)[1].clamp(max=self.limit),
        lambda self, x: self.act_fn(half(x)[0].float()).to(x.dtype) * half(x)[1].detach(),
        lambda self, x, scale=1.0: self.act_fn(half(x)[0]) * half(x)[1] * scale,
    ],
)
def test_another_gate_is_not_recognised(gate):
    with pytest.raises(NotRecognised):
        recognise_gate(gate)
