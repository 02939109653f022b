"""Gated MLPs are recognised by what they compute, whatever their parts are called."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from npu_patch.discovery import NotRecognised
from npu_patch.discovery.mlp import recognise_activation, recognise_gated_mlp


class Separate(nn.Module):
    """Never built: the recogniser needs no instance."""


class PackedMLP(nn.Module):
    def forward(self, hidden_states):
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(up * self.act_fn(gate))


class UpFirstMLP(nn.Module):
    def forward(self, x):
        up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


class SplitMLP(nn.Module):
    def forward(self, x):
        both = self.wi(x)
        half = both.shape[-1] // 2
        return self.wo(F.gelu(both[..., :half], approximate="tanh") * both[..., half:])


class UpBeforeGateMLP(nn.Module):
    def forward(self, x):
        up = self.up_proj(x)
        return self.down_proj(self.norm(self.drop(up * F.silu(self.gate_proj(x)))))


def test_what_is_called_on_what_is_found_out():
    packed, separate = recognise_gated_mlp(PackedMLP), recognise_gated_mlp(UpBeforeGateMLP)
    assert (packed.projections, packed.gate, packed.activation) == (("gate_up_proj",), 0, "act_fn")
    assert recognise_gated_mlp(UpFirstMLP).gate == 1
    assert (separate.projections, separate.gate) == (("up_proj", "gate_proj"), 1)
    assert (separate.activation, separate.function) == (None, "silu")
    assert (separate.between, separate.down) == (("drop", "norm"), "down_proj")
    split = recognise_gated_mlp(SplitMLP)
    assert (split.projections, split.gate, split.function, split.down) == (("wi",), 0, "gelu_tanh", "wo")


def variant(body):
    """A gated MLP with another product."""

    class VariantMLP(Separate):
        def forward(self, x):
            return self.down_proj(body(self, self.gate_proj(x), self.up_proj(x)))

    return VariantMLP


VARIANTS = {
    "clamped gate": lambda self, gate, up: self.act_fn(gate.clamp(max=7.0)) * up,
    "clamped activation": lambda self, gate, up: self.act_fn(gate).clamp(max=10.0) * up,
    "clamped up": lambda self, gate, up: self.act_fn(gate) * up.clamp(-7.0, 7.0),
    "shifted": lambda self, gate, up: self.act_fn(gate) * (up + 1),
    "scaled": lambda self, gate, up: self.act_fn(gate) * up * 0.5,
    "scaled slightly": lambda self, gate, up: self.act_fn(gate) * up * (1 + 1e-3),
    "scaled gate": lambda self, gate, up: self.act_fn(1.702 * gate) * up,
    "scaled by an attribute": lambda self, gate, up: self.act_fn(gate) * up * self.multiplier,
    "sparsified": lambda self, gate, up: self.act_fn(F.relu(gate - gate.mean(-1, keepdim=True))) * up,
    "not activated": lambda self, gate, up: gate * up,
    "activated twice": lambda self, gate, up: self.act_fn(gate) * self.act_fn(up),
    "added": lambda self, gate, up: self.act_fn(gate) + up,
    "sigmoid": lambda self, gate, up: torch.sigmoid(gate) * up,
    "quick gelu": lambda self, gate, up: gate * torch.sigmoid(1.702 * gate) * up,
    "without a gradient of the gate": lambda self, gate, up: self.act_fn(gate).detach() * up,
    "without a gradient of up": lambda self, gate, up: self.act_fn(gate) * up.detach(),
    "in float32": lambda self, gate, up: (self.act_fn(gate.float()) * up.float()).to(gate.dtype),
    "when training": lambda self, gate, up: self.act_fn(gate) * up if self.training else up,
    "by a weight": lambda self, gate, up: (self.act_fn(gate) * up).to(self.down_proj.weight.dtype),
    "random": lambda self, gate, up: F.dropout(self.act_fn(gate) * up, 0.5, True),
    "no attribute": lambda self, gate, up: self.act_fn(gate) * up * getattr(self, "scale", 1.0),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_not_recognised(name):
    with pytest.raises(NotRecognised):
        recognise_gated_mlp(variant(VARIANTS[name]))


def test_variants_would_be_recognised_without_their_difference():
    assert recognise_gated_mlp(variant(lambda self, gate, up: self.act_fn(gate) * up)).gate == 0


class PlainMLP(Separate):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)))


class ResidualMLP(Separate):
    def forward(self, x):
        return x + self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class WritingMLP(Separate):
    def forward(self, x):
        self.seen = x
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class InPlaceMLP(Separate):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x.mul_(2))) * self.up_proj(x))


class SharedMLP(Separate):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.gate_proj(x))


class MaskedMLP(Separate):
    def forward(self, x, mask=None):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class OptionalGateMLP(Separate):
    def forward(self, x):
        if self.gate_proj is None:
            return self.down_proj(self.act_fn(self.up_proj(x)))
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class OptionalDropMLP(Separate):
    def forward(self, x):
        y = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(y if self.drop is None else self.drop(y))


class KindMLP(Separate):
    def forward(self, x):
        gate = self.gate_proj(x)
        return self.down_proj((gate if isinstance(self.act_fn, nn.Identity) else self.act_fn(gate)) * self.up_proj(x))


class BesideCallMLP(Separate):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj.forward(x)) * self.up_proj(x))


class ClassFlagMLP(Separate):
    flag = True

    def forward(self, x):
        y = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(y) if self.flag else y


class MethodMLP(Separate):
    def gated(self, x):
        return self.act_fn(self.gate_proj(x)) * self.up_proj(x)

    def forward(self, x):
        return self.down_proj(self.gated(x))


OTHER_FORWARDS = [
    PlainMLP,
    ResidualMLP,
    WritingMLP,
    InPlaceMLP,
    SharedMLP,
    MaskedMLP,
    OptionalGateMLP,
    OptionalDropMLP,
    KindMLP,
    BesideCallMLP,
    ClassFlagMLP,
    MethodMLP,
]


@pytest.mark.parametrize("cls", OTHER_FORWARDS)
def test_other_forwards_are_not_recognised(cls):
    with pytest.raises(NotRecognised):
        recognise_gated_mlp(cls)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (nn.SiLU(), "silu"),
        (lambda x: x * torch.sigmoid(x), None),  # in bfloat16 it rounds between
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (nn.ReLU(), None),
        (nn.Hardswish(), None),
        (lambda x: F.silu(x).clamp(max=100.0), None),
        (lambda x: F.silu(x) * (1 + 1e-3), None),
        (lambda x: x / 0 if x.dtype is torch.float32 else "no tensor", None),
    ],
)
def test_activations_are_told_apart_by_their_values(function, name):
    assert recognise_activation(function) == name


def test_the_context_of_the_import_changes_nothing():
    from torch._subclasses.fake_tensor import FakeTensorMode

    expected = recognise_gated_mlp(PackedMLP)
    state = torch.random.get_rng_state()
    with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert recognise_gated_mlp(PackedMLP) == expected
    with FakeTensorMode():
        assert recognise_gated_mlp(PackedMLP) == expected
        assert recognise_activation(nn.SiLU()) == "silu"
    assert torch.equal(state, torch.random.get_rng_state())
