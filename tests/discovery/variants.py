"""Norms and a rope function that branch, or use something of their module, and compute the same all the same."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn

from .impostors import Base, llama
from .test_rotary import half

ACTIVATIONS = {"silu": F.silu}


class Instances(OrderedDict):
    """A table as libraries have it: each look-up makes an instance."""

    def __getitem__(self, key):
        content = super().__getitem__(key)
        cls, kwargs = content if isinstance(content, tuple) else (content, {})
        return cls(**kwargs)


SHARED = Instances(silu=nn.SiLU, gelu=(nn.GELU, {"approximate": "tanh"}))


class ByDimensions(Base):
    def forward(self, x):
        if x.dim() == 3:
            return llama(x.flatten(0, 1), self.weight, self.eps).view(x.shape)
        return llama(x, self.weight, self.eps)


class ByWidth(Base):
    def forward(self, x):
        return llama(x, self.weight, self.eps) if x.shape[-1] > 2048 else self.norm(x)


class RefusesAnotherWidth(Base):
    def forward(self, x):
        if x.size(-1) != self.dim:
            raise ValueError(f"{x.size(-1)} is not {self.dim}")
        assert x.device.type != "meta", "no data"
        return self.norm(x)


class ByTraining(Base):
    def forward(self, x):
        y = self.norm(x)
        if self.training and x.dim() > 2:
            y = y * 1
        return y


class ByAnAttributeThatMayBeMissing(Base):
    def forward(self, x):
        wide = llama(x.float(), self.weight.float(), self.eps)
        if getattr(self, "factor", None) is not None:
            wide = wide * 2
        return wide.to(x.dtype)


class ByALoop(Base):
    def forward(self, x):
        variance = x.float().pow(2).mean(-1, keepdim=True)
        for more in (0.0, self.eps):
            variance = variance + more
        return self.weight * (x.float() * torch.rsqrt(variance)).to(x.dtype)


class WithoutAutocast(Base):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.norm(x)


class OfTorch(nn.RMSNorm):
    def forward(self, x):
        return super().forward(x)


NORMS = (
    ByDimensions,
    ByWidth,
    RefusesAnotherWidth,
    ByTraining,
    ByAnAttributeThatMayBeMissing,
    ByALoop,
    WithoutAutocast,
    OfTorch,
)


class GateThatMayBeMissing(Base):
    def forward(self, x, gate=None):
        y = llama(x, self.weight, self.eps)
        if gate is not None:
            y = y * ACTIVATIONS[self.activation](gate.float())
        return y.to(x.dtype)


class GateOfASharedTable(Base):
    def forward(self, x, gate=None):
        return (llama(x, self.weight, self.eps) * SHARED[self.activation](gate.float())).to(x.dtype)


def parameters_may_be_missing(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    rotated = half(q, q if k is None else k, cos, sin, unsqueeze_dim)
    return rotated if k is not None else rotated[0]
