from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .helpers import assert_same_function, values

pytestmark = pytest.mark.usefixtures("simulated")


def formula(x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.chunk(2, dim)
    return gate / (1 + torch.exp(-gate)) * up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_swiglu_gates_with_the_first_half(dtype: torch.dtype, dim: int) -> None:
    assert_same_function(
        lambda x: torch.ops.npu.npu_swiglu(x, dim), lambda x: formula(x, dim), [values(4, 6, 8, dtype=dtype)]
    )


def test_swiglu_rounds_once() -> None:
    x = values(64, 32, dtype=torch.bfloat16)
    exact = formula(x.double())
    error = (torch.ops.npu.npu_swiglu(x.npu()).cpu().double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 * 1.01 + 1e-30).all()


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (values(2, 7), "even"),
        (torch.empty(0, 8), "empty"),
        (values(8, 4).t(), "contiguous"),
        (values(2, 8).double(), "dtype"),
    ],
)
def test_swiglu_refuses_what_is_not_documented(x: Tensor, reason: str) -> None:
    moved = x.npu() if x.is_contiguous() else x.t().contiguous().npu().t()
    with pytest.raises(RuntimeError, match=f"npu_swiglu.*{reason}"):
        torch.ops.npu.npu_swiglu(moved)
