"""Layouts are those that a signature names, or that a run shows: the packed one of a later torchtitan works, too."""

from __future__ import annotations

import contextlib
import sys
import textwrap
import types

import pytest
import torch

from npu_patch.adapters.torchtitan import attention, layouts
from npu_patch.registry import Target
from npu_patch.simulator import trace
from npu_patch.sites import Site
from tests.support.numerics import relative_error

from .stand_ins import attend, documents_seen

LATER = textwrap.dedent("""
    from typing import NamedTuple

    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
    from torch.nn.attention.varlen import varlen_attn


    class VarlenMetadata(NamedTuple):
        cu_seq_q: torch.Tensor
        cu_seq_k: torch.Tensor
        max_q: int
        max_k: int
        cu_seq_q_host: tuple | None = None


    class VarlenAttention(nn.Module):
        window_size = (-1, 0)

        def forward(self, q_TNH, k_TNH, v_TNH, *, attention_masks, scale=None, out_transform=None, **kwargs):
            m = attention_masks
            extra = {"return_aux": True} if out_transform is not None else {}
            result = varlen_attn(
                q_TNH.to(torch.bfloat16), k_TNH.to(torch.bfloat16), v_TNH.to(torch.bfloat16),
                m.cu_seq_q, m.cu_seq_k, m.max_q, m.max_k, scale=scale, window_size=self.window_size, **extra,
            )
            if out_transform is None:
                return result.to(q_TNH.dtype)
            return out_transform(result[0].to(q_TNH.dtype), result[1].transpose(0, 1))


    class FlexAttention(nn.Module):
        def forward(
            self, q_TNH, k_TNH, v_TNH, *, attention_masks, score_mod=None, scale=None, enable_gqa=False,
            out_transform=None, **kwargs,
        ):
            raise AssertionError("needs a compiler")


    class ScaledDotProductAttention(nn.Module):
        def forward(
            self, q_TNH, k_TNH, v_TNH, *, attention_masks=None, scale=None, enable_gqa=False, is_causal=True, **kwargs
        ):
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_TNH, k_TNH, v_TNH))
            out = F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=is_causal, enable_gqa=enable_gqa)
            return out.squeeze(0).transpose(0, 1)


    class Other(nn.Module):
        def forward(self, q_XYZ, k_XYZ, v_XYZ, *, attention_masks, score_mod=None, scale=None, enable_gqa=False,
                    out_transform=None, **kwargs):
            return q_XYZ


    class Twice(nn.Module):
        def forward(self, q_TNH, k_TNH, v_TNH, *, attention_masks=None, scale=None, enable_gqa=False, is_causal=True):
            out = F.scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in (q_TNH, k_TNH, v_TNH)), scale=scale, is_causal=is_causal,
                enable_gqa=enable_gqa,
            )
            return 2 * out.transpose(0, 1)
""")
T, D = 48, 16
ENDS = (0, 7, 8, 30, 48)


@pytest.fixture
def later(monkeypatch):
    module = types.ModuleType("torchtitan.models.later")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(LATER, "later.py", "exec"), vars(module))
    return module


@contextlib.contextmanager
def installed(module, name):
    """A class of the module with the adapter in place; gives the counters."""
    target = next(t for t in attention.find(module) if t.path == f"{name}.forward")
    assert isinstance(target, Target), target
    cls = getattr(module, name)
    original = cls.forward
    site = Site(target.name, target.op, {"dense_mask_limit": 8192})
    from npu_patch.functions import clone

    cls.forward = clone(target.adapter(original, site), original)
    try:
        yield site
    finally:
        cls.forward = original


def qkv(dtype=torch.float32):
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(T, n, D, generator=generator).to("npu", dtype).requires_grad_() for n in (4, 2, 2)]


def check(ours, tensors, seen, most, scale=None, transform=None):
    """Output and gradients against the formula in float64."""
    leaves = [x.detach().cpu().double().requires_grad_() for x in tensors]
    out, lse = attend(*(x.transpose(0, 1) for x in leaves), seen, scale)
    out, lse = out.transpose(0, 1), lse.transpose(0, 1)
    theirs = out if transform is None else transform(out, lse)
    assert ours.shape == theirs.shape
    assert relative_error(ours, theirs) < most
    gradients = torch.autograd.grad(ours.sin().sum(), tensors), torch.autograd.grad(theirs.sin().sum(), leaves)
    assert all(relative_error(a, b) < most for a, b in zip(*gradients, strict=True))


def with_lse(out, lse):
    assert lse.shape == out.shape[:2]
    return out * torch.sigmoid(lse - 0.3).unsqueeze(-1).to(out.dtype)


def lengths():
    return torch.tensor(ENDS, dtype=torch.int32).npu()


@pytest.mark.parametrize("transform", [None, with_lse])
def test_packed_documents(later, transform):
    ends = lengths()
    metadata, tensors = later.VarlenMetadata(ends, ends, T, T, ENDS), qkv()
    with installed(later, "VarlenAttention") as site, trace() as t:
        module = later.VarlenAttention()
        out = module(
            q_TNH=tensors[0], k_TNH=tensors[1], v_TNH=tensors[2], attention_masks=metadata, enable_gqa=True,
            out_transform=transform,
        )  # fmt: skip
    assert (site.hits, site.fallbacks) == (1, {})
    assert t.host_syncs == 0  # the metadata know the ends on the host
    assert out.dtype is torch.float32
    check(out, tensors, documents_seen(ends, ends, (-1, 0)), 2e-2, transform=transform)


@pytest.mark.parametrize("transform", [None, with_lse])
@pytest.mark.parametrize("causal", [True, False])
def test_packed_flex_attention(later, causal, transform):
    from torch.nn.attention.flex_attention import create_block_mask

    document = torch.bucketize(torch.arange(T), torch.tensor(ENDS[1:]), right=True)
    on_device = document.npu()

    def mod(b, h, q, kv):
        same = on_device[q] == on_device[kv]
        return same & (q >= kv) if causal else same

    masks, tensors = create_block_mask(mod, 1, None, T, T, device="npu", BLOCK_SIZE=16), qkv()
    with installed(later, "FlexAttention") as site, trace() as t:
        module = later.FlexAttention()
        out = module(*tensors, attention_masks=masks, enable_gqa=True, scale=0.3, out_transform=transform)
    assert (site.hits, site.fallbacks) == (1, {})
    assert t.launches_by_op["npu.npu_fusion_attention"] == 1
    check(out, tensors, documents_seen(lengths(), lengths(), (-1, 0 if causal else -1)), 1e-5, 0.3, transform)


@pytest.mark.parametrize("is_causal", [True, False])
def test_packed_plain_attention(later, is_causal):
    tensors = qkv()
    with installed(later, "ScaledDotProductAttention") as site:
        out = later.ScaledDotProductAttention()(*tensors, enable_gqa=True, is_causal=is_causal)
    assert (site.hits, site.fallbacks) == (1, {})
    seen = torch.ones(T, T, dtype=torch.bool)
    check(out, tensors, seen.tril() if is_causal else seen, 1e-5)


def test_tensors_of_another_layout_run_the_original(later):
    q, k, v = (x.unsqueeze(0) for x in qkv())
    with installed(later, "FlexAttention") as site, pytest.raises(AssertionError, match="needs a compiler"):
        later.FlexAttention()(q, k, v, attention_masks=None, enable_gqa=True)
    assert site.fallbacks == {"query is not TNH": 1}


def test_what_is_unknown_is_left_alone(later):
    found = {target.path: target for target in attention.find(later)}
    assert "Other.forward" not in found
    assert not isinstance(found["Twice.forward"], Target)
    assert set(found) == {
        "VarlenAttention.forward",
        "FlexAttention.forward",
        "ScaledDotProductAttention.forward",
        "Twice.forward",
    }


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("window_size=self.window_size", "window_size=(self.window_size[0] + 1, 0)", "its window is not known"),
        ("scale=scale, window", "scale=0.5, window", "does more than varlen_attn"),
        ("return result.to(q_TNH.dtype)", "return 2 * result.to(q_TNH.dtype)", "does more than varlen_attn"),
        ("result[1].transpose(0, 1))", "result[1].transpose(0, 1) + 1)", "hands its out_transform something unknown"),
        ("m.cu_seq_q, m.cu_seq_k", "m.cu_seq_q + 0, m.cu_seq_k", "does more than varlen_attn"),
    ],
)
def test_a_forward_that_does_more_is_not_recognised(later, old, new, reason):
    assert old in LATER
    exec(compile(LATER.replace(old, new), "later.py", "exec"), vars(later))
    found = {target.path: target for target in attention.find(later)}
    assert getattr(found["VarlenAttention.forward"], "reason", None) == reason


def test_names_of_layouts():
    assert layouts.named(["q_BLNH", "k_BLNH", "v_BLNH"]) is layouts.BLNH
    assert layouts.named(["xq_TNH", "xk_TNH", "xv_TNH"]) is layouts.TNH
    assert layouts.named(["q_BLNH", "k_TNH", "v_BLNH"]) is None
    assert layouts.named(["q_XY", "k_XY", "v_XY"]) is None
    assert layouts.named(["q", "k", "v"]) is None


def test_a_probe_leaves_no_trace(later):
    before = dict(vars(later)), {name: dict(vars(cls)) for name, cls in vars(later).items() if isinstance(cls, type)}
    list(attention.find(later))
    assert (dict(vars(later)), {n: dict(vars(c)) for n, c in vars(later).items() if isinstance(c, type)}) == before


class Sharded(torch.Tensor):
    """As context parallelism hands DTensors to plain attention: it has other ranks' keys to fetch."""


@pytest.mark.parametrize("name", ["ScaledDotProductAttention", "FlexAttention"])
def test_tensors_that_are_more_than_they_look_run_the_original(later, name):
    tensors = [x.detach().as_subclass(Sharded) for x in qkv()]
    with installed(later, name) as site, contextlib.suppress(AssertionError):
        getattr(later, name)()(*tensors, attention_masks=None, enable_gqa=True)
    assert (site.hits, site.fallbacks) == (0, {"Sharded is not a plain tensor": 1})


def test_somebody_else_s_attention_function_runs(later, monkeypatch):
    tensors, calls = qkv(), []
    genuine = torch.nn.functional.scaled_dot_product_attention

    def ring(*args, **kwargs):
        calls.append(args)
        return genuine(*args, **kwargs)

    with installed(later, "ScaledDotProductAttention") as site:
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", ring)
        later.ScaledDotProductAttention()(*tensors, enable_gqa=True)
    assert len(calls) == 1
    assert site.fallbacks == {"scaled_dot_product_attention is somebody else's, as in context parallelism": 1}
