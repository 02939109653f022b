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


def gelu(x: Tensor, approximate: int) -> Tensor:
    if approximate == 1:
        return x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    return x / 2 * (1 + torch.erf(x / 2**0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("approximate", [0, 1])
@pytest.mark.parametrize("activate_left", [False, True])
def test_geglu_activates_the_right_half_unless_told_otherwise(
    dtype: torch.dtype, approximate: int, activate_left: bool
) -> None:
    def formula(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1) if activate_left else reversed(x.chunk(2, -1))
        return gelu(gate, approximate) * up

    assert_same_function(
        lambda x: torch.ops.npu.npu_geglu(x, -1, approximate, activate_left)[0],
        formula,
        [values(4, 6, 8, dtype=dtype)],
        None if dtype == torch.float32 else 2**-6,
    )


def test_geglu_defaults_to_tanh_and_the_right_half() -> None:
    x = values(3, 8)
    y, activated = torch.ops.npu.npu_geglu(x.npu())
    assert torch.allclose(activated.cpu(), gelu(x[:, 4:], 1), atol=1e-6)
    assert torch.allclose(y.cpu(), x[:, :4] * gelu(x[:, 4:], 1), atol=1e-6)
    assert not torch.allclose(activated.cpu(), gelu(x[:, 4:], 0), atol=1e-6)


@pytest.mark.parametrize(
    ("x", "arguments", "reason"),
    [
        (values(2, 7), (), "even|divisible"),
        (torch.empty(0, 8), (), "empty"),
        (values(2, 8).double(), (), "dtype"),
        (values(2, 8), (-1, 2), "approximate"),
    ],
)
def test_geglu_refuses_what_is_not_documented(x: Tensor, arguments: tuple[int, ...], reason: str) -> None:
    with pytest.raises(RuntimeError, match=f"(?s)geglu.*({reason})|({reason})"):
        torch.ops.npu.npu_geglu(x.npu(), *arguments)


def test_geglu_is_not_documented_for_ascend950(as_soc) -> None:
    as_soc("Ascend950")
    with pytest.raises(RuntimeError, match="not documented"):
        torch.ops.npu.npu_geglu(values(2, 8).npu())
