"""Rotary classes beside those of 0.3.0: sections of positions, packed tokens, one tensor; tables in the input type."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

import npu_patch
from npu_patch import functions
from npu_patch.adapters.torchtitan import rope
from npu_patch.registry import Target, Unrecognised
from npu_patch.simulator import trace
from npu_patch.sites import Site
from tests.support import fla

from .generation import current
from .models import Counts, packed_positions, plain_positions
from .test_rope import B, D, L, pair, rotary, run

# ---- tables in the input's type --------------------------------------------------------------------------------------


@pytest.fixture
def input_tables():
    npu_patch.configure("rope", tables="input")
    yield
    npu_patch.configure("rope", tables="float32")


@current
@pytest.mark.parametrize("name", ["ComplexRoPE", "CosSinRoPE"])
def test_rounded_tables_need_fewer_launches(name, input_tables):
    module, (q, k) = rotary(name), pair(torch.bfloat16)
    positions = packed_positions((12,), (3, 9))
    launches = {}
    with npu_patch.scope("rope"):
        for tables in ("input", "float32"):
            npu_patch.configure("rope", tables=tables)
            run(module, q, k, positions)
            with trace() as t:
                counts = Counts()
                run(module, q, k, positions)
                assert counts.take("rope") == (1, {})
            launches[tables] = t.launches
            assert t.host_syncs == 0
            assert t.launches_by_op["npu.npu_rotary_mul"] == {"input": 4, "float32": 2}[tables]
    assert launches["input"] <= launches["float32"] - 6, launches


@current
@pytest.mark.parametrize("name", ["ComplexRoPE", "CosSinRoPE"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_tables_give_the_formula_with_rounded_tables(name, dtype, input_tables):
    module, (q, k) = rotary(name), pair(dtype)
    positions = packed_positions((12,), (3, 9))
    with npu_patch.scope("rope"):
        result = module(q, k, positions)
    rows = module.cache.cpu()[positions.cpu()].unsqueeze(2)
    if name == "ComplexRoPE":
        cos, sin = (part.repeat_interleave(2, -1).to(dtype).double() for part in (rows.real, rows.imag))
    else:
        cos, sin = (part.to(dtype).double() for part in rows.chunk(2, -1))
    for y, x in zip(result, (q, k), strict=True):
        x = x.detach().cpu().double()
        if name == "ComplexRoPE":
            turned = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
        else:
            turned = torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1)
        assert y.dtype == dtype
        # Three roundings at most: of two products and of their sum.
        room = 2 * torch.finfo(dtype).eps * ((x * cos).abs() + (turned * sin).abs())
        assert bool(((y.detach().cpu().double() - (x * cos + turned * sin)).abs() <= room + 1e-9).all())


@current
def test_query_and_key_of_two_types_are_rotated_in_float32(input_tables):
    module, (q, k) = rotary("ComplexRoPE"), pair()
    q, k = q.detach().to(torch.bfloat16), k.detach()
    expected = module(q, k, plain_positions(B, L))
    with npu_patch.scope("rope"):
        counts = Counts()
        result = module(q, k, plain_positions(B, L))
        assert counts.take("rope") == (1, {})
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=8e-3, atol=2e-6)


@current
def test_float32_models_are_as_exact_with_the_option(input_tables):
    module, (q, k) = rotary("CosSinRoPE"), pair()
    positions = packed_positions((12,), (3, 9))
    expected = run(module, q, k, positions)
    with npu_patch.scope("rope"):
        result = run(module, q, k, positions)
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)


@current
def test_switching_the_option_holds_from_the_next_call(input_tables):
    module, (q, k) = rotary("ComplexRoPE"), pair(torch.bfloat16)
    positions = packed_positions((12,), (3, 9))
    seen = []
    with npu_patch.scope("rope"):
        for tables in ("float32", "input", "float32"):
            npu_patch.configure("rope", tables=tables)
            with trace() as t:
                module(q.detach(), k.detach(), positions)
            seen.append(t.launches_by_op["npu.npu_rotary_mul"])
    assert seen == [1, 2, 1]


def test_the_option_is_off_by_default_and_known_to_the_variable():
    from npu_patch.settings import SettingsError, parse_ops

    assert npu_patch.strategy()["rope"]["tables"] == "float32"
    assert parse_ops("rope:tables=input").options == {"rope": {"tables": "input"}}
    with pytest.raises(SettingsError, match="'float32' or 'input'"):
        npu_patch.configure("rope", tables="bfloat16")


# ---- sections of time, height and width ------------------------------------------------------------------------------


def mrope(dim=D, rows=64):
    fla.install()
    from torchtitan.models.qwen3_5.rope import MRoPE

    return MRoPE(MRoPE.Config(dim=dim, max_seq_len=rows, theta=100.0, mrope_section=[dim // 2 - 5, 3, 2])).to("npu")


def sections():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 64, (B, L, 3), generator=generator).to("npu")


MROPE = {"text": lambda: packed_positions((12,), (3, 9)), "sections": sections, "none": lambda: None}


@current
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MROPE)
def test_positions_of_text_and_of_images(kind, dtype):
    module, (q, k), positions = mrope(), pair(dtype), MROPE[kind]()
    expected = run(module, q, k, positions)
    with npu_patch.scope("rope"):
        counts = Counts()
        result = run(module, q, k, positions)
        assert counts.take("rope") == (1, {})
    for ours, theirs in zip(result, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-6 if dtype is torch.float32 else 8e-3, atol=4e-6)


@current
def test_layers_share_the_rows_of_text_positions():
    layers, (q, k) = [mrope() for _ in range(3)], pair()
    with npu_patch.scope("rope"):
        for layer in layers:
            layer(q, k, packed_positions((12,), (3, 9)))
        positions = packed_positions((3, 9), (12,))
        with trace() as t:
            for layer in layers:
                run(layer, q, k, positions)
    assert t.host_syncs == 1
    assert t.launches_by_op["index_select"] == 3


@current
def test_layers_share_the_rows_of_sections():
    layers, (q, k) = [mrope() for _ in range(3)], pair()
    with npu_patch.scope("rope"):
        for layer in layers:
            layer(q, k, sections())
        positions = sections()
        with trace() as first:
            run(layers[0], q, k, positions)
        with trace() as others:
            for layer in layers[1:]:
                run(layer, q, k, positions)
    assert first.launches_by_op["index"] > 0
    gradients = {"arange": 4, "cos": 4}  # those that `run` makes up
    assert others.launches_by_op == {"npu.npu_rotary_mul": 8, **gradients}
    assert others.host_syncs == 0


@current
def test_layers_of_other_sections_or_other_tables_have_rows_of_their_own():
    fla.install()
    from torchtitan.models.qwen3_5.rope import MRoPE

    first, other = mrope(), MRoPE(MRoPE.Config(dim=D, max_seq_len=64, theta=100.0, mrope_section=[D // 2 - 3, 1, 2]))
    last = mrope()
    last.cache.mul_(1.5)
    layers, (q, k), positions = (first, other.to("npu"), last, mrope()), pair(), sections()
    expected = [run(layer, q, k, positions) for layer in layers]
    with npu_patch.scope("rope"):
        result = [run(layer, q, k, positions) for layer in layers]
    for one, two in zip(result, expected, strict=True):
        for ours, theirs in zip(one, two, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=6e-6)


@current
def test_sections_outside_of_the_tables_are_refused_as_ever():
    module, (q, k), positions = mrope(rows=32), pair(), sections()
    positions[1, 2, 1] = 32
    with npu_patch.scope("rope"), pytest.raises(RuntimeError, match="position"):
        module(q, k, positions)


@current
def test_a_part_of_each_head():
    """qwen3_5 hands over the first channels of query and key, views with the strides of the whole heads."""
    module, (q, k) = mrope(16), pair(torch.bfloat16, size=32)
    positions = packed_positions((12,), (3, 9))

    def part(q, k, positions):
        return tuple(
            torch.cat((y, x[..., 16:]), -1)
            for x, y in zip((q, k), module(q[..., :16], k[..., :16], positions), strict=True)
        )

    expected = run(part, q, k, positions)
    with npu_patch.scope("rope"):
        counts = Counts()
        result = run(part, q, k, positions)
        assert counts.take("rope") == (1, {})
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=8e-3, atol=2e-6)


@current
@pytest.mark.parametrize("name", ["ComplexRoPE", "CosSinRoPE"])
def test_a_rotation_that_is_handed_on_is_looked_up_when_it_is(name):
    """Vision encoders hand `cls.apply_rotary_emb` to every block, with one table (N, P, 1, width) for all of them."""
    from torchtitan.models.common import rope as module

    cls, (q, k) = getattr(module, name), pair(torch.bfloat16)
    cache = rotary(name).cache[packed_positions((12,), (3, 9))].unsqueeze(2)
    expected = run(lambda q, k, c: cls.apply_rotary_emb(q, k, c), q, k, cache)
    with npu_patch.scope("rope"):
        counts = Counts()
        rope_apply = cls.apply_rotary_emb
        run(rope_apply, q, k, cache)
        with trace() as t:
            result = run(rope_apply, q, k, cache)
        assert counts.take("rope") == (2, {})
    assert t.host_syncs == 0
    assert t.launches_by_op["npu.npu_rotary_mul"] == 2
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=8e-3, atol=2e-6)


# ---- packed tokens: (T, N, D), as later versions lay them out --------------------------------------------------------


class Packed(nn.Module):
    """A rotary class with rows (T, 1, width) for tokens of all samples; halves."""

    def __init__(self, cache):
        super().__init__()
        self.register_buffer("cache", cache, persistent=False)

    def _reshape_cache(self, query, positions=None):
        rows = self.cache[: query.shape[0]] if positions is None else self.cache[positions]
        return rows.view(query.shape[0], 1, -1)

    @staticmethod
    def apply_rotary_emb(query, key, rope_cache):
        def one(x):
            cos, sin = rope_cache.chunk(2, -1)
            wide = x.float()
            first, second = wide.chunk(2, -1)
            return (wide * cos + torch.cat((-second, first), -1) * sin).type_as(x)

        return one(query), one(key)

    def forward(self, query, key, positions=None):
        return self.apply_rotary_emb(query, key, self._reshape_cache(query, positions))


class Undoable(Packed):
    """The same in complex numbers, whose key may be missing, and which can turn back."""

    @staticmethod
    def apply_rotary_emb(query, key, rope_cache, *, inverse=False):
        table = rope_cache.conj() if inverse else rope_cache

        def one(x):
            pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * table).flatten(-2).type_as(x)

        return one(query) if key is None else (one(query), one(key))

    def forward(self, query, key=None, positions=None, *, inverse=False):
        return self.apply_rotary_emb(query, key, self._reshape_cache(query, positions), inverse=inverse)


class Shifted(Packed):
    def _reshape_cache(self, query, positions=None):
        return super()._reshape_cache(query, None if positions is None else (positions + 1) % self.cache.shape[0])


@pytest.fixture
def installed():
    """Puts the targets of a class in place, by hand; gives their sites by name."""
    undo = []

    def install(cls, **options):
        module = types.ModuleType("some_module")
        module.Rotary, cls.__module__ = cls, "some_module"
        sites, found = {}, list(rope.find(module))
        for target in found:
            name = target.path.partition(".")[2]
            if isinstance(target, Unrecognised):
                sites[name] = target.reason
                continue
            raw = next(vars(owner)[name] for owner in cls.__mro__ if name in vars(owner))
            original = getattr(raw, "__func__", raw)
            site = sites[name] = Site(target.name, "rope", {"tables": "float32", **options})
            fused = functions.clone(target.adapter(original, site), original)
            undo.append((cls, name, vars(cls).get(name)))
            setattr(cls, name, staticmethod(fused) if isinstance(raw, staticmethod) else fused)
        assert all(isinstance(one, (Target, Unrecognised)) for one in found)
        return sites

    yield install
    for cls, name, own in undo:
        delattr(cls, name) if own is None else setattr(cls, name, own)


T = B * L


def tokens(dtype, count=2):
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(T, n, D, generator=generator).to("npu", dtype).requires_grad_() for n in (4, 2)[:count]]


def packed(cls):
    width = 2 * D if cls is not Undoable else D // 2
    generator = torch.Generator().manual_seed(8)
    cache = torch.randn(40, width, generator=generator)
    return cls(torch.polar(torch.ones_like(cache), cache) if cls is Undoable else cache).to("npu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("cls", [Packed, Undoable])
def test_packed_tokens(cls, given, dtype, installed):
    module, (q, k) = packed(cls), tokens(dtype)
    positions = torch.cat((torch.arange(15), torch.arange(9))).to("npu") if given else None
    expected = run(module, q, k, positions)
    sites = installed(cls)
    run(module, q, k, positions)
    with trace() as t:
        result = run(module, q, k, positions)
    assert (sites["forward"].hits, sites["apply_rotary_emb"].hits) == (2, 0)
    assert t.host_syncs == 0
    assert t.launches_by_op["npu.npu_rotary_mul"] in (2, 4)
    for ours, theirs in zip(result, expected, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        torch.testing.assert_close(ours, theirs, rtol=1e-6 if dtype is torch.float32 else 8e-3, atol=2e-6)


def test_one_tensor_and_the_way_back(installed):
    module, (q, k) = packed(Undoable), tokens(torch.float32)
    expected = module(q), module(*module(q, k), inverse=True)
    sites = installed(Undoable)
    alone = module(q)
    back = module(*module(q, k), inverse=True)
    assert (sites["forward"].hits, sites["apply_rotary_emb"].hits) == (1, 1)
    assert sites["apply_rotary_emb"].fallbacks == {"the inverse rotation": 1}
    torch.testing.assert_close(alone, expected[0])
    for ours, theirs, x in zip(back, expected[1], (q, k), strict=True):
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(ours, x, rtol=1e-4, atol=1e-5)


def test_rows_that_are_chosen_otherwise_are_not_recognised(installed):
    sites = installed(Shifted)
    assert isinstance(sites["forward"], str)
