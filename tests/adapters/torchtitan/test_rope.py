"""Rotary embeddings: positions of every kind, tables shared only where they are equal."""

from __future__ import annotations

import copy
import gc
import inspect

import pytest
import torch

import npu_patch
from npu_patch.simulator import trace

from .generation import current
from .models import Counts, packed_positions, plain_positions

pytestmark = current
B, L, D = 2, 12, 16


def rotary(name, rows=32, theta=100.0):
    from torchtitan.models.common import rope

    cls = getattr(rope, name)
    return cls(cls.Config(dim=D, max_seq_len=rows, theta=theta)).to("npu")


def pair(dtype=torch.float32, heads=(4, 2), batch=B, size=D):
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(batch, L, n, size, generator=generator).to("npu", dtype).requires_grad_() for n in heads)
    return q, k


def run(module, q, k, positions):
    """Both results and both gradients."""
    results = module(q, k, positions) if positions is not NO_POSITIONS else module(q, k)
    grads = [torch.arange(r.numel(), device="npu").view_as(r).cos().to(r.dtype) for r in results]
    return [*(r.detach() for r in results), *torch.autograd.grad(results, (q, k), grads)]


NO_POSITIONS = object()
POSITIONS = {
    "not given": lambda: NO_POSITIONS,
    "none": lambda: None,
    "range": lambda: plain_positions(B, L),
    "one row for all": lambda: packed_positions((5, 7)),
    "equal rows": lambda: packed_positions((5, 7), (5, 7)),
    "per sample": lambda: packed_positions((12,), (3, 9)),
    "shifted": lambda: plain_positions(B, L) + torch.tensor([[3], [17]], device="npu"),
}


@pytest.mark.parametrize("kind", POSITIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["ComplexRoPE", "CosSinRoPE"])
def test_positions_of_every_kind_give_the_original_s_result(name, dtype, kind):
    module, (q, k) = rotary(name), pair(dtype)
    expected = run(module, q, k, POSITIONS[kind]())
    with npu_patch.scope("rope"):
        counts = Counts()
        result = run(module, q, k, POSITIONS[kind]())
        assert counts.take("rope") == (1, {})
    for ours, theirs in zip(result, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-6 if dtype is torch.float32 else 8e-3, atol=2e-6)


@pytest.mark.parametrize("name", ["ComplexRoPE", "CosSinRoPE"])
@pytest.mark.parametrize("heads", [(4, 1), (1, 1), (6, 6)])
def test_heads_of_query_and_key_may_differ(name, heads):
    module, (q, k) = rotary(name), pair(torch.bfloat16, heads)
    positions = packed_positions((12,), (3, 9))
    expected = run(module, q, k, positions)
    with npu_patch.scope("rope"):
        result = run(module, q, k, positions)
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=8e-3, atol=2e-6)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)])
def test_query_and_key_keep_their_types(dtypes):
    module, (q, k) = rotary("ComplexRoPE"), pair()
    q, k = q.detach().to(dtypes[0]), k.detach().to(dtypes[1])
    expected = module(q, k, plain_positions(B, L))
    with npu_patch.scope("rope"):
        result = module(q, k, plain_positions(B, L))
    assert [r.dtype for r in result] == [e.dtype for e in expected] == list(dtypes)
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=8e-3, atol=2e-6)


@pytest.mark.parametrize("value", [32, -1])
def test_positions_outside_the_cache_are_the_original_s_business(value):
    module, (q, k) = rotary("ComplexRoPE"), pair()
    positions = plain_positions(B, L)
    positions[1, 5] = value
    outcomes = []
    for ops in ((), ("rope",)):
        with npu_patch.scope(*ops) if ops else npu_patch.scope("attention"):
            try:
                outcomes.append([r.detach().cpu() for r in module(q, k, positions)])
            except (RuntimeError, IndexError) as error:
                outcomes.append(str(error))
    if isinstance(outcomes[0], str):
        assert outcomes[0] == outcomes[1]
    else:
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    assert value != 32 or "position" in outcomes[0]


def test_layers_with_equal_caches_share_what_is_gathered():
    layers, (q, k) = [rotary("ComplexRoPE") for _ in range(4)], pair()
    with npu_patch.scope("rope"):
        for layer in layers:  # compares the caches, once
            layer(q, k, packed_positions((12,), (3, 9)))
        positions = packed_positions((3, 9), (12,))
        with trace() as t:
            for layer in layers:
                run(layer, q, k, positions)
    assert t.host_syncs == 1
    assert t.launches_by_op["index_select"] == 3


def test_a_cache_with_other_values_is_not_shared():
    same, other, (q, k) = rotary("ComplexRoPE"), rotary("ComplexRoPE", theta=33.0), pair()
    positions = packed_positions((12,), (3, 9))
    expected = run(other, q, k, positions)
    with npu_patch.scope("rope"):
        run(same, q, k, positions)
        result = run(other, q, k, positions)
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("change", ["in place", "replaced", "initialised again", "moved"])
def test_a_cache_that_changes_is_read_again(change):
    module, (q, k) = rotary("CosSinRoPE"), pair()
    positions = packed_positions((12,), (3, 9))
    with npu_patch.scope("rope"):
        run(module, q, k, positions)
        if change == "in place":
            module.cache.mul_(0.5)
        elif change == "replaced":
            module.cache = module.cache * 0.25
        elif change == "initialised again":
            module.cache.zero_()
            module._init_self_buffers()
        else:
            module = copy.deepcopy(module).to("cpu").to("npu")
            module.cache.add_(1.0)
        result = run(module, q, k, positions)
    expected = run(module, q, k, positions)
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)


def test_positions_that_change_in_place_are_read_again():
    module, (q, k) = rotary("ComplexRoPE"), pair()
    positions = packed_positions((12,), (3, 9))
    with npu_patch.scope("rope"):
        first = module(q, k, positions)[0]
        positions.add_(2)
        result = module(q, k, positions)[0]
    expected = module(q, k, positions)[0]
    assert not torch.equal(first, result)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=2e-6)


def test_an_evaluation_in_inference_mode_does_not_spoil_training():
    module, (q, k) = rotary("ComplexRoPE"), pair(torch.bfloat16)
    expected = run(module, q, k, plain_positions(B, L))
    with npu_patch.scope("rope"):
        positions = plain_positions(B, L)
        with torch.inference_mode():
            module(q, k, positions)
            module(q, k, plain_positions(B, L))
        result = run(module, q, k, positions)
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=8e-3, atol=2e-6)


def test_a_second_derivative_is_the_original_s():
    module, (q, k) = rotary("ComplexRoPE"), pair(torch.bfloat16)

    def second():
        (first,) = torch.autograd.grad(
            module(q, k, plain_positions(B, L))[0].float().pow(3).sum(), q, create_graph=True
        )
        return torch.autograd.grad(first.float().pow(2).sum(), q)[0]

    expected = second()
    with npu_patch.scope("rope"):
        result = second()
    assert (result - expected).float().norm() <= 2e-2 * expected.float().norm()


def test_a_class_that_gathers_otherwise_rotates_by_its_own_rows():
    from torchtitan.models.common.rope import CosSinRoPE

    class Reversed(CosSinRoPE):
        def _reshape_cache(self, query, positions=None):
            return super()._reshape_cache(query, positions).flip(1)

    module, (q, k) = Reversed(Reversed.Config(dim=D, max_seq_len=32)).to("npu"), pair()
    positions = packed_positions((12,), (3, 9))
    expected = run(module, q, k, positions)
    with npu_patch.scope("rope"):
        counts = Counts()
        result = run(module, q, k, positions)
        assert counts.take("rope") == (1, {})
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["ComplexRoPE", "CosSinRoPE"])
def test_the_rotation_stays_a_static_method(name):
    module, (q, k) = rotary(name), pair()
    rows = module._reshape_cache(q, packed_positions((12,), (3, 9)))
    expected = type(module).apply_rotary_emb(q, k, rows)
    signature = inspect.signature(type(module).apply_rotary_emb)
    with npu_patch.scope("rope"):
        counts = Counts()
        assert isinstance(vars(type(module))["apply_rotary_emb"], staticmethod)
        assert inspect.signature(type(module).apply_rotary_emb) == signature
        through_class = type(module).apply_rotary_emb(q, k, rows)
        through_instance = module.apply_rotary_emb(query=q, key=k, rope_cache=rows)
        assert counts.take("rope") == (2, {})
    for result in (through_class, through_instance):
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=2e-6)


def lazily_negated(table):
    return torch._neg_view(table)


def lazily_conjugated(table):
    return table.conj()


LAZY = [("ComplexRoPE", lazily_conjugated), ("ComplexRoPE", lazily_negated), ("CosSinRoPE", lazily_negated)]


@pytest.mark.parametrize(("name", "view"), LAZY)
def test_lazy_views_of_a_rotary_table_rotate_by_what_they_show(name, view):
    module, (q, k) = rotary(name), pair()
    rows = module._reshape_cache(q, packed_positions((12,), (3, 9)))
    rotate = type(module).apply_rotary_emb
    expected = [*rotate(q, k, rows), *rotate(q, k, view(rows.clone())), *rotate(q, k, view(view(rows)))]
    with npu_patch.scope("rope"):
        counts = Counts()
        rotate = type(module).apply_rotary_emb
        result = [*rotate(q, k, rows), *rotate(q, k, view(rows)), *rotate(q, k, view(view(rows)))]
        assert counts.take("rope") == (3, {})
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(("name", "view"), LAZY)
def test_a_cache_that_becomes_a_lazy_view_is_read_again(name, view):
    module, (q, k) = rotary(name), pair()
    original, positions = module.cache, packed_positions((12,), (3, 9))
    with npu_patch.scope("rope"):
        run(module, q, k, positions)
        module.cache = view(original)
        result = run(module, q, k, positions)
    expected = run(module, q, k, positions)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=2e-6)


def test_unequal_halves_have_the_original_s_gradient():
    from torchtitan.models.common.rope import CosSinRoPE

    q, k = pair()
    rows = torch.randn(1, L, 1, 2 * D, generator=torch.Generator().manual_seed(2)).to("npu")

    def gradients():
        results = CosSinRoPE.apply_rotary_emb(q, k, rows)
        return torch.autograd.grad([r.pow(2).sum() for r in results], (q, k))

    expected = gradients()
    with npu_patch.scope("rope"):
        result = gradients()
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("gradient to the rotary cache", lambda q, k, c: (q, k, c.requires_grad_())),
        ("query or key is neither float32, bfloat16 nor float16", lambda q, k, c: (q.double(), k.double(), c)),
        ("the rotary cache is not (1 or B, L, 1, width)", lambda q, k, c: (q, k, c.expand(-1, -1, 4, -1))),
        ("the input is empty", lambda q, k, c: (q[:, :, :0], k, c)),
    ],
)
def test_what_the_operator_cannot_honour_runs_the_original(reason, change):
    from torchtitan.models.common.rope import CosSinRoPE

    q, k = (x.detach()[:, :, :4] for x in pair(heads=(4, 4)))
    arguments = change(q, k, torch.randn(1, L, 1, 2 * D, device="npu"))
    expected = CosSinRoPE.apply_rotary_emb(*arguments)
    with npu_patch.scope("rope"):
        counts = Counts()
        result = CosSinRoPE.apply_rotary_emb(*arguments)
        assert counts.take("rope") == (0, {reason: 1})
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def test_a_transform_runs_the_original():
    module, (q, k) = rotary("ComplexRoPE"), pair()
    q, k = q.detach(), k.detach()
    expected = torch.vmap(lambda x, y: module(x, y)[0])(q.unsqueeze(0), k.unsqueeze(0))
    with npu_patch.scope("rope"):
        result = torch.vmap(lambda x, y: module(x, y)[0])(q.unsqueeze(0), k.unsqueeze(0))
    assert torch.equal(result, expected)


def test_yarn_and_llama_scaling_are_in_the_tables():
    from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE

    configs = [
        ComplexRoPE.Config(dim=D, max_seq_len=32, scaling="llama", original_max_position_embeddings=16),
        ComplexRoPE.Config(dim=D, max_seq_len=32, scaling="yarn", rope_factor=4.0, original_seq_len=8),
        CosSinRoPE.Config(dim=D, max_seq_len=32, scaling="yarn", rope_factor=4.0, original_seq_len=8, truncate=False),
    ]
    for config in configs:
        module, (q, k) = config.build().to("npu"), pair()
        expected = run(module, q, k, packed_positions((12,), (3, 9)))
        with npu_patch.scope("rope"):
            result = run(module, q, k, packed_positions((12,), (3, 9)))
        for ours, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("grad", [True, False])
def test_nothing_outlives_the_positions(grad):
    from npu_patch.adapters.torchtitan import positions as facts

    module, (q, k) = rotary("ComplexRoPE"), pair(torch.bfloat16)
    with npu_patch.scope("rope"), torch.set_grad_enabled(grad):
        for kind in ("range", "equal rows", "per sample"):
            module(q, k, POSITIONS[kind]())
        gc.collect()
        before = len(facts._facts)
        allocated = torch.npu.memory_allocated()
        for _ in range(20):
            for kind in ("range", "equal rows", "per sample"):
                module(q, k, POSITIONS[kind]())
        gc.collect()
        assert len(facts._facts) == before
        assert torch.npu.memory_allocated() == allocated


def test_tables_go_with_the_last_module_that_uses_them():
    from npu_patch.adapters.torchtitan import rope_rows

    gc.collect()
    before = len(rope_rows._distinct), len(rope_rows._tables)
    with npu_patch.scope("rope"):
        for name in ("ComplexRoPE", "CosSinRoPE"):
            layers, (q, k) = [rotary(name, rows=40, theta=7.0) for _ in range(3)], pair()
            for layer in layers:
                layer(q, k, packed_positions((12,), (3, 9)))
            assert len(rope_rows._distinct) == before[0] + 1
            del layers, layer
            gc.collect()
            assert (len(rope_rows._distinct), len(rope_rows._tables)) == before


def test_an_evaluation_before_training_has_no_gradient_missing():
    module, (q, k) = rotary("ComplexRoPE"), pair(torch.bfloat16)
    expected = run(module, q, k, POSITIONS["per sample"]())
    with npu_patch.scope("rope"):
        positions = POSITIONS["per sample"]()
        with torch.no_grad():
            module(q, k, positions)
        result = run(module, q, k, positions)
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=8e-3, atol=2e-6)
