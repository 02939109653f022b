"""Three steps of AdamW in float32 for every dense debug model of both generations, all ops.

Every layer is there, but in qwen3_5, whose recurrent layers run token by token here (four of eight), and in flux (one
block of each kind).

Positions restart at different places per row, and at others in every step. Experts are left out: they compute in
bfloat16, and choose differently after the smallest difference; so is 0.3.0's varlen attention, which computes in
bfloat16 as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import npu_patch
from tests.support import fla
from tests.support.numerics import Run, assert_same_training, pooled_gradient_error, relative_error

from . import families, previous, stand_ins
from .generation import CURRENT, PREVIOUS
from .models import Counts, packed_positions, uncompiled

pytestmark = pytest.mark.slow

OPS = ("rms_norm", "rope", "attention", "swiglu", "cross_entropy")
ROWS = (((48,), (7, 1, 40)), ((20, 28), (13, 35)), ((1, 46, 1), (24, 24)))  # of each step
PICTURES = ((1, 4, 4), (1, 2, 4))
Losses = list[Callable[[], Tensor]]


@pytest.fixture(autouse=True)
def separate():
    npu_patch.configure("swiglu", separate=True)
    yield
    npu_patch.configure("swiglu", separate=False)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """torchtitan's own."""
    from torchtitan.components import loss

    return loss.cross_entropy_loss(logits, labels) / labels.numel()


def current(family: str, flavor: str = "debugmodel", dense: int = 0, layers: int = 0) -> tuple[torch.nn.Module, Losses]:
    """
    Args:
        dense: so many copies of the first layer, which has no experts.
    """
    if family == "qwen3_5":
        fla.install()
    change = families.dense_layers(dense) if dense else families.first_layers(layers) if layers else None
    subject = families.build(family, flavor, "flex", change=change)
    if family == "gpt_oss":
        for layer in subject.layers.values():
            layer.moe = torch.nn.Identity()
    grids = PICTURES if getattr(subject, "vision_encoder", None) is not None else ()
    every = [packed_positions(*rows) for rows in ROWS]
    return subject, [families.loss_of(subject, p, grids, 1 + i, cross_entropy) for i, p in enumerate(every)]


def earlier(family: str, flavor: str = "debugmodel", **changes: Any) -> tuple[torch.nn.Module, Losses]:
    subject = previous.build(family, flavor, **changes)
    return subject, [previous.loss_of(subject, previous.documents(*rows), cross_entropy) for rows in ROWS]


def flux() -> tuple[torch.nn.Module, Losses]:
    from . import test_flux

    return test_flux.model(), [test_flux.loss] * 3


#: Calls of each op in one step, and how the model is made.
PACKED = {"attn_mask_type": "block_causal"}
MODELS: dict[str, tuple[tuple[int, ...], Callable[[], tuple[torch.nn.Module, Losses]]]] = (
    {
        "llama3": ((13, 6, 6, 6, 1), lambda: current("llama3")),
        "qwen3": ((33, 8, 8, 8, 1), lambda: current("qwen3")),
        "deepseek_v3": ((19, 6, 6, 6, 1), lambda: current("deepseek_v3", dense=6)),
        "gpt_oss": ((9, 4, 4, 0, 1), lambda: current("gpt_oss")),
        "kimi_k2_7": ((19, 10, 10, 6, 1), lambda: current("kimi_k2_7", dense=6)),
        "muse_glimmer": ((50, 6, 8, 8, 1), lambda: current("muse_glimmer")),
        "muse_glimmer_mm": ((51, 9, 11, 8, 1), lambda: current("muse_glimmer", "debugmodel_mm")),
        "qwen3_5": ((14, 5, 5, 4, 1), lambda: current("qwen3_5", layers=4)),
        "flux": ((6, 2, 2, 0, 0), flux),
    }
    if CURRENT
    else {
        "llama3": ((13, 6, 6, 6, 1), lambda: earlier("llama3")),
        "llama3 flex": ((13, 6, 6, 6, 1), lambda: earlier("llama3", "debugmodel_flex_attn", **PACKED)),
        "llama3 varlen": ((13, 6, 6, 6, 1), lambda: earlier("llama3", "debugmodel_varlen_attn", **PACKED)),
        "llama4": ((13, 6, 6, 3, 1), lambda: earlier("llama4")),
        "qwen3": ((33, 8, 8, 8, 1), lambda: earlier("qwen3")),
        "deepseek_v3": ((19, 12, 6, 6, 1), lambda: earlier("deepseek_v3", n_dense_layers=6)),
        "deepseek_v3 flex": (
            (19, 12, 6, 6, 1),
            lambda: earlier("deepseek_v3", "debugmodel_flex_attn", n_dense_layers=6),
        ),
        "gpt_oss": ((9, 4, 4, 0, 1), lambda: earlier("gpt_oss", **PACKED)),
        "flux": ((6, 2, 2, 0, 0), flux),
    }
    if PREVIOUS
    else {}
)


class Course(NamedTuple):
    """Loss and gradients of every step, and the parameters after the last one."""

    steps: list[Run]
    parameters: dict[str, Tensor]


def train(subject: torch.nn.Module, losses: Losses) -> Course:
    """From the parameters that are there, which are put back afterwards."""
    before = [p.detach().clone() for p in subject.parameters()]
    optimizer = torch.optim.AdamW(subject.parameters(), lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    steps = []
    for loss in losses:
        optimizer.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        gradients = {n: p.grad.cpu().clone() for n, p in subject.named_parameters() if p.grad is not None}
        steps.append(Run(value.item(), gradients))
        optimizer.step()
    after = {name: p.detach().cpu().clone() for name, p in subject.named_parameters()}
    with torch.no_grad():
        for p, old in zip(subject.parameters(), before, strict=True):
            p.copy_(old)
            p.grad = None
    return Course(steps, after)


def as_it_is() -> contextlib.AbstractContextManager[Any]:
    """torchtitan without a compiler."""
    stack = contextlib.ExitStack()
    if CURRENT:
        stack.enter_context(uncompiled())
        stack.enter_context(families.uncompiled_pictures())
    else:
        stack.enter_context(previous.uncompiled())
        stack.enter_context(stand_ins.written_out())
    return stack


#: Whose gradients are ill-conditioned: AdamW's first steps take the sign of each number, also of those that are nothing
#: but rounding errors. Here the yardstick is what becomes of rounding errors without patches.
SENSITIVE = ("muse_glimmer", "muse_glimmer_mm", "qwen3_5")


@contextlib.contextmanager
def rounded_otherwise(subject: torch.nn.Module) -> Iterator[None]:
    """Inside: every parameter is off by up to one unit in its last place."""
    before = [p.detach().clone() for p in subject.parameters()]
    generator = torch.Generator().manual_seed(13)
    with torch.no_grad():
        for p in subject.parameters():
            noise = torch.rand(p.shape, generator=generator).mul_(2).sub_(1).mul_(torch.finfo(p.dtype).eps)
            p.mul_(1 + noise.to(p.device))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, old in zip(subject.parameters(), before, strict=True):
                p.copy_(old)


def distances(course: Course, other: Course) -> list[float]:
    """The greatest of the losses; of all gradients together, step by step; of all parameters together."""
    pairs = list(zip(course.steps, other.steps, strict=True))
    losses = max(abs(one.loss - two.loss) / abs(two.loss) for one, two in pairs)
    parameters = pooled_gradient_error(Run(0.0, course.parameters), Run(0.0, other.parameters))
    return [losses, *(pooled_gradient_error(one, two) for one, two in pairs), parameters]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long) if n in ("qwen3_5", "flux") else n for n in MODELS]
)
def test_three_steps_of_adamw_go_the_same_way(name):
    per_step, build = MODELS[name]
    subject, losses = build()
    with as_it_is():
        stock = train(subject, losses)
        control = None
        if name in SENSITIVE:
            with rounded_otherwise(subject):
                control = train(subject, losses)
    with npu_patch.scope(*OPS):
        counts = Counts()
        patched = train(subject, losses)
        assert {op: counts.take(op) for op in OPS} == {op: (3 * n, {}) for op, n in zip(OPS, per_step, strict=True)}
    moved = [relative_error(p, q) for p, q in zip(stock.parameters.values(), subject.parameters(), strict=True)]
    assert min(moved) > 1e-5
    if control is not None:
        for ours, rounding in zip(distances(patched, stock), distances(control, stock), strict=True):
            assert ours <= max(1e-6, 2 * rounding)
        return
    for one, other in zip(stock.steps, patched.steps, strict=True):
        assert_same_training(one, other, loss=1e-5 if name == "gpt_oss" else 1e-6)
    errors = {n: relative_error(patched.parameters[n], p) for n, p in stock.parameters.items()}
    assert max(errors.values()) <= 1e-5, errors
