"""Rotary functions: one per family in torchtitan 0.2.2, and flux's in both generations."""

from __future__ import annotations

import importlib
import inspect
import types

import pytest
import torch

import npu_patch
from npu_patch.adapters.torchtitan import rope_functions
from npu_patch.registry import Target, Unrecognised
from npu_patch.simulator import trace

from .generation import CURRENT, PREVIOUS, current, previous
from .models import Counts

B, L, D, P = 2, 12, 32, 40
COMPLEX, HALF = ("llama3", "llama4", "deepseek_v3"), ("qwen3", "gpt_oss")
FAMILIES = COMPLEX + HALF
SINGLE, WITHOUT_POSITIONS = ("deepseek_v3",), ("gpt_oss",)


def module_of(family):
    return importlib.import_module(f"torchtitan.models.{family}.model.model")


def cache_of(family):
    """As the family makes it; gpt_oss scales cos and sin for a context that was stretched."""
    module = module_of(family)
    if family in HALF:
        keywords = {"rope_factor": 32.0, "original_seq_len": 4096} if family == "gpt_oss" else {}
        return module.precompute_rope_cache(D, P, base=150000.0, **keywords).to("npu")
    angles = torch.outer(torch.arange(P).float(), 100.0 ** -(torch.arange(0, D, 2).float() / D))
    return torch.polar(torch.ones_like(angles), angles).to("npu")


def tensors(count=2, dtype=torch.float32, heads=(6, 2)):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(B, L, n, D, generator=generator).to("npu", dtype).requires_grad_() for n in heads[:count]]


POSITIONS = {
    "none": None,
    "one row": torch.arange(L).flip(0)[None],
    "per sample": torch.stack((torch.arange(L), torch.cat((torch.arange(5), torch.arange(7) + 21)))),
}


def positions_for(family, kind):
    return () if family in WITHOUT_POSITIONS else (None if kind == "none" else POSITIONS[kind].to("npu"),)


def kinds(family):
    return ("none",) if family in WITHOUT_POSITIONS else tuple(POSITIONS)


CASES = [(family, kind) for family in FAMILIES for kind in kinds(family)]


def step(function, inputs, *rest):
    results = function(*inputs, *rest)
    results = (results,) if len(inputs) == 1 else results
    gradients = [torch.arange(r.numel()).view_as(r).cos().to("npu", r.dtype) for r in results]
    return [*(r.detach() for r in results), *torch.autograd.grad(results, inputs, gradients)]


def exact(family, inputs, cache, kind):
    """In float64 on the CPU; the tables as the model holds them."""
    rows = cache.cpu()[torch.arange(L)[None] if kind == "none" else POSITIONS[kind]]
    if rows.is_complex():
        cos, sin = (part.double().repeat_interleave(2, -1)[:, :, None] for part in (rows.real, rows.imag))
    else:
        cos, sin = (part.double()[:, :, None] for part in rows.chunk(2, -1))

    def function(*leaves):
        def one(x):
            if rows.is_complex():
                turned = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
            else:
                turned = torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1)
            return x * cos + turned * sin

        return tuple(map(one, leaves)) if len(leaves) > 1 else one(*leaves)

    return on_cpu(function, inputs)


def on_cpu(function, inputs):
    leaves = [x.detach().cpu().double().requires_grad_() for x in inputs]
    results = function(*leaves)
    results = (results,) if len(inputs) == 1 else results
    gradients = [torch.arange(r.numel()).view_as(r).cos().to(x.dtype) for r, x in zip(results, inputs, strict=True)]
    return [*results, *torch.autograd.grad(results, leaves, [g.double() for g in gradients])]


def error(values, reference):
    return [float((a.detach().cpu().double() - b).norm() / b.norm()) for a, b in zip(values, reference, strict=True)]


def no_worse(ours, theirs, dtype):
    floor = {torch.float32: 2e-7, torch.bfloat16: 0.0}[dtype]
    return all(a <= max(1.05 * b, floor) for a, b in zip(ours, theirs, strict=True))


@previous
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_no_further_from_exact_than_the_original(family, kind, dtype):
    module, cache = module_of(family), cache_of(family)
    inputs = tensors(1 if family in SINGLE else 2, dtype)
    rest = (cache, *positions_for(family, kind))
    stock = step(module.apply_rotary_emb, inputs, *rest)
    with npu_patch.scope("rope"):
        counts = Counts()
        fused = step(module.apply_rotary_emb, inputs, *rest)
        with trace() as t:
            again = step(module.apply_rotary_emb, inputs, *rest)
        assert counts.take("rope") == (2, {})
    assert t.host_syncs == 0
    assert t.launches_by_op["npu.npu_rotary_mul"] in (2, 4)  # one or two forward, as many backward
    assert "index_select" not in t.launches_by_op  # rows were gathered the first time
    assert all(torch.equal(a, b) for a, b in zip(again, fused, strict=True))
    reference = exact(family, inputs, cache, kind)
    assert [a.dtype for a in fused] == [b.dtype for b in stock]
    assert no_worse(error(fused, reference), error(stock, reference), dtype)


@previous
@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_call_waits_for_nothing(family):
    module, cache = module_of(family), cache_of(family)
    rest = (cache, *positions_for(family, "per sample"))
    inputs = tensors(1 if family in SINGLE else 2)
    with npu_patch.scope("rope"), trace() as t:
        step(module.apply_rotary_emb, inputs, *rest)
    assert t.host_syncs == 0


@previous
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_that_a_sharded_model_casts_for_every_layer(family):
    """FSDP's mixed precision hands each layer a copy of a floating-point cache in the layer's type."""
    module, cache, inputs = module_of(family), cache_of(family), tensors(1 if family in SINGLE else 2, torch.bfloat16)
    copies = [cache.clone() if cache.is_complex() else cache.to(torch.bfloat16) for _ in range(2)]
    rest = positions_for(family, "none")
    expected = [step(module.apply_rotary_emb, inputs, copy, *rest) for copy in copies]
    with npu_patch.scope("rope"), trace() as t:
        counts = Counts()
        results = [step(module.apply_rotary_emb, inputs, copy, *rest) for copy in copies]
        assert counts.take("rope") == (2, {})
    assert t.host_syncs == 0
    for result, wanted in zip(results, expected, strict=True):
        for ours, theirs in zip(result, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=2e-2)


@previous
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_a_cache_or_positions_that_change_are_read_again(family):
    module, cache, positions = module_of(family), cache_of(family), POSITIONS["per sample"].to("npu")
    inputs = tensors()
    with npu_patch.scope("rope"):
        step(module.apply_rotary_emb, inputs, cache, positions)
        with torch.no_grad():
            cache.mul_(0.5)
            positions.copy_(positions.flip(0))
        fused = step(module.apply_rotary_emb, inputs, cache, positions)
    stock = step(module.apply_rotary_emb, inputs, cache, positions)
    for ours, theirs in zip(fused, stock, strict=True):
        torch.testing.assert_close(ours, theirs)


@previous
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_the_same_positions_and_another_cache(family):
    module, positions, inputs = module_of(family), POSITIONS["per sample"].to("npu"), tensors()
    caches = cache_of(family), cache_of(family) * 0.5
    expected = [step(module.apply_rotary_emb, inputs, cache, positions) for cache in caches]
    with npu_patch.scope("rope"):
        results = [step(module.apply_rotary_emb, inputs, cache, positions) for cache in caches]
    for result, wanted in zip(results, expected, strict=True):
        for ours, theirs in zip(result, wanted, strict=True):
            torch.testing.assert_close(ours, theirs)


@previous
def test_wrong_arguments_raise_the_original_s_error():
    module, cache, (q, k) = module_of("llama3"), cache_of("llama3"), tensors()
    wrong = [
        (q, k, cache[: L - 1], None),
        (q, k, cache[:, :-1], None),
        (q, k, cache, POSITIONS["one row"][:, :-1].to("npu")),
    ]
    for arguments in wrong:
        with pytest.raises((AssertionError, RuntimeError)) as stock:
            module.apply_rotary_emb(*arguments)
        with npu_patch.scope("rope"):
            counts = Counts()
            with pytest.raises((AssertionError, RuntimeError)) as patched:
                module.apply_rotary_emb(*arguments)
            hits, reasons = counts.take("rope")
        assert (hits, sum(reasons.values())) == (0, 1)
        assert str(patched.value) == str(stock.value)


@previous
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_that_learns_runs_the_original(family):
    module, cache = module_of(family), cache_of(family).requires_grad_()
    inputs = tensors(1 if family in SINGLE else 2)
    with npu_patch.scope("rope"):
        counts = Counts()
        result = module.apply_rotary_emb(*inputs, cache)
        assert counts.take("rope") == (0, {"gradient to the rotary cache": 1})
    first = result if family in SINGLE else result[0]
    assert torch.autograd.grad(first.sum(), cache)[0].abs().sum() > 0


@previous
@pytest.mark.parametrize("family", FAMILIES)
def test_signature_and_undo(family):
    module = module_of(family)
    original = module.apply_rotary_emb
    with npu_patch.scope("rope"):
        assert module.apply_rotary_emb is not original
        assert inspect.signature(module.apply_rotary_emb) == inspect.signature(original)
    assert module.apply_rotary_emb is original


# ---- flux ------------------------------------------------------------------------------------------------------------


def flux(dtype, generator=None):
    """q, k and the table as flux makes them: (B, L, N, D) in 0.3.0, (B, N, L, D) in 0.2.2."""
    from torchtitan.models.flux.model import layers

    ids = torch.randint(0, 9, (B, L, 3), generator=torch.Generator().manual_seed(2)).float()
    if CURRENT:
        table = layers.EmbedND(layers.EmbedND.Config(dim=D, theta=100, axes_dim=(8, 12, 12)))(ids)
    else:
        table = layers.EmbedND(D, 100, (8, 12, 12))(ids)
    q, k = tensors(2, dtype, (4, 4))
    if PREVIOUS:
        q, k = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k))
    return layers, [q, k], table.to("npu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arbitrary", [False, True])
def test_flux(dtype, arbitrary):
    layers, inputs, table = flux(dtype)
    if arbitrary:  # any 2 x 2 matrices
        table = torch.randn(table.shape, generator=torch.Generator().manual_seed(8)).to("npu")
    stock = step(layers.apply_rope, inputs, table)
    with npu_patch.scope("rope"):
        counts = Counts()
        step(layers.apply_rope, inputs, table)
        with trace() as t:
            fused = step(layers.apply_rope, inputs, table)
        assert counts.take("rope") == (2, {})
    assert t.launches_by_op["npu.npu_rotary_mul"] in (2, 4)
    assert t.host_syncs == 0
    assert "stack" not in t.launches_by_op
    matrices = table.cpu().double()

    def formula(*leaves):
        return tuple(torch.einsum("...ij,...j->...i", matrices, x.unflatten(-1, (-1, 2))).flatten(-2) for x in leaves)

    reference = on_cpu(formula, inputs)
    assert [a.dtype for a in fused] == [b.dtype for b in stock]
    assert no_worse(error(fused, reference), error(stock, reference), dtype)
    if dtype is torch.bfloat16:
        assert all(y.is_contiguous() for y in fused[:2])


@pytest.mark.parametrize("rows", [1, B])
def test_flux_s_table_of_all_samples_or_of_each(rows):
    layers, inputs, table = flux(torch.float32)
    table = table[:rows]
    stock = step(layers.apply_rope, inputs, table)
    with npu_patch.scope("rope"):
        counts = Counts()
        fused = step(layers.apply_rope, inputs, table)
        assert counts.take("rope") == (1, {})
    for ours, theirs in zip(fused, stock, strict=True):
        torch.testing.assert_close(ours, theirs)


# ---- recognition -----------------------------------------------------------------------------------------------------


def found(function, name="apply_rotary_emb"):
    module = types.ModuleType("some_module")
    function.__module__ = "some_module"
    setattr(module, name, function)
    return list(rope_functions.find(module))


def halves(x, cache):
    cos, sin = cache.chunk(2, -1)
    return x * cos + torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) * sin


def test_other_functions_are_not_taken_for_rotations():
    def wrong_sign(xq, xk, cache, positions=None):
        rows = cache[: xq.shape[1]].unsqueeze(1)
        return halves(xq, rows), halves(-xk, rows)

    def later_rows(xq, xk, cache, positions=None):
        rows = cache[1 : xq.shape[1] + 1].unsqueeze(1)
        return halves(xq, rows), halves(xk, rows)

    def ignores_positions(xq, xk, cache, positions=None):
        rows = cache[: xq.shape[1]].unsqueeze(1)
        return halves(xq, rows), halves(xk, rows)

    def drops_the_gradient(xq, xk, cache, positions=None):
        rows = cache[: xq.shape[1] if positions is None else positions].unsqueeze(-2)
        return halves(xq.detach(), rows), halves(xk, rows)

    def keyword(xq, xk, cache, *, scale=1.0):
        return xq * scale, xk

    for function in (wrong_sign, later_rows, ignores_positions, drops_the_gradient, keyword):
        (one,) = found(function)
        assert isinstance(one, Unrecognised), function
        assert one.reason


def test_a_rotation_with_other_names_is_found():
    def apply_rotary_positions(one, other, table, where=None):
        rows = table[: one.shape[1]].unsqueeze(1) if where is None else table[where].unsqueeze(2)
        return halves(one, rows.to(one.dtype)), halves(other, rows.to(other.dtype))

    (one,) = found(apply_rotary_positions, "apply_rotary_positions")
    assert isinstance(one, Target)
    assert one.meaning == "half, in the input type, rows of the table by position"


@current
def test_torchtitan_0_3_0_has_no_function_of_the_other_generation():
    from torchtitan.models.common import rope

    assert list(rope_functions.find(rope)) == []
