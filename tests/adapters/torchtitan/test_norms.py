"""`RMSNorm`: the class that torchtitan names, and it alone."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import npu_patch
from npu_patch.adapters.torchtitan import norms
from npu_patch.registry import Target, Unrecognised

from .generation import current
from .models import Counts

pytestmark = current


def norm(size=16, dtype=torch.float32, **kwargs):
    from torchtitan.models.common.nn_modules import RMSNorm

    module = RMSNorm(RMSNorm.Config(normalized_shape=size, **kwargs)).to("npu", dtype)
    if module.weight is not None:
        with torch.no_grad():
            module.weight.copy_(torch.linspace(-1.5, 2.0, module.weight.numel()).view_as(module.weight))
    return module


def inputs(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to("npu", dtype)


@pytest.mark.parametrize("eps", [1e-5, 0.25, None])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weight_and_epsilon_are_the_instance_s(dtype, affine, eps):
    """Without an epsilon torch takes float32's, whatever the input's type; the rows here are small enough to tell."""
    module, x = norm(dtype=dtype, elementwise_affine=affine, eps=eps), inputs(2, 3, 16, dtype=dtype) * 1e-2
    expected = module(x)
    with npu_patch.scope("rms_norm"):
        counts = Counts()
        result = module(x)
        assert counts.take("rms_norm") == (1, {})
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected)


def test_a_norm_over_two_dimensions_stays_the_original():
    module, x = norm((3, 16)), inputs(2, 3, 16)
    bare = norm((3, 16), elementwise_affine=False)
    expected = module(x), bare(x)
    with npu_patch.scope("rms_norm"):
        counts = Counts()
        result = module(x), bare(x)
        hits, reasons = counts.take("rms_norm")
    assert hits == 0
    assert sum(reasons.values()) == 2
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def test_a_wrong_last_dimension_raises_the_original_s_error():
    module, x = norm(elementwise_affine=False), inputs(2, 8)
    with pytest.raises(RuntimeError) as stock:
        module(x)
    with npu_patch.scope("rms_norm"), pytest.raises(RuntimeError) as patched:
        module(x)
    assert str(patched.value) == str(stock.value)


def test_the_signature_is_the_original_s():
    from torchtitan.models.common.nn_modules import RMSNorm

    before = inspect.signature(RMSNorm.forward)
    with npu_patch.scope("rms_norm"):
        assert inspect.signature(RMSNorm.forward) == before
        assert list(before.parameters) == ["self", "x"]
        assert torch.equal(norm()(x=inputs(2, 16)), norm()(inputs(2, 16)))


def test_torch_s_own_class_is_never_written_to():
    original, module = nn.RMSNorm.forward, nn.RMSNorm(16).to("npu")
    with npu_patch.scope("rms_norm"):
        norm()(inputs(2, 16))
        assert nn.RMSNorm.forward is original
        counts = Counts()
        module(inputs(2, 16))
        assert counts.take("rms_norm") == (0, {})


def test_a_tensor_subclass_runs_the_original():
    class Marked(torch.Tensor):
        pass

    module = norm()
    with npu_patch.scope("rms_norm"):
        counts = Counts()
        module(inputs(2, 16).as_subclass(Marked))
        hits, reasons = counts.take("rms_norm")
    assert hits == 0
    assert list(reasons) == ["Marked is not a plain tensor"]


def test_type_checking_runs_the_original(monkeypatch):
    import spmd_types

    monkeypatch.setattr(spmd_types, "is_type_checking", lambda: True)
    monkeypatch.setattr("npu_patch.adapters.torchtitan.typecheck._function_modes", lambda: 1)
    with npu_patch.scope("rms_norm"):
        counts = Counts()
        norm()(inputs(2, 16))
        assert counts.take("rms_norm") == (0, {"spmd type checking does not know the fused operators": 1})


def test_a_forward_on_the_cpu_runs_the_original():
    module, x = norm().to("cpu"), inputs(2, 16).to("cpu")
    with npu_patch.scope("rms_norm"):
        result = module(x)
    assert torch.equal(result, F.rms_norm(x, (16,), module.weight, module.eps))


def found_in(**classes):
    """What the finder makes of a module that has these classes."""
    import types

    module = types.ModuleType("some_module")
    for name, cls in classes.items():
        cls.__module__, cls.__qualname__, cls.__name__ = "some_module", name, name
        setattr(module, name, cls)
    return list(norms.find(module))


def test_a_norm_with_another_gamma_is_not_taken_for_a_plain_one():
    class GainRMSNorm(nn.RMSNorm):
        def forward(self, x):
            return F.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)

    class CenteredRMSNorm(nn.RMSNorm):
        def forward(self, x):
            return super().forward(x - x.mean(-1, keepdim=True))

    for cls in (GainRMSNorm, CenteredRMSNorm):
        (found,) = found_in(**{cls.__name__: cls})
        assert isinstance(found, Unrecognised)
        assert found.reason


def test_a_plain_norm_under_any_name_is_found():
    class OurRMSNorm(nn.RMSNorm):
        pass

    (found,) = found_in(OurRMSNorm=OurRMSNorm)
    assert isinstance(found, Target)
