"""Dropout inside fused attention: a function of the device generator's seed and offset, made again by the backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

SCALE = 0.3
OPERATORS = ["npu_fusion_attention", "npu_fusion_attention_v3"]


def inputs(layout: str = "BNSD", length: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = {"BNSD": (2, 4, length, 16), "TND": (length, 4, 16)}[layout]
    return [torch.randn(shape, generator=generator).npu().requires_grad_() for _ in range(3)]


def attend(name: str, q: Any, k: Any, v: Any, keep_prob: float = 0.7, **keywords: Any) -> tuple[Any, ...]:
    operator = getattr(torch.ops.npu, name)
    return operator(q, k, v, 4, keywords.pop("layout", "BNSD"), scale=SCALE, keep_prob=keep_prob, **keywords)


def kept_share(name: str, q: Any, k: Any) -> torch.Tensor:
    """The dropped and scaled probabilities: attention to unit vectors."""
    unit = torch.eye(16).expand(2, 4, 16, 16).contiguous().npu()
    return attend(name, q.detach(), k.detach(), unit)[0].cpu()


@pytest.mark.parametrize("name", OPERATORS)
def test_probabilities_are_dropped_or_scaled_and_gradients_follow(name: str) -> None:
    q, k, v = inputs()
    torch.npu.manual_seed(5)
    output = attend(name, q, k, v)[0]
    torch.npu.manual_seed(5)
    dropped = kept_share(name, q, k)
    wide = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    weights = (wide[0] @ wide[1].mT * SCALE).softmax(-1)
    kept = dropped != 0
    assert 0.6 < kept.float().mean() < 0.8
    assert torch.allclose(dropped, (weights * kept / 0.7).float(), atol=1e-6)
    exact = (weights * kept / 0.7) @ wide[2]
    assert torch.allclose(output.cpu().double(), exact, atol=1e-5)
    head = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad(output, (q, k, v), head.npu())
    for a, b in zip(ours, torch.autograd.grad(exact, wide, head.double()), strict=True):
        assert (a.cpu() - b).norm() < 1e-5 * b.norm()


@pytest.mark.parametrize("name", OPERATORS)
def test_the_generator_decides_and_moves_on(name: str) -> None:
    q, k, v = inputs()
    torch.npu.manual_seed(5)
    first, second = attend(name, q, k, v)[0], attend(name, q, k, v)[0]
    torch.npu.manual_seed(5)
    assert torch.equal(attend(name, q, k, v)[0], first)
    assert not torch.equal(first, second)
    state = torch.npu.get_rng_state()
    attend(name, q, k, v, keep_prob=1.0)
    assert torch.equal(torch.npu.get_rng_state(), state)


def test_both_versions_draw_the_same_numbers() -> None:
    q, k, v = inputs()
    results = []
    for name in OPERATORS:
        torch.npu.manual_seed(9)
        results.append(attend(name, q, k, v)[0])
    assert torch.equal(*results)


def test_packed_sequences() -> None:
    q, k, v = inputs("TND")
    ends = {"layout": "TND", "actual_seq_qlen": [6, 16], "actual_seq_kvlen": [6, 16]}
    torch.npu.manual_seed(5)
    output = attend("npu_fusion_attention", q, k, v, **ends)[0]
    output.sum().backward()
    plain = attend("npu_fusion_attention", q, k, v, keep_prob=1.0, **ends)[0]
    assert not torch.equal(output, plain)
    # The gradient of a sum towards the values is the sum of the kept and scaled probabilities: they sum to about one.
    assert v.grad.mean().item() == pytest.approx(1.0, abs=0.25)


def test_a_checkpointed_forward_drops_the_same() -> None:
    gradients = []
    for wrap in (lambda f, *x: f(*x), lambda f, *x: checkpoint(f, *x, use_reentrant=False)):
        q, k, v = inputs()
        torch.npu.manual_seed(5)
        wrap(lambda *x: attend("npu_fusion_attention", *x)[0], q, k, v).square().sum().backward()
        gradients.append(q.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("keep_prob", [0.0, 1.5])
def test_a_share_outside_its_range_is_refused(keep_prob: float) -> None:
    with pytest.raises(RuntimeError, match="keep_prob"):
        attend("npu_fusion_attention", *inputs(), keep_prob=keep_prob)
