"""Single calls of patched norms: dtypes, weights, conditions, and when the original runs."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from npu_patch.adapters.transformers import norms
from npu_patch.registry import Target, Unrecognised

from ...support.numerics import relative_error
from .call import found, patched

FULL, HALVES = torch.float32, (torch.bfloat16, torch.float16)
PAIRS = [(FULL, FULL)] + [pair for half in HALVES for pair in ((half, half), (half, FULL), (FULL, half))]


class Norm(nn.Module):
    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter((torch.randn(size, generator=generator) * 0.5 + 0.2).to(dtype).to("npu"))
        self.eps = 1e-5


class MineRMSNorm(Norm):
    def forward(self, hidden_states):
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(hidden_states.dtype)


class OffsetRMSNorm(Norm):
    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return (self._norm(x.float()) * (1.0 + self.weight.float())).type_as(x)


class WideRMSNorm(Norm):
    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).type_as(x)


class ScaledRMSNorm(Norm):
    def __init__(self, size: int, dtype: torch.dtype = torch.float32, with_scale: bool = True) -> None:
        super().__init__(size, dtype)
        self.with_scale = with_scale
        if not with_scale:
            del self.weight

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        if self.with_scale:
            y = y * self.weight.float()
        return y.type_as(x)


def inputs(shape, dtype, seed=2):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype).to("npu").requires_grad_()


def gradients(function, module, x):
    y = function(module, x)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype).to("npu")
    wanted = [x, *module.parameters()]
    return y.detach(), torch.autograd.grad(y, wanted, g)


@pytest.mark.parametrize("cls", [MineRMSNorm, OffsetRMSNorm, WideRMSNorm, ScaledRMSNorm])
@pytest.mark.parametrize(("x_dtype", "w_dtype"), PAIRS)
def test_result_and_gradients_have_the_originals_dtype_and_value(cls, x_dtype, w_dtype):
    forward, site, original = patched(norms.find, cls.__name__, cls)
    module, x = cls(24, w_dtype), inputs((2, 5, 24), x_dtype)
    (stock, stock_gradients), (fused, fused_gradients) = (gradients(f, module, x) for f in (original, forward))
    assert (site.hits, site.fallbacks) == (1, {})
    assert fused.dtype is stock.dtype
    room = 2e-6 if {x_dtype, w_dtype} == {torch.float32} else 1e-2
    assert relative_error(fused, stock) < room
    for ours, theirs in zip(fused_gradients, stock_gradients, strict=True):
        assert ours.dtype is theirs.dtype
        assert relative_error(ours, theirs) < room


@pytest.mark.parametrize("shape", [(7, 24), (2, 5, 24), (2, 3, 5, 24), (1, 24)])
def test_queries_and_keys_with_heads_before_or_after_tokens(shape):
    forward, site, original = patched(norms.find, "MineRMSNorm", MineRMSNorm)
    module, x = MineRMSNorm(24), inputs(shape, torch.float32)
    for view in [x, x.transpose(1, 2)] if len(shape) == 4 else [x]:
        stock, fused = original(module, view), forward(module, view)
        assert fused.stride() == stock.stride()
        assert relative_error(fused, stock) < 2e-6
    assert not site.fallbacks


def test_a_zero_weight_means_zero_for_llama_and_one_for_gemma():
    for cls, expected in ((MineRMSNorm, 0.0), (OffsetRMSNorm, 1.0)):
        forward, site, _ = patched(norms.find, cls.__name__, cls)
        module = cls(8)
        nn.init.zeros_(module.weight)
        y = forward(module, torch.ones(3, 8, device="npu") * 5)
        assert torch.allclose(y.cpu(), torch.full((3, 8), expected), atol=1e-5)
        assert site.hits == 1


def test_a_small_bfloat16_offset_is_not_lost_in_the_sum():
    forward, site, _ = patched(norms.find, "OffsetRMSNorm", OffsetRMSNorm)
    module = OffsetRMSNorm(8, torch.bfloat16)
    nn.init.constant_(module.weight, 2.0**-8)  # 1 + 2**-8 is 1 in bfloat16
    x = torch.full((4, 8), 3.0, device="npu", dtype=torch.bfloat16)
    bare = torch.full((4, 8), 256.0, device="npu", dtype=torch.float32)
    module.eps = 0.0
    assert torch.equal(forward(module, bare).cpu(), torch.full((4, 8), 1.0 + 2.0**-8))
    assert forward(module, x).dtype is torch.bfloat16
    assert site.hits == 2


def test_a_norm_with_a_scale_and_one_without_live_in_one_model():
    forward, site, original = patched(norms.find, "ScaledRMSNorm", ScaledRMSNorm)
    x = inputs((3, 8), torch.bfloat16)
    for with_scale in (True, False):
        module = ScaledRMSNorm(8, torch.bfloat16, with_scale)
        assert relative_error(forward(module, x), original(module, x)) < 1e-2
    assert (site.hits, site.fallbacks) == (2, {})


def test_an_instance_that_meets_no_condition_runs_the_original():
    forward, site, original = patched(norms.find, "ScaledRMSNorm", ScaledRMSNorm)
    module, x = ScaledRMSNorm(8), inputs((3, 8), torch.float32)
    module.with_scale = 1.0  # true, but not a value that was tried
    assert torch.equal(forward(module, x), original(module, x))
    assert site.hits == 0
    assert sum(site.fallbacks.values()) == 1


def test_a_subclass_that_overrides_a_method_runs_the_original():
    forward, site, original = patched(norms.find, "OffsetRMSNorm", OffsetRMSNorm)

    class Centred(OffsetRMSNorm):
        def _norm(self, x):
            return super()._norm(x - x.mean(-1, keepdim=True))

    class Sharded(OffsetRMSNorm):  # as FSDP2 makes them
        pass

    x = inputs((3, 8), torch.float32)
    assert torch.equal(forward(Centred(8), x), original(Centred(8), x))
    assert site.fallbacks == {"Centred overrides _norm": 1}
    forward(Sharded(8), x)
    assert site.hits == 1


def test_a_weight_that_another_library_took_away_runs_the_original():
    forward, site, original = patched(norms.find, "WideRMSNorm", WideRMSNorm)
    module, x = WideRMSNorm(8), inputs((3, 8), torch.float32)
    module.weight = nn.Parameter(torch.empty(0, device="npu"))  # a partitioned parameter's shell
    for function in (original, forward):
        with pytest.raises(RuntimeError):
            function(module, x)
    assert site.fallbacks == {"the weight is empty": 1}
    module.weight = None
    with pytest.raises(AttributeError):
        forward(module, x)
    assert site.fallbacks["no weight"] == 1


def test_other_devices_dtypes_and_transforms_run_the_original():
    forward, site, original = patched(norms.find, "MineRMSNorm", MineRMSNorm)
    module, x = MineRMSNorm(8), inputs((3, 8), torch.float32)
    on_cpu = MineRMSNorm(8).cpu()
    assert torch.equal(forward(on_cpu, x.cpu()), original(on_cpu, x.cpu()))
    double = MineRMSNorm(8, torch.float64).cpu()
    assert torch.equal(forward(double, x.cpu().double()), original(double, x.cpu().double()))
    assert torch.allclose(torch.vmap(lambda row: forward(module, row))(x), original(module, x))
    assert site.hits == 0
    assert sum(site.fallbacks.values()) == 3


def test_a_very_wide_norm_is_computed_right():
    forward, site, original = patched(norms.find, "MineRMSNorm", MineRMSNorm)
    module, x = MineRMSNorm(53248), inputs((2, 53248), torch.float32)
    assert relative_error(forward(module, x), original(module, x)) < 2e-6
    assert site.hits + sum(site.fallbacks.values()) == 1


def test_the_signature_is_the_originals():
    forward, _, original = patched(norms.find, "MineRMSNorm", MineRMSNorm)
    assert inspect.signature(forward) == inspect.signature(original)
    module, x = MineRMSNorm(8), inputs((3, 8), torch.float32)
    assert torch.equal(forward(module, hidden_states=x), forward(module, x))


def test_epsilon_is_read_at_each_call():
    forward, _, original = patched(norms.find, "MineRMSNorm", MineRMSNorm)
    module, x = MineRMSNorm(8), inputs((3, 8), torch.float32) * 1e-3
    module.eps = 1e-2
    assert relative_error(forward(module, x), original(module, x)) < 2e-6


class BorrowedRMSNorm(nn.RMSNorm):
    """Its forward is torch's, which nobody else's modules may lose."""


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("eps", [1e-5, None])
def test_a_norm_that_borrows_torchs_forward(affine, eps):
    forward, site, original = patched(norms.find, "BorrowedRMSNorm", BorrowedRMSNorm)
    module = BorrowedRMSNorm(24, eps=eps, elementwise_affine=affine).to("npu")
    for dtype in (torch.float32, torch.bfloat16):
        x = inputs((3, 24), dtype) * 1e-3
        stock, fused = original(module.to(dtype), x), forward(module.to(dtype), x)
        assert fused.dtype is stock.dtype
        assert relative_error(fused, stock) < (2e-6 if dtype is torch.float32 else 1e-2)
    assert (site.hits, site.fallbacks) == (2, {})


@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_over_more_than_the_last_dimension_runs_the_original(affine):
    forward, site, original = patched(norms.find, "BorrowedRMSNorm", BorrowedRMSNorm)
    module = BorrowedRMSNorm((4, 24), elementwise_affine=affine).to("npu")
    x = inputs((3, 4, 24), torch.float32)
    assert torch.equal(forward(module, x), original(module, x))
    assert (site.hits, sum(site.fallbacks.values())) == (0, 1)


def test_an_epsilon_that_is_no_number_runs_the_original():
    forward, site, original = patched(norms.find, "MineRMSNorm", MineRMSNorm)
    module, x = MineRMSNorm(8), inputs((3, 8), torch.float32)
    module.eps = torch.tensor(1e-5, device="npu")
    assert torch.equal(forward(module, x), original(module, x))
    assert site.fallbacks == {"epsilon is not a number": 1}


def test_the_forward_of_an_inherited_target_is_left_to_it():
    class ChildRMSNorm(MineRMSNorm):
        pass

    targets = found(norms.find, MineRMSNorm=MineRMSNorm, ChildRMSNorm=ChildRMSNorm)
    assert list(targets) == ["MineRMSNorm.forward"]


def test_what_calls_itself_an_rms_norm_and_is_none_is_reported():
    class GatedRMSNorm(nn.Module):
        def forward(self, x, gate):
            return x * gate

    class LayerNorm(nn.Module):
        def forward(self, x):
            return x - x.mean(-1, keepdim=True)

    targets = found(norms.find, GatedRMSNorm=GatedRMSNorm, LayerNorm=LayerNorm, SomeNorm=WideRMSNorm)
    assert isinstance(targets["GatedRMSNorm.forward"], Unrecognised)
    assert targets["GatedRMSNorm.forward"].reason == "computes no known norm"
    assert "LayerNorm.forward" not in targets
    assert isinstance(targets["SomeNorm.forward"], Target)  # by what it computes, whatever its name
