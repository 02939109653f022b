"""torchtitan's norm classes beside `RMSNorm`: an offset, a gain, a gate; and torch.nn.RMSNorm where models name it."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import npu_patch
from npu_patch.adapters.torchtitan import norms
from npu_patch.registry import Unrecognised
from npu_patch.simulator import trace
from tests.support import fla

from .generation import current, previous
from .models import Counts
from .test_norms import found_in

SIZE = 24
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def offset(**kwargs):
    fla.install()
    from torchtitan.models.qwen3_5.model import OffsetRMSNorm

    return OffsetRMSNorm(OffsetRMSNorm.Config(dim=SIZE, **kwargs))


def gain(center=1.0, **kwargs):
    from torchtitan.models.muse_glimmer.model import RMSGainCenterNorm

    return RMSGainCenterNorm(RMSGainCenterNorm.Config(normalized_shape=SIZE, gain_center=center, **kwargs))


def gated(**kwargs):
    fla.install()
    from torchtitan.models.qwen3_5.model import RMSNormGated

    return RMSNormGated(RMSNormGated.Config(dim=SIZE, **kwargs))


def prepared(module, dtype, weight_dtype=None):
    with torch.no_grad():
        module.weight.copy_(torch.linspace(-0.4, 0.5, SIZE))
    return module.to("npu", weight_dtype or dtype)


def tensors(dtype, count=1):
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(2, 5, 3, SIZE, generator=generator) * 2).to("npu", dtype).requires_grad_() for _ in range(count)
    ]


def step(module, *inputs):
    """Result, gradients of the inputs and of the weight."""
    y = module(*inputs)
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to("npu", y.dtype)
    return [y.detach(), *torch.autograd.grad(y, (*inputs, module.weight), gradient)]


def exact(formula, module, inputs):
    """The same from a formula in float64 on the CPU."""
    leaves = [x.detach().cpu().double().requires_grad_() for x in (*inputs, module.weight)]
    y = formula(*leaves, module.eps)
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(inputs[0].dtype).double()
    return [y.detach(), *torch.autograd.grad(y, leaves, gradient)]


def normed(x, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


FORMULAS = {
    offset: lambda x, w, eps: normed(x, eps) * (1 + w),
    gain: lambda x, w, eps: normed(x, eps) * (1 + w),
    gated: lambda x, z, w, eps: normed(x, eps) * w * nn.functional.silu(z),
}


def error(values, reference):
    return [float((a.cpu().double() - b).norm() / b.norm()) for a, b in zip(values, reference, strict=True)]


@current
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("build", FORMULAS)
def test_result_and_gradients_are_no_further_from_exact_than_the_original_s(build, dtype):
    module, inputs = prepared(build(), dtype), tensors(dtype, 2 if build is gated else 1)
    stock = step(module, *inputs)
    with npu_patch.scope("rms_norm"):
        counts = Counts()
        with trace() as t:
            fused = step(module, *inputs)
        assert counts.take("rms_norm") == (1, {})
    assert t.launches_by_op["npu.npu_rms_norm"] == t.launches_by_op["npu.npu_rms_norm_backward"] == 1
    assert t.host_syncs == 0
    reference = exact(FORMULAS[build], module, inputs)
    assert [a.dtype for a in fused] == [b.dtype for b in stock]
    floor = {torch.float32: 2e-7, torch.bfloat16: 2e-3, torch.float16: 2.5e-4}[dtype]
    for ours, theirs in zip(error(fused, reference), error(stock, reference), strict=True):
        assert ours <= max(1.05 * theirs, floor)


@current
@pytest.mark.parametrize("build", FORMULAS)
def test_a_float32_weight_beside_half_precision(build):
    module = prepared(build(), torch.bfloat16, torch.float32)
    inputs = tensors(torch.bfloat16, 2 if build is gated else 1)
    stock = step(module, *inputs)
    with npu_patch.scope("rms_norm"):
        fused = step(module, *inputs)
    for ours, theirs in zip(fused, stock, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@current
@pytest.mark.parametrize("center", [0.0, 1.0, 0.5])
def test_the_gain_is_the_instance_s(center):
    module, (x,) = prepared(gain(center), torch.float32), tensors(torch.float32)
    expected = module(x)
    with npu_patch.scope("rms_norm"):
        counts = Counts()
        torch.testing.assert_close(module(x), expected)
        assert counts.take("rms_norm") == (1, {})


@current
def test_an_offset_keeps_small_weights():
    """1 + 2^-9 is 1 in bfloat16: the sum is made in float32, as the original does."""
    module, (x,) = offset().to("npu", torch.bfloat16), tensors(torch.bfloat16)
    with torch.no_grad():
        module.weight.fill_(2.0**-8)
    without = normed(x.double().cpu(), module.eps)
    with npu_patch.scope("rms_norm"):
        ratio = module(x).double().cpu() / without
    assert float(ratio.mean()) == pytest.approx(1 + 2.0**-8, abs=1e-3)


@current
def test_gated_norms_under_the_type_checker_run_the_original(monkeypatch):
    import spmd_types

    module, inputs = prepared(gated(), torch.float32), tensors(torch.float32, 2)
    monkeypatch.setattr(spmd_types, "is_type_checking", lambda: True)
    monkeypatch.setattr("npu_patch.adapters.torchtitan.typecheck._function_modes", lambda: 1)
    with npu_patch.scope("rms_norm"):
        counts = Counts()
        module(*inputs)
        assert counts.take("rms_norm") == (0, {"spmd type checking does not know the fused operators": 1})


@current
@pytest.mark.parametrize("build", FORMULAS)
def test_signatures_are_the_original_s(build):
    cls = type(build())
    before = inspect.signature(cls.forward)
    with npu_patch.scope("rms_norm"):
        assert inspect.signature(cls.forward) == before


@current
def test_a_class_whose_forward_is_another_s_is_no_target_of_its_own():
    from torchtitan.models.common.nn_modules import RMSNorm

    class OtherNorm(RMSNorm):
        pass

    assert found_in(OtherNorm=OtherNorm) == []


def test_a_gain_that_depends_on_more_is_not_recognised():
    class SwitchedRMSNorm(nn.RMSNorm):
        def forward(self, x):
            weight = self.weight + self.gain_center if self.training else self.weight
            return nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)

    (found,) = found_in(SwitchedRMSNorm=SwitchedRMSNorm)
    assert isinstance(found, Unrecognised)


# ---- torchtitan 0.2.2 ------------------------------------------------------------------------------------------------


@previous
@pytest.mark.parametrize("eps", [1e-5, 0.25, None])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtypes", [(d, d) for d in FLOATS] + [(torch.bfloat16, torch.float32)])
def test_torch_s_class_is_replaced_while_the_models_of_0_2_2_name_it(dtypes, affine, eps):
    import torchtitan.models.llama3.model.model  # noqa: F401

    original = nn.RMSNorm.forward
    module = nn.RMSNorm(SIZE, eps=eps, elementwise_affine=affine).to("npu", dtypes[1])
    (x,) = tensors(dtypes[0])
    small = x.detach() * 1e-2  # without an epsilon it is the one of x's type or of float32: here they differ
    expected = module(small)
    with npu_patch.scope("rms_norm"):
        assert nn.RMSNorm.forward is not original
        counts = Counts()
        result = module(small)
        assert counts.take("rms_norm") == (1, {})
    assert nn.RMSNorm.forward is original
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected)


@previous
def test_other_users_of_torch_s_class_get_the_original_s_results_and_errors():
    import torchtitan.models.llama3.model.model  # noqa: F401

    class Scaled(nn.RMSNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    scaled, square = Scaled(SIZE).to("npu"), nn.RMSNorm((3, SIZE)).to("npu")
    (x,) = tensors(torch.float32)
    expected = scaled(x), square(x), nn.RMSNorm(SIZE)(x.cpu())
    with npu_patch.scope("rms_norm"):
        counts = Counts()
        result = scaled(x), square(x), nn.RMSNorm(SIZE)(x.cpu())
        hits, reasons = counts.take("rms_norm")
        with pytest.raises(RuntimeError):
            square(x[..., :2])
    assert hits == 1
    assert set(reasons) == {"the weight is not one-dimensional", "not on an NPU"}
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@previous
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_no_result_type(dtype):
    """torchtitan 0.2.2 trains under autocast on one device: x in half precision, the weight in float32."""
    import torchtitan.models.llama3.model.model  # noqa: F401

    module = nn.RMSNorm(SIZE, eps=1e-5).to("npu")
    for x in (tensors(torch.float32)[0], tensors(dtype)[0]):
        with torch.autocast("npu", dtype=dtype):
            expected = module(x)
            with npu_patch.scope("rms_norm"):
                counts = Counts()
                result = module(x)
                assert counts.take("rms_norm") == (1, {})
        assert result.dtype == expected.dtype
        torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)


@previous
def test_the_target_is_named_after_torchtitan():
    import torchtitan.models.attention as module

    (found,) = norms.find(module)
    assert found.name == "torchtitan.models.attention:torch.nn.RMSNorm.forward"
