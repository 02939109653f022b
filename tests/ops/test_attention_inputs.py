"""Inputs at which other users of the fused attention got a wrong result without an error."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor

from npu_patch.ops import attention as ops
from npu_patch.ops.attention import Mask

from . import formulas
from .tools import Ran, assert_close, random


def test_packed_documents_without_a_causal_mask_are_no_mean_of_the_values() -> None:
    """TND, sparse mode 0 and no mask: one document, and several."""
    q, k, v = (random(12, 2, 16, seed=i) for i in range(3))
    for ends in ((12,), (5, 12), (1, 2, 12)):
        mask = Mask.documents(ends, ends, causal=False)
        hidden = torch.ones(12, 12, dtype=torch.bool)
        for start, end in zip((0, *ends), ends, strict=False):
            hidden[start:end, start:end] = False

        def formula(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor = hidden) -> Tensor:
            return formulas.attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), hidden)[0][0].transpose(0, 1)

        with Ran() as ran:
            output = ops.attention(q, k, v, mask, layout="TND").detach()
        assert sum(ran[name] for name in ("npu_fusion_attention", "npu_fusion_attention_v3")) == 1
        assert not torch.allclose(output[:5], v.detach()[:5].mean(0, keepdim=True).expand_as(output[:5]), atol=1e-2)
        assert_close(lambda q, k, v, m=mask: ops.attention(q, k, v, m, layout="TND"), formula, q, k, v)


@pytest.mark.parametrize("shape", [(2, 4, 1, 7), (1, 4, 1, 7)])
def test_a_mask_of_each_head_with_one_row_is_expanded_over_the_queries(shape: tuple[int, ...]) -> None:
    hidden = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.4
    hidden[..., 0] = False
    q, k, v = (random(2, 4, length, 8, seed=i) for i, length in enumerate((5, 7, 7)))
    mask = Mask.dense(hidden.npu())
    assert ops.unsupported(q, k, v, mask, layout="BNSD") is None
    assert_close(
        lambda q, k, v: ops.attention(q, k, v, mask, layout="BNSD"),
        lambda q, k, v: formulas.attention(q, k, v, hidden)[0],
        q,
        k,
        v,
    )


def test_queries_before_the_first_key_give_zero_and_pass_no_gradient() -> None:
    """Causal to the lower right with more queries than keys: the first rows see nothing."""
    q, k, v = (random(2, 2, length, 8, seed=i) for i, length in enumerate((9, 4, 4)))
    output = ops.attention(q, k, v, Mask.causal("lower_right"), layout="BNSD")
    assert not output[:, :, :5].any()
    assert output[:, :, 5:].abs().min() > 0
    output.sum().backward()
    assert not q.grad[:, :, :5].any()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("mask", [Mask.causal(), Mask.band(2)], ids=["causal", "window"])
def test_a_thousand_masked_calls_leave_the_memory_of_the_host_flat(mask: Mask) -> None:
    """A mask of 2048 by 2048 made in every call would be 4 MB each."""
    q, k, v = (random(1, 1, 3, 8, seed=i, grad=False) for i in range(3))
    for i in range(1100):
        ops.attention(q, k, v, mask, layout="BNSD")
        if i == 100:
            before = resident()
    assert resident() - before < 64 << 20
