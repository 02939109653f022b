from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .helpers import TOLERANCE, assert_near, assert_same_function, values

pytestmark = pytest.mark.usefixtures("simulated")


def formula(x: Tensor, gamma: Tensor, eps: float = 1e-5) -> Tensor:
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    return x / torch.sqrt((x * x).mean(dims, keepdim=True) + eps) * gamma


def rms_norm(x: Tensor, gamma: Tensor) -> Tensor:
    return torch.ops.npu.npu_rms_norm(x, gamma, 1e-5)[0]


@pytest.mark.parametrize(
    ("x_dtype", "gamma_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
    ],
)
def test_rms_norm_and_its_gradients_for_every_documented_dtype_pair(
    x_dtype: torch.dtype, gamma_dtype: torch.dtype
) -> None:
    assert_same_function(rms_norm, formula, [values(2, 5, 16, dtype=x_dtype), values(16, seed=1, dtype=gamma_dtype)])


def test_rms_norm_over_several_dimensions() -> None:
    assert_same_function(rms_norm, formula, [values(3, 4, 8), values(4, 8, seed=1)])


def test_rms_norm_of_rows_of_zeros_and_of_tiny_and_large_values() -> None:
    x = values(3, 16) * torch.tensor([[0.0], [1e-4], [1e4]])
    assert_same_function(rms_norm, formula, [x, values(16, seed=1)])


def test_rms_norm_rounds_once() -> None:
    x, gamma = values(64, 32, dtype=torch.bfloat16), values(32, seed=1, dtype=torch.bfloat16)
    exact = formula(x.double(), gamma.double())
    half_ulp = torch.maximum(exact.abs() * 2**-8, torch.tensor(1e-30).double())
    assert ((rms_norm(x.npu(), gamma.npu()).cpu().double() - exact).abs() <= half_ulp * 1.01).all()


def test_rstd_is_float32_and_keeps_the_normed_dimension() -> None:
    x = values(2, 3, 8, dtype=torch.bfloat16)
    rstd = torch.ops.npu.npu_rms_norm(x.npu(), values(8, dtype=torch.bfloat16).npu(), 1e-6)[1]
    assert rstd.dtype == torch.float32
    assert_near(rstd, 1 / torch.sqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6), 1e-6)


def test_backward_uses_the_saved_rstd() -> None:
    x, gamma, dy = values(2, 8).npu(), values(8, seed=1).npu(), values(2, 8, seed=2).npu()
    rstd = torch.ops.npu.npu_rms_norm(x, gamma, 1e-6)[1]
    right = torch.ops.npu.npu_rms_norm_backward(dy, x, gamma, rstd)[0]
    wrong = torch.ops.npu.npu_rms_norm_backward(dy, x, gamma, rstd * 2)[0]
    assert not torch.allclose(right, wrong)


def test_gradient_of_gamma_is_float32_before_autograd_casts_it() -> None:
    x, gamma = values(2, 8, dtype=torch.bfloat16).npu(), values(8, dtype=torch.bfloat16).npu()
    rstd = torch.ops.npu.npu_rms_norm(x, gamma, 1e-6)[1]
    assert torch.ops.npu.npu_rms_norm_backward(x, x, gamma, rstd)[1].dtype == torch.float32


def test_empty_input_is_supported() -> None:
    assert rms_norm(torch.empty(0, 8).npu(), torch.ones(8).npu()).shape == (0, 8)


@pytest.mark.parametrize("gamma_dtype", [torch.bfloat16, torch.float16])
def test_float32_input_with_a_narrow_gamma_is_refused(gamma_dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match=r"npu_rms_norm.*gamma.*dtype"):
        rms_norm(values(2, 8).npu(), values(8).to(gamma_dtype).npu())


def test_gamma_of_the_other_narrow_dtype_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"npu_rms_norm.*gamma.*dtype"):
        rms_norm(values(2, 8).bfloat16().npu(), values(8).half().npu())


def test_float64_is_refused() -> None:
    with pytest.raises(RuntimeError, match="npu_rms_norm"):
        rms_norm(values(2, 8).double().npu(), values(8).double().npu())


def test_gamma_of_another_width_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"npu_rms_norm.*gamma.*shape"):
        rms_norm(values(2, 8).npu(), values(4).npu())


def test_gamma_on_the_cpu_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"gamma.*NPU|same device|device"):
        rms_norm(values(2, 8).npu(), values(8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_rms_norm_returns_the_norm_of_the_rounded_sum_and_the_sum(dtype: torch.dtype) -> None:
    a, b, gamma = values(2, 8, dtype=dtype), values(2, 8, seed=1, dtype=dtype), values(8, seed=2, dtype=dtype)
    y, rstd, total = torch.ops.npu.npu_add_rms_norm(a.npu(), b.npu(), gamma.npu(), 1e-5)
    assert torch.equal(total.cpu(), a + b)
    assert_near(y, formula((a + b).double(), gamma.double()), TOLERANCE[dtype])
    assert rstd.shape == (2, 1)


def test_add_rms_norm_has_no_derivative() -> None:
    x = values(2, 8).npu().requires_grad_()
    y = torch.ops.npu.npu_add_rms_norm(x, x, torch.ones(8).npu(), 1e-5)[0]
    with pytest.raises(RuntimeError, match="derivative for npu::npu_add_rms_norm is not implemented"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("x2", "gamma", "named"),
    [
        (values(2, 4), values(8), "x2"),
        (values(2, 8).bfloat16(), values(8), "x2"),
        (values(2, 8), values(8).bfloat16(), "gamma"),
    ],
)
def test_add_rms_norm_refuses_unequal_shapes_and_dtypes(x2: Tensor, gamma: Tensor, named: str) -> None:
    with pytest.raises(RuntimeError, match=f"npu_add_rms_norm.*{named}"):
        torch.ops.npu.npu_add_rms_norm(values(2, 8).npu(), x2.npu(), gamma.npu(), 1e-5)


def test_add_rms_norm_refuses_empty_tensors() -> None:
    empty = torch.empty(0, 8).npu()
    with pytest.raises(RuntimeError, match=r"npu_add_rms_norm.*empty"):
        torch.ops.npu.npu_add_rms_norm(empty, empty, torch.ones(8).npu(), 1e-5)
