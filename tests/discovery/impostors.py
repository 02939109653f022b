"""Norms and rope functions that compute what a probe expects, and something else where no probe goes."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from torch import nn

from .test_rotary import half

SCALE = 1.0
SCALES = [1.0]
FLAGS = {"double": False}
CALLS: list[int] = [0]
TABLE = torch.ones(1)


class Config:
    scale = 1.0
    calls = 0


def llama(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class Base(nn.Module):
    weight: torch.Tensor
    eps: float

    def norm(self, x):
        return llama(x, self.weight, self.eps)


# ---- they branch on what no probe varies -----------------------------------------------------------------------------


class WithoutGradient(Base):
    def forward(self, x):
        return self.norm(x) if torch.is_grad_enabled() else x


class OnAnNPU(Base):
    def forward(self, x):
        if x.device.type == "npu":
            return x
        return self.norm(x)


class OnAnyDevice(Base):
    def forward(self, x):
        return self.norm(x) if x.is_cpu else x


class OfManyDimensions(Base):
    def forward(self, x):
        return x if x.dim() > 5 else self.norm(x)


class OfManyDimensionsByAnd(Base):
    def forward(self, x):
        return x if x.dim() > 3 and x.dim() > 6 else self.norm(x)


class VeryWide(Base):
    def forward(self, x):
        if x.shape[-1] <= 16384:
            return self.norm(x)
        return x


class Wide(Base):
    def forward(self, x):
        return x if x.shape[-1] > 2048 else self.norm(x)


class WideInAHelper(Base):
    def forward(self, x):
        return self.norm(_narrow(x))


def _narrow(x):
    return x if x.shape[-1] <= 16384 else x[..., :16384]


class WideInANestedFunction(Base):
    def forward(self, x):
        def narrow(x):
            return x if x.shape[-1] <= 16384 else x[..., :16384]

        return self.norm(narrow(x))


class ALoopForTheWide(Base):
    def forward(self, x):
        y = self.norm(x)
        for _ in range(x.shape[-1] // 16384):
            y = y * 2
        return y


class WithoutAGradientOfTheInput(Base):
    def forward(self, x):
        return self.norm(x) if x.requires_grad else x


class NotContiguous(Base):
    def forward(self, x):
        return self.norm(x) if x.is_contiguous() else x


class InAnotherDefaultDtype(Base):
    def forward(self, x):
        return self.norm(x) if torch.get_default_dtype() is torch.float32 else x


class UnderAutocast(Base):
    def forward(self, x):
        return x if torch.is_autocast_enabled() else self.norm(x)


class WithinAssertions(Base):
    def forward(self, x):
        if not __debug__ or sys.flags.optimize or x.numel() > 10**6:
            return x
        return self.norm(x)


class WhereItFails(Base):
    def forward(self, x):
        try:
            return torch.ops.impostors.fused(x)
        except AttributeError:
            return self.norm(x)


class LargeEpsilon(Base):
    def forward(self, x):
        return x if self.eps > 0.5 else self.norm(x)


class EpsilonOfZero(Base):
    def forward(self, x):
        return self.norm(x) if self.eps else x


class WeightThatIsFrozen(Base):
    def forward(self, x):
        return x if self.weight.device.type == "npu" else self.norm(x)


class AnArgumentThatWasReplaced(Base):
    def forward(self, x, gate):
        gate = torch.nn.functional.silu(gate.float()) if x.numel() < 10**6 else None
        if gate is None:
            return x
        return (llama(x.float(), self.weight.float(), self.eps) * gate).to(x.dtype)


# ---- they read or write what may change ------------------------------------------------------------------------------


class ANumberOfItsModule(Base):
    def forward(self, x):
        return self.norm(x) * SCALE


class AListOfItsModule(Base):
    def forward(self, x):
        return self.norm(x) * SCALES[0]


class ADictOfItsModule(Base):
    def forward(self, x):
        return self.norm(x) * (1 + FLAGS["double"])


class ATensorOfItsModule(Base):
    def forward(self, x):
        return self.norm(x) * TABLE.to(x.dtype)


class AnAttributeOfAnotherClass(Base):
    def forward(self, x):
        return self.norm(x) * Config.scale


class AnAttributeOfItsClass(Base):
    scale = 1.0

    def forward(self, x):
        return self.norm(x) * self.__class__.scale


class AnAttributeOfItsType(Base):
    scale = 1.0

    def forward(self, x):
        return self.norm(x) * getattr(type(self), "scale", 1.0)


class AnAttributeOfItsClassByName(Base):
    scale = 1.0

    def forward(self, x):
        return self.norm(x) * __class__.scale  # type: ignore[name-defined]


class AnAttributeOfAFunction(Base):
    def forward(self, x):
        return self.norm(x) * _narrow.scale


_narrow.scale = 1.0  # type: ignore[attr-defined]


class TheEnvironment(Base):
    def forward(self, x):
        return self.norm(x) * float(os.environ.get("IMPOSTORS_SCALE", "1"))


class TheTime(Base):
    def forward(self, x):
        return self.norm(x) * (1 + time.time() // 1e11)


class TheGradientMode(Base):
    def forward(self, x):
        return self.norm(x) * (2 - torch.is_inference_mode_enabled() - 1)


class CountsInAList(Base):
    def forward(self, x):
        CALLS[0] += 1
        return self.norm(x)


class AppendsToAList(Base):
    def forward(self, x):
        CALLS.append(1)
        return self.norm(x)


class CountsInAHelper(Base):
    def forward(self, x):
        _count()
        return self.norm(x)


class CountsInAClass(Base):
    def forward(self, x):
        Config.calls = Config.calls + 1
        return self.norm(x)


class CountsInADefault(Base):
    def forward(self, x):
        return self.norm(_remembered(x))


class MarksItsInput(Base):
    def forward(self, x):
        x.seen = True
        return self.norm(x)


def _count() -> None:
    global SCALE
    SCALE = SCALE * 1.0


def _remembered(x: torch.Tensor, calls: list[int] = []) -> torch.Tensor:  # noqa: B006
    return x * 1.0 if not calls else x * calls[0]


def scaled(factor: float) -> type:
    class InAClosure(Base):
        def forward(self, x):
            return self.norm(x) * factor

    return InAClosure


def counted() -> type:
    calls = 0

    class InAClosure(Base):
        def forward(self, x):
            nonlocal calls
            calls += 1
            return self.norm(x)

    return InAClosure


# ---- they differ for few numbers -------------------------------------------------------------------------------------


class ClampsTheVariance(Base):
    def forward(self, x):
        wide = x.float()
        variance = (wide.pow(2).mean(-1, keepdim=True) + self.eps).clamp(min=1e-6)
        return self.weight * (wide * torch.rsqrt(variance)).to(x.dtype)


class ClampsItsEpsilon(Base):
    def forward(self, x):
        return llama(x, self.weight, max(self.eps, 1e-6))


class ClampsHugeNumbers(Base):
    def forward(self, x):
        return llama(x.float().clamp(-1e6, 1e6).to(x.dtype), self.weight, self.eps)


class RepairsNaN(Base):
    def forward(self, x):
        return llama(x.nan_to_num(), self.weight, self.eps)


class FlushesSmallNumbers(Base):
    def forward(self, x):
        return llama(torch.where(x.abs() < 1e-5, 0.0, x.float()).to(x.dtype), self.weight, self.eps)


NORMS: tuple[type, ...] = tuple(
    value
    for value in list(vars().values())
    if isinstance(value, type)
    and issubclass(value, Base)
    and value is not Base
    and value.__name__ != "AnArgumentThatWasReplaced"
)


# ---- they do not behave ----------------------------------------------------------------------------------------------


class Boom(BaseException):
    pass


class Leaves(Base):
    def forward(self, x):
        raise SystemExit(3)


class RaisesABaseException(Base):
    def forward(self, x):
        raise Boom


class RaisesWhatCannotBePrinted(Base):
    def forward(self, x):
        class Unprintable(Exception):
            def __str__(self) -> str:
                raise ValueError

        raise Unprintable


class OddMeta(type):
    """Of a class that leaves the process when it is asked for anything but its module."""

    def __getattribute__(cls, name: str) -> Any:
        if name in ("__mro__", "__name__", "forward"):
            raise SystemExit(4)
        return super().__getattribute__(name)


class OddCallable:
    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(5)

    def __call__(self, q, k, cos, sin):
        return q, k


# ---- rope functions --------------------------------------------------------------------------------------------------


def for_wide_heads(q, k, cos, sin, unsqueeze_dim=1):
    return (q, k) if q.shape[-1] >= 64 else half(q, k, cos, sin, unsqueeze_dim)


def for_very_wide_heads(q, k, cos, sin, unsqueeze_dim=1):
    return (q, k) if q.shape[-1] >= 512 else half(q, k, cos, sin, unsqueeze_dim)


def on_an_npu(q, k, cos, sin, unsqueeze_dim=1):
    if q.device.type == "npu":
        return q, k
    return half(q, k, cos, sin, unsqueeze_dim)


def without_gradient(q, k, cos, sin, unsqueeze_dim=1):
    return half(q, k, cos, sin, unsqueeze_dim) if torch.is_grad_enabled() else (q, k)


def long_sequences(q, k, cos, sin, unsqueeze_dim=1):
    return _rotate_short(q, cos, sin, unsqueeze_dim), _rotate_short(k, cos, sin, unsqueeze_dim)


def _rotate_short(x, cos, sin, unsqueeze_dim):
    if cos.shape[-2] > 4096:
        cos = cos[..., :4096, :]
    return half(x, x, cos, sin, unsqueeze_dim)[0]


def clamps(q, k, cos, sin, unsqueeze_dim=1):
    return half(q.clamp(-100, 100), k, cos, sin, unsqueeze_dim)


def by_a_flag(q, k, cos, sin, unsqueeze_dim=1):
    return half(q, k, cos * SCALES[0], sin, unsqueeze_dim)


def leaves(q, k, cos, sin, unsqueeze_dim=1):
    raise SystemExit(3)


ROPES = (for_wide_heads, for_very_wide_heads, on_an_npu, without_gradient, long_sequences, clamps, by_a_flag, leaves)


# ---- eager attention functions ---------------------------------------------------------------------------------------


def eager(module, query, key, value, attention_mask, scaling, dropout=0.0, softcap=None, **kwargs):
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    weights = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        weights = torch.tanh(weights / softcap) * softcap
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = nn.functional.softmax(weights, -1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def eager_for_short(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    if key.shape[-2] > 4096:
        key, value = key[..., -4096:, :], value[..., -4096:, :]
    return eager(module, query, key, value, attention_mask, scaling, dropout)


def eager_by_positions(module, query, key, value, attention_mask, scaling, dropout=0.0, cache_position=None, **kwargs):
    if cache_position is not None:
        query = query * 2
    return eager(module, query, key, value, attention_mask, scaling, dropout)


def eager_by_a_flag(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    return eager(module, query, key, value, attention_mask, scaling * SCALE, dropout)


def eager_leaves(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    raise SystemExit(3)


EAGER = (eager_for_short, eager_by_positions, eager_by_a_flag, eager_leaves)
