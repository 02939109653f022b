"""Instances of router classes, whatever their constructors take, and comparing what two forwards make of them."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from npu_patch.discovery.routers import RouterMeaning

EXPERTS, WIDTH, TOP_K, GROUPS, KEPT = 16, 24, 4, 4, 2
_SETTINGS: dict[str, Any] = {
    "experts": EXPERTS,
    "width": WIDTH,
    "top_k": TOP_K,
    "groups": GROUPS,
    "kept": KEPT,
    "scale": 2.5,
    "divides": True,
    "score": "sigmoid",
    "limited": "group_limited_greedy",
}


def bias() -> Tensor:
    """Of no negative number, which two ways to hide the experts of other groups tell apart."""
    return torch.linspace(0.4, 0.0, EXPERTS)[torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(2))]


def instance(
    cls: type[nn.Module], meaning: RouterMeaning, dtype: torch.dtype = torch.float32, **changes: Any
) -> nn.Module:
    """On the NPU; `changes`: other settings, by role."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, generator=generator) / WIDTH**0.5)
    if meaning.projection == "module":
        gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        gate.weight = weight
        module.register_module(meaning.weight, gate)
    else:
        _put(module, meaning.weight, weight)
    for role, name in meaning.roles.items():
        value = nn.Parameter(bias() - 0.2) if role == "bias" else {**_SETTINGS, **changes}[role]
        _put(module, name, value)
    if meaning.correction not in (None, "argument"):
        module.register_buffer(str(meaning.correction), changes.get("correction", bias()))
    for name, value in meaning.conditions:
        setattr(module, name, value)
    module.to("npu", dtype)
    if meaning.correction not in (None, "argument"):  # models keep it in float32
        setattr(module, str(meaning.correction), getattr(module, str(meaning.correction)).float())
    return module


def _put(module: nn.Module, name: str, value: Any) -> None:
    holder, _, last = name.rpartition(".")
    if not holder:
        setattr(module, last, value)
    elif isinstance(value, nn.Parameter):
        inner = nn.Module()
        inner.register_parameter(last, value)
        module.register_module(holder, inner)
    else:
        if not hasattr(module, holder):
            setattr(module, holder, types.SimpleNamespace())
        setattr(getattr(module, holder), last, value)


def tokens(meaning: RouterMeaning, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    shape = (3, 10, WIDTH) if 3 in meaning.dims else (30, WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("npu", dtype).requires_grad_()


def call(forward: Callable[..., Any], module: nn.Module, x: Tensor, meaning: RouterMeaning) -> dict[str, Tensor]:
    """Results by name, the experts of a token in rising order."""
    given = (bias().npu(),) if meaning.correction == "argument" else ()
    results = dict(zip(meaning.outputs, forward(module, x, *given), strict=True))
    order = results["experts"].argsort(-1)
    return results | {name: results[name].gather(-1, order) for name in ("experts", "weights")}


def gradients(results: Mapping[str, Tensor], x: Tensor, module: nn.Module) -> list[Tensor]:
    """Of everything that has one, in the direction of one fixed number per element."""
    loss = torch.zeros((), device=x.device)
    for name, one in sorted(results.items()):
        if one.requires_grad:
            head = torch.linspace(-1, 1, one.numel()).view(one.shape)
            loss = loss + (one.float() * head.to(one.device)).sum() * (1.0 if name == "weights" else 0.1)
    return list(torch.autograd.grad(loss, [x, *module.parameters()]))
