from __future__ import annotations

import pytest
import torch

from .helpers import values

pytestmark = pytest.mark.usefixtures("simulated")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32])
def test_dtype_cast_takes_the_dtype_by_its_number(dtype: torch.dtype) -> None:
    import torch_npu

    x = values(3, 4) * 10
    assert torch.equal(torch_npu.npu_dtype_cast(x.npu(), dtype).cpu(), x.to(dtype))


def test_dtype_cast_passes_gradients_back_in_the_input_dtype() -> None:
    import torch_npu

    x = values(3, 4).npu().requires_grad_()
    torch_npu.npu_dtype_cast(x, torch.bfloat16).float().mul(2).sum().backward()
    assert x.grad.dtype == torch.float32
    assert torch.equal(x.grad.cpu(), torch.full((3, 4), 2.0))


def test_softmax_with_a_dtype_goes_through_the_cast() -> None:
    x = values(3, 4, dtype=torch.bfloat16)
    ours = x.npu().requires_grad_()
    out = torch.softmax(ours, -1, dtype=torch.float32)
    assert torch.allclose(out.cpu(), torch.softmax(x, -1, dtype=torch.float32), atol=1e-7)
    out.pow(2).sum().backward()
    theirs = x.clone().requires_grad_()
    torch.softmax(theirs, -1, dtype=torch.float32).pow(2).sum().backward()
    assert torch.equal(ours.grad.cpu(), theirs.grad)
