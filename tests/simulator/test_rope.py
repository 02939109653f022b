from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from .helpers import assert_near, assert_same_function, values

pytestmark = pytest.mark.usefixtures("simulated")


def rotate(x: Tensor, mode: str) -> Tensor:
    out = torch.empty_like(x)
    half = x.shape[-1] // 2
    if mode == "half":
        out[..., :half], out[..., half:] = -x[..., half:], x[..., :half]
    else:
        out[..., ::2], out[..., 1::2] = -x[..., 1::2], x[..., ::2]
    return out


def formula(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    return x * cos + rotate(x, mode) * sin


def rotary(x: Tensor, cos: Tensor, sin: Tensor, mode: str = "half") -> Tensor:
    return torch.ops.npu.npu_rotary_mul(x, cos, sin, mode)


def moved(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [values(*shape, seed=i, dtype=dtype).npu() for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotary_mul_and_all_three_gradients(mode: str, dtype: torch.dtype) -> None:
    # the gradients of the tables come back in the input's dtype, so their error grows with the terms summed
    inputs = [values(2, 5, 3, 8, dtype=dtype), *(values(1, 5, 1, 8, seed=i, dtype=dtype) for i in (1, 2))]
    assert_same_function(lambda *a: rotary(*a, mode), lambda *a: formula(*a, mode), inputs)


@pytest.mark.parametrize(
    ("x", "table"),
    [
        ((2, 3, 5, 8), (1, 1, 5, 8)),  # 11SD
        ((2, 3, 5, 8), (2, 1, 5, 8)),  # B1SD
        ((2, 3, 5, 8), (2, 3, 5, 8)),  # BNSD
        ((2, 5, 3, 8), (1, 5, 1, 8)),  # 1S1D
        ((2, 5, 3, 8), (2, 5, 1, 8)),  # BS1D
        ((5, 2, 3, 8), (5, 1, 1, 8)),  # S11D
        ((7, 3, 8), (7, 1, 8)),  # T1D
        ((7, 3, 8), (7, 3, 8)),  # TND
    ],
)
def test_documented_tables_of_half_mode(x: tuple[int, ...], table: tuple[int, ...]) -> None:
    # A head size of 8 is not a multiple of 32 bytes and below 80, so BNSD is refused: use 128.
    x, table = (*x[:-1], 128), (*table[:-1], 128)
    assert_same_function(
        rotary, lambda *a: formula(*a, "half"), [values(*x), values(*table, seed=1), values(*table, seed=2)]
    )


@pytest.mark.parametrize(
    ("x", "table"),
    [
        ((2, 3, 5, 8), (1, 1, 5, 8)),
        ((2, 5, 3, 8), (1, 5, 1, 8)),
        ((5, 2, 3, 8), (5, 1, 1, 8)),
        ((7, 3, 8), (7, 1, 8)),
    ],
)
def test_documented_tables_of_interleave_mode(x: tuple[int, ...], table: tuple[int, ...]) -> None:
    a = moved(x, table, table)
    expected = formula(*(t.cpu().double() for t in a), "interleave")
    assert_near(rotary(*a, "interleave"), expected, 1e-6)


def test_tables_are_cast_to_the_dtype_of_the_input() -> None:
    x, cos, sin = values(2, 5, 3, 8, dtype=torch.bfloat16), values(1, 5, 1, 8, seed=1), values(1, 5, 1, 8, seed=2)
    out = rotary(x.npu(), cos.npu(), sin.npu())
    assert torch.equal(out, rotary(x.npu(), cos.bfloat16().npu(), sin.bfloat16().npu()))
    rounded = formula(x.double(), cos.bfloat16().double(), sin.bfloat16().double(), "half")
    assert_near(out, rounded, 2**-8)


def test_the_result_is_rounded_once() -> None:
    x, cos, sin = (values(64, 16, dtype=torch.bfloat16, seed=i).view(1, 64, 1, 16) for i in range(3))
    exact = formula(x.double(), cos.double(), sin.double(), "half")
    error = (rotary(x.npu(), cos.npu(), sin.npu()).cpu().double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 * 1.01 + 1e-6).all()


def test_gradients_of_tables_that_need_none_are_not_a_number() -> None:
    x, cos, sin, grad = moved((2, 5, 3, 8), (1, 5, 1, 8), (1, 5, 1, 8), (2, 5, 3, 8))
    backward = torch.ops.npu.npu_rotary_mul_backward
    dx, dcos, dsin = backward(grad, x, cos, sin, "half")
    assert dcos.isnan().all()
    assert dsin.isnan().all()
    assert dx.isfinite().all()
    same, dcos, _ = backward(grad, x, cos.requires_grad_(), sin, "half")
    assert torch.equal(dx, same)
    assert dcos.isfinite().all()


BSND = (2, 5, 3, 8)


@pytest.mark.parametrize(
    ("x", "cos", "sin", "mode", "reason"),
    [
        ((2, 5, 3, 7), (1, 5, 1, 7), (1, 5, 1, 7), "half", "even"),
        ((1, 5, 1, 896), (1, 5, 1, 896), (1, 5, 1, 896), "half", "at most 894"),
        (BSND, (1, 5, 1, 4), (1, 5, 1, 4), "half", "wide"),
        (BSND, (1, 5, 1, 8), (2, 5, 1, 8), "half", "r2.*shape"),
        (BSND, (5, 8), (5, 8), "half", "dimensions"),
        (BSND, (1, 5, 3, 8), (1, 5, 3, 8), "half", "r1.*half mode needs"),
        (BSND, (1, 1, 1, 8), (1, 1, 1, 8), "half", "r1.*half mode needs"),
        (BSND, (2, 5, 1, 8), (2, 5, 1, 8), "interleave", "r1.*interleave mode needs"),
        (BSND, BSND, BSND, "interleave", "r1.*interleave mode needs"),
        ((7, 3, 8), (1, 1, 8), (1, 1, 8), "half", "T1D or TND"),
        ((7, 3, 8), (7, 3, 8), (7, 3, 8), "interleave", "T1D or TND"),
        ((8, 2, 125, 2), (8, 1, 1, 2), (8, 1, 1, 2), "interleave", None),
        ((2, 5, 500, 2), (1, 5, 1, 2), (1, 5, 1, 2), "interleave", "B\\*N must be below 1000"),
        ((1, 5, 1000, 2), (1, 5, 1, 2), (1, 5, 1, 2), "half", "below 1000"),
        ((5, 1000, 2), (5, 1, 2), (5, 1, 2), "half", "N must be below 1000"),
        ((2, 64, 3, 128), (2, 1, 3, 128), (2, 1, 3, 128), "half", "8\\*S"),
        ((2, 3, 64, 72), (2, 1, 64, 72), (2, 1, 64, 72), "half", "head size of 72"),
        ((2, 3, 5, 8, 4), (1, 1, 5, 8, 4), (1, 1, 5, 8, 4), "half", "3 or 4 dimensions|dimension"),
    ],
)
def test_limits(x: tuple[int, ...], cos: tuple[int, ...], sin: tuple[int, ...], mode: str, reason: str | None) -> None:
    arguments = moved(x, cos, sin)
    if reason is None:
        rotary(*arguments, mode)
        return
    with pytest.raises(RuntimeError, match=f"(?s)rotary.*{reason}"):
        rotary(*arguments, mode)


def test_modes_of_other_chips_are_refused_by_torch_npu_itself() -> None:
    with pytest.raises(RuntimeError, match="should be half or interleave, but got quarter"):
        rotary(*moved(BSND, (1, 5, 1, 8), (1, 5, 1, 8)), "quarter")


def test_backward_with_a_table_per_sample_needs_fewer_samples_than_tokens() -> None:
    x, cos, sin = moved((6, 5, 2, 16), (6, 5, 1, 16), (6, 5, 1, 16))
    # [6, 5, 2, D] with a [6, 5, 1, D] table also reads as SBND, where the limit does not apply
    torch.ops.npu.npu_rotary_mul_backward(x, x, cos, sin, "half")
    x, cos, sin = moved((6, 3, 5, 128), (6, 1, 5, 128), (6, 1, 5, 128))
    with pytest.raises(RuntimeError, match="B < S"):
        torch.ops.npu.npu_rotary_mul_backward(x, x, cos, sin, "half")


def test_gradients_of_the_tables_need_a_small_batch_of_heads() -> None:
    x, cos, sin = moved((2, 3, 520, 2), (1, 3, 1, 2), (1, 3, 1, 2))
    torch.ops.npu.npu_rotary_mul_backward(x, x, cos, sin, "half")
    with pytest.raises(RuntimeError, match="B\\*N at most 1024"):
        torch.ops.npu.npu_rotary_mul_backward(x, x, cos.requires_grad_(), sin, "half")


def test_a_rotation_matrix_is_refused_because_it_is_not_simulated() -> None:
    x, cos, sin, matrix = moved(BSND, (1, 5, 1, 8), (1, 5, 1, 8), (8, 8))
    with pytest.raises(RuntimeError, match=r"npu_rotary_mul.*rotate.*not simulated"):
        torch.ops.npu.npu_rotary_mul(x, cos, sin, "half", matrix)


def test_ascend950_takes_any_broadcast_and_wider_heads(as_soc: Callable[[str], None]) -> None:
    as_soc("Ascend950")
    a = moved((2, 5, 3, 1024), (1, 1, 3, 1024), (1, 1, 3, 1024))
    assert_near(rotary(*a), formula(*(t.cpu().double() for t in a), "half"), 1e-6)
    with pytest.raises(RuntimeError, match="at most 1024"):
        rotary(*moved((1, 5, 1, 1026), (1, 5, 1, 1026), (1, 5, 1, 1026)))
    with pytest.raises(RuntimeError, match="broadcast"):
        rotary(*moved(BSND, (1, 4, 1, 8), (1, 4, 1, 8)))
