"""Norm classes with a gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

ACTIVATIONS = {"silu": F.silu, "swish": F.silu, "sigmoid": torch.sigmoid, "relu": F.relu}


def normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class Norm(nn.Module):
    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter((torch.randn(size, generator=generator) * 0.5 + 0.2).to(dtype).to("npu"))
        self.variance_epsilon = 1e-5
        self.activation = "silu"
        self.group_size = 8
        self.n_groups = 2
        self.norm_before_gate = True


class GatedRMSNorm(Norm):
    def forward(self, hidden_states, gate=None):
        dtype = hidden_states.dtype
        y = self.weight * normalised(hidden_states.float(), self.variance_epsilon).to(dtype)
        return (y * F.silu(gate.float())).to(dtype)


class ActivatedGateRMSNorm(Norm):
    def forward(self, hidden_states, gate):
        y = self.weight.float() * normalised(hidden_states.float(), self.variance_epsilon)
        return (y * ACTIVATIONS[self.activation](gate.float())).to(hidden_states.dtype)


class GateFirstRMSNorm(Norm):
    def forward(self, hidden_states, gate=None):
        dtype, wide = hidden_states.dtype, hidden_states.float()
        if gate is not None:
            wide = wide * F.silu(gate.float())
        return self.weight * normalised(wide, self.variance_epsilon).to(dtype)


class GateFirstGroupedRMSNorm(Norm):
    def forward(self, hidden_states, gate=None):
        dtype, wide = hidden_states.dtype, hidden_states.float()
        if gate is not None:
            wide = wide * F.silu(gate.float())
        wide = wide.unflatten(-1, (wide.shape[-1] // self.group_size, self.group_size))
        return self.weight * normalised(wide, self.variance_epsilon).flatten(-2).to(dtype)


class EitherOrderRMSNorm(Norm):
    def forward(self, hidden_states, gate=None):
        wide = hidden_states.float()
        if not self.norm_before_gate and gate is not None:
            wide = wide * F.silu(gate.float())
        wide = normalised(wide.unflatten(-1, (self.n_groups, -1)), self.variance_epsilon)
        wide = (self.weight.view(self.n_groups, -1) * wide).flatten(-2)
        if self.norm_before_gate and gate is not None:
            wide = wide * F.silu(gate.float())
        return wide.to(hidden_states.dtype)


# ---- what looks like one of them and is not --------------------------------------------------------------------------


class GateInLowPrecision(Norm):
    def forward(self, hidden_states, gate=None):
        y = self.weight * normalised(hidden_states.float(), self.variance_epsilon).to(hidden_states.dtype)
        return y * F.silu(gate)


class IgnoresTheGate(Norm):
    def forward(self, hidden_states, gate=None):
        return self.weight * normalised(hidden_states.float(), self.variance_epsilon).to(hidden_states.dtype)


class DetachesTheGate(Norm):
    def forward(self, hidden_states, gate=None):
        return GatedRMSNorm.forward(self, hidden_states, gate.detach())


class LosesADimension(Norm):
    def forward(self, hidden_states, gate=None):
        y = GatedRMSNorm.forward(self, hidden_states, gate)
        return y.squeeze(1) if y.dim() == 3 and y.shape[1] == 1 else y


class FixedGroups(Norm):
    def forward(self, hidden_states, gate=None):
        wide = (hidden_states.float() * F.silu(gate.float())).unflatten(-1, (2, -1))
        y = normalised(wide, self.variance_epsilon).flatten(-2)
        return self.weight * y.to(hidden_states.dtype)


class GeluGateRMSNorm(Norm):
    def forward(self, hidden_states, gate=None):
        y = self.weight * normalised(hidden_states.float(), self.variance_epsilon).to(hidden_states.dtype)
        return (y * F.gelu(gate.float())).to(hidden_states.dtype)


IMPOSTORS = (GateInLowPrecision, IgnoresTheGate, DetachesTheGate, LosesADimension, FixedGroups, GeluGateRMSNorm)
