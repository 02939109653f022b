"""repeat_interleave and its gradient, which torch_npu computes with operators of its own."""

from __future__ import annotations

import pytest
import torch

REPEATS = {"int": 3, "tensor": torch.tensor([2, 0, 1, 3]), "one for all": torch.tensor([2])}


@pytest.mark.parametrize("dim", [1, -2, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("repeats", REPEATS.values(), ids=REPEATS)
def test_forward_and_gradient_are_those_of_the_cpu(repeats, dtype, dim):
    x = torch.randn(3, 4, 5, dtype=dtype)
    if dim is None and isinstance(repeats, torch.Tensor) and repeats.numel() > 1:
        repeats = torch.arange(x.numel()) % 3
    results = []
    for device in ("cpu", "npu"):
        leaf = x.to(device, copy=True).requires_grad_()
        there = repeats.to(device) if isinstance(repeats, torch.Tensor) else repeats
        repeated = leaf.repeat_interleave(there, dim)
        weight = torch.arange(repeated.numel(), dtype=dtype, device=device).view(repeated.shape)
        (repeated * weight).sum().backward()
        results.append((repeated.detach().cpu(), leaf.grad.cpu()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
