"""What a norm class means, and which classes are worth asking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .outside import Part


@dataclass(frozen=True)
class NormMeaning:
    """What a norm's forward computes on instances that meet the conditions.

    Args:
        formula: with n = x * rsqrt(mean(x²) + eps) in float32, "llama": weight * n.to(x.dtype); "fp32": (weight * n)
            cast once; "gemma": ((1 + weight) * n) cast once; "gain": "fp32" with weight + gain, added in the weight's
            dtype; "none": n cast once.  A gated norm has one of the names of `gated_norms`.
        weight: attribute of the weight, None where there is none.
        eps: attribute of epsilon.
        results: (x dtype, weight dtype) → dtype of the result; pairs that are not in it were not recognised.
        default_eps: what an epsilon of None stands for: "x" (`finfo(x.dtype).eps`), "float32", or None: not recognised.
        conditions: (attribute, value): what else the instance must have, compared by type and value; `ABSENT` stands
            for an attribute that the instance does not have.
        widths: attributes that must equal the size of the last dimension: as int, or as 1-tuple.
        gain: attribute of the number that is added to the weight.
        groups: attributes that say in how many "groups" of channels it normalises, or of which "group size".
        methods: (name, function) of the class's own methods that took part.
        parts: these methods, and other functions of the library that took part.
    """

    formula: str
    weight: str | None
    eps: str
    results: Mapping[tuple[torch.dtype, torch.dtype], torch.dtype] = field(compare=False)
    default_eps: str | None = None
    conditions: tuple[tuple[str, Any], ...] = ()
    widths: tuple[tuple[str, type], ...] = ()
    groups: tuple[tuple[str, str], ...] = ()
    gain: str | None = None
    methods: tuple[tuple[str, Any], ...] = ()
    parts: tuple[Part, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        text = self.formula if self.gain is None else f"fp32 with {self.weight} + {self.gain}"
        if self.conditions:
            text += " if " + " and ".join(f"{name} is {value!r}" for name, value in self.conditions)
        return text


def is_norm_class(value: object, module: str) -> bool:
    """Whether something found in `module` is a module class defined there that calls itself a norm."""
    if not isinstance(value, type) or not issubclass(value, nn.Module) or value.__module__ != module:
        return False
    if issubclass(value, (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)):
        return False  # they subtract a mean
    return value.__name__.lower().endswith("norm") or says_rms(value)


def says_rms(cls: type | str) -> bool:
    """Whether a class, or a name, promises a root-mean-square norm, so that not recognising it is worth saying."""
    name = (cls if isinstance(cls, str) else cls.__name__).lower()
    return "rmsnorm" in name or "l2norm" in name
