from __future__ import annotations

from typing import Any

import pytest
import torch

from npu_patch.simulator.kernels import base
from npu_patch.simulator.kernels.base import UNDEFINED, Kernel

from .helpers import values

pytestmark = pytest.mark.usefixtures("simulated")


def bound(name: str, models: tuple[str, ...], function: Any) -> Kernel:
    """A kernel for an operator, outside the dispatcher; its real part is the one that the registered kernel has."""
    registered = next(k for k in base._declared if k.name == name)
    kernel = Kernel(name, models, (), function)
    kernel.arguments, kernel.defaults, kernel.real = registered.arguments, registered.defaults, registered.real
    return kernel


def test_every_declared_kernel_is_registered_and_models_only_arguments_that_exist() -> None:
    for kernel in base._declared:
        assert kernel.real is not None, kernel.name
        assert set(kernel.models) <= set(kernel.arguments)


def test_an_argument_that_the_reference_does_not_declare_is_refused_unless_it_is_the_default() -> None:
    kernel = bound("npu_rms_norm", ("input", "gamma"), lambda call, input, gamma: (input, input[..., :1]))
    x, gamma = values(2, 8).npu(), torch.ones(8).npu()
    kernel(x, gamma)
    kernel(x, gamma, 1e-6)
    with pytest.raises(RuntimeError, match=r"npu::npu_rms_norm \(simulated Ascend910B\): epsilon: .*not simulated"):
        kernel(x, gamma, 1e-5)
    with pytest.raises(RuntimeError, match="epsilon"):
        kernel(x, gamma, epsilon=1e-5)


def test_binding_a_kernel_that_declares_an_unknown_argument_fails() -> None:
    with pytest.raises(TypeError, match=r"npu_swiglu models arguments that do not exist: \['axis'\]"):
        Kernel("npu_swiglu", ("input", "axis"), (), lambda call, **k: None).bind()


def test_a_result_of_another_shape_than_torch_npu_allocates_is_refused() -> None:
    kernel = bound("npu_swiglu", ("input", "dim"), lambda call, input, dim: input)
    with pytest.raises(RuntimeError, match=r"torch_npu allocates torch.float32\[2, 4\], the arguments mean .*\[2, 8\]"):
        kernel(values(2, 8).npu())


def test_undefined_outputs_are_poisoned() -> None:
    kernel = bound("npu_swiglu", ("input", "dim"), lambda call, input, dim: UNDEFINED)
    assert kernel(values(2, 8).npu()).isnan().all()
    integers = torch.zeros(3, dtype=torch.int32)
    base.poison(integers)
    assert (integers == torch.iinfo(torch.int32).min).all()


def test_a_forgotten_output_is_an_error() -> None:
    kernel = bound("npu_swiglu", ("input", "dim"), lambda call, input, dim: None)
    with pytest.raises(AssertionError, match="output 0 is missing"):
        kernel(values(2, 8).npu())


def test_torch_npu_checks_the_arguments_first() -> None:
    q = values(1, 2, 4, 8).npu()
    with pytest.raises(RuntimeError, match="input_layout should be BSH/SBH/BNSD/BSND/TND"):
        torch.ops.npu.npu_fusion_attention(q, q, q, 2, "NBSD")


def test_an_operator_without_a_simulated_kernel_raises_and_names_it() -> None:
    with pytest.raises(RuntimeError, match=r"simulator: operator aclnn\w*FastGelu\w* has no simulated kernel"):
        torch.ops.npu.fast_gelu(values(2, 8).npu())


def test_an_operator_without_a_simulated_kernel_raises_after_a_host_check_too() -> None:
    torch.ops.npu.npu_swiglu(values(2, 8).npu())
    with pytest.raises(RuntimeError, match="has no simulated kernel"):
        torch.ops.npu.fast_gelu(values(2, 8).npu())


def test_a_refused_host_check_leaves_the_device_strict() -> None:
    q = values(1, 2, 4, 8).npu()
    with pytest.raises(RuntimeError, match="input_layout"):
        torch.ops.npu.npu_fusion_attention(q, q, q, 2, "NBSD")
    with pytest.raises(RuntimeError, match="has no simulated kernel"):
        torch.ops.npu.fast_gelu(values(2, 8).npu())


def test_tensors_of_two_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"gamma|device"):
        torch.ops.npu.npu_rms_norm(values(2, 8).npu(0), torch.ones(8).npu(1))


def test_fake_tensors_have_the_shapes_and_dtypes_of_the_kernels() -> None:
    from torch._subclasses import FakeTensorMode

    x = values(2, 3, 8, dtype=torch.bfloat16).npu()
    real = torch.ops.npu.npu_rms_norm(x, torch.ones(8).npu())
    with FakeTensorMode() as mode:
        fake = torch.ops.npu.npu_rms_norm(mode.from_tensor(x), torch.ones(8, device="npu"))
    assert [(t.shape, t.dtype, t.device) for t in fake] == [(t.shape, t.dtype, t.device) for t in real]
