"""The three ops in one function, as a layer calls them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from npu_patch.ops import attention, rms_norm, rope
from npu_patch.ops.attention import Mask

from .tools import random


def layer(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> Tensor:
    assert rms_norm.unsupported(q, weight) is None
    q, k = rms_norm.rms_norm(q, weight, 1e-6), rms_norm.rms_norm(k, None, 1e-6)
    adjoint = rope.adjoint_sine(sin, "half").unsqueeze(1) if rope.needs_adjoint(q, k) else None
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    assert rope.unsupported(q, cos, sin, "half") is None
    q, k = rope.rotate(q, cos, sin, "half", adjoint), rope.rotate(k, cos, sin, "half", adjoint)
    mask = Mask.band(3)
    assert attention.unsupported(q, k, v, mask, layout="BNSD") is None
    return attention.attention(q, k, v, mask, layout="BNSD")


def arguments(length: int) -> list[Tensor]:
    return [
        random(2, 4, length, 8),
        random(2, 2, length, 8),
        random(2, 2, length, 8, seed=1),
        random(2, length, 8, grad=False),
        random(2, length, 8, seed=1, grad=False),
        random(8),
    ]


@pytest.mark.parametrize("dynamic", [True, None])
def test_new_lengths_are_not_compiled_again_and_again(dynamic: bool | None) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=dynamic)
    for length in (5, 7, 9, 11, 12):
        inputs = arguments(length)
        leaves = [x for x in inputs if x.requires_grad]
        found, exact = (torch.autograd.grad(f(*inputs).square().sum(), leaves) for f in (compiled, layer))
        torch.testing.assert_close(found, exact)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("strict", [True, False])
def test_export_keeps_the_operators(strict: bool) -> None:
    class Layer(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return layer(*inputs)

    with torch.no_grad():
        program = torch.export.export(Layer(), tuple(x.detach() for x in arguments(5)), strict=strict)
    names = [str(node.target) for node in program.graph.nodes if str(node.target).startswith("npu.")]
    assert names == ["npu.npu_rms_norm.default"] * 2 + ["npu.npu_rotary_mul.default"] * 2 + [
        "npu.npu_fusion_attention_v3.default"
    ]


def test_a_step_has_no_host_sync() -> None:
    from .tools import Ran

    inputs = arguments(6)
    with Ran() as ran:
        layer(*inputs).sum().backward()
    assert not {"_local_scalar_dense", "item", "equal", "is_nonzero"} & set(ran.counts)
    # norms, rotations and attention, forward and backward, and the adjoint table
    assert {name: n for name, n in ran.counts.items() if name.startswith("npu_")} == {
        "npu_rms_norm": 2,
        "npu_rms_norm_backward": 2,
        "npu_rotary_mul": 4,
        "npu_fusion_attention": 1,
        "npu_fusion_attention_grad": 1,
    }
