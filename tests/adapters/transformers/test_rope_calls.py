"""Single calls of patched rope functions: layouts, tables, dtypes, transforms, and when the original runs."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import npu_patch.simulator
from npu_patch.adapters.transformers import rope

from ...discovery import test_rotary as functions
from ...support.numerics import relative_error
from .call import patched

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values(shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to("npu")


def tables(width, dtype=torch.float32, batch=2, tokens=6, seed=5):
    """Halves that differ, rows that differ by sample, and numbers beyond one, as YaRN's scaling makes them."""
    return values((batch, tokens, width), dtype, seed), values((batch, tokens, width), dtype, seed + 1)


def call(function, tensors, cos, sin, *rest):
    leaves = [x.detach().requires_grad_() for x in tensors]
    outputs = function(*leaves, cos, sin, *rest)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    heads = [values(y.shape, y.dtype, 9) for y in outputs]
    return [y.detach() for y in outputs], torch.autograd.grad(outputs, leaves, heads)


def compare(function, tensors, cos, sin, *rest, hits=1):
    forward, site, original = patched(rope.find, "apply_rotary_pos_emb", function)
    stock, stock_gradients = call(original, tensors, cos, sin, *rest)
    fused, fused_gradients = call(forward, tensors, cos, sin, *rest)
    single = all(x.dtype is torch.float32 for x in (*tensors, cos))
    for ours, theirs in zip([*fused, *fused_gradients], [*stock, *stock_gradients], strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert relative_error(ours, theirs) < (1e-6 if single else 1e-2)
    assert site.hits == hits, site.fallbacks
    return site


PAIRS = {
    "half": (functions.half, 16, 16),
    "half in float32": (functions.half_in_float32, 16, 16),
    "half, partial": (functions.half_partial, 24, 16),
    "half, full width of a partial one": (functions.half_partial, 16, 16),
    "half-width tables": (functions.half_width_tables, 16, 8),
    "interleaved in, half out": (functions.interleaved_in_half_out, 16, 16),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtypes", [(d, d) for d in DTYPES] + [(torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("dim", [1, 2])
def test_rotated_and_gradients_are_the_originals(name, dtypes, dim):
    function, head, width = PAIRS[name]
    shapes = [(2, 4, 6, head), (2, 2, 6, head)] if dim == 1 else [(2, 6, 4, head), (2, 6, 2, head)]
    tensors = [values(shape, dtypes[0], i) for i, shape in enumerate(shapes)]
    compare(function, tensors, *tables(width, dtypes[1]), dim)


@pytest.mark.parametrize("function", [functions.interleaved, functions.interleaved_from_half_tables])
def test_interleaved_with_tables_shared_by_the_batch(function):
    compare(function, [values((2, 4, 6, 16), torch.float32, i) for i in (1, 2)], *tables(16, batch=1))


def test_interleaved_with_a_table_for_each_sample_runs_the_original():
    site = compare(
        functions.interleaved, [values((2, 4, 6, 16), torch.float32, i) for i in (1, 2)], *tables(16), hits=0
    )
    assert site.fallbacks == {"interleave needs tables shared by the batch and the heads": 1}


def test_one_tensor():
    compare(functions.single, [values((2, 4, 6, 16), torch.float32, 1)], *tables(16))


def test_tokens_first_without_a_batch():
    tensors = [values((6, 4, 16), torch.bfloat16, i) for i in (1, 2)]
    cos, sin = (t[0] for t in tables(16))
    compare(functions.tokens_first, tensors, cos, sin)


@pytest.mark.parametrize("shape", [(8, 64, 4, 128), (2, 3, 5, 72), (40, 30, 2, 16), (1, 1, 1, 64)])
def test_many_heads_and_odd_sizes_give_the_originals_result(shape):
    batch, _, length, head = shape
    forward, site, original = patched(rope.find, "apply_rotary_pos_emb", functions.half)
    q, k = (values(shape, torch.float32, i) for i in (1, 2))
    cos, sin = tables(head, batch=batch, tokens=length)
    for ours, theirs in zip(forward(q, k, cos, sin), original(q, k, cos, sin), strict=True):
        assert relative_error(ours, theirs) < 1e-6
    assert site.hits + sum(site.fallbacks.values()) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"width": 8}, "the tables' width is not the head size"),
        ({"k_dtype": torch.bfloat16}, "query and key differ in type"),
        ({"dim": -3}, "unsqueeze_dim -3"),
        ({"sin_dtype": torch.bfloat16}, "cos and sin differ"),
    ],
    ids=lambda x: str(x),
)
def test_calls_that_the_operator_cannot_take_run_the_original(changes, reason):
    forward, site, original = patched(rope.find, "apply_rotary_pos_emb", functions.half)
    q, k = values((2, 4, 6, 16), torch.float32, 1), values((2, 4, 6, 16), changes.get("k_dtype", torch.float32), 2)
    cos, sin = tables(changes.get("width", 16))
    args = (q, k, cos, sin.to(changes.get("sin_dtype", torch.float32)), changes.get("dim", 1))
    outcomes = []
    for function in (original, forward):
        try:
            outcomes.append(function(*args))
        except RuntimeError as error:
            outcomes.append(str(error))
    assert site.fallbacks == {reason: 1}
    if isinstance(outcomes[0], str):
        assert outcomes[0] == outcomes[1]
    else:
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@pytest.mark.parametrize("width", [16, 8])
def test_tables_without_a_batch_behave_as_in_the_original(width):
    forward, site, original = patched(rope.find, "apply_rotary_pos_emb", functions.half)
    q, k = (values((2, 6, 6, 16), torch.float32, i) for i in (1, 2))
    cos, sin = (t[0] for t in tables(width))
    if width == 16:
        assert all(torch.equal(a, b) for a, b in zip(forward(q, k, cos, sin), original(q, k, cos, sin), strict=True))
    else:
        for function in (forward, original):
            with pytest.raises(RuntimeError):
                function(q, k, cos, sin)
    assert (site.hits, len(site.fallbacks)) == (0, 1)


def test_position_ids_run_the_original():
    forward, site, original = patched(rope.find, "apply_rotary_pos_emb", functions.half_with_positions)
    q, k = (values((2, 4, 6, 16), torch.float32, i) for i in (1, 2))
    ours = forward(q, k, *tables(16), torch.arange(6))
    assert all(torch.equal(a, b) for a, b in zip(ours, original(q, k, *tables(16)), strict=True))
    assert site.fallbacks == {"position_ids": 1}
    forward(q, k, *tables(16), unsqueeze_dim=1)
    assert site.hits == 1


def test_a_missing_key_runs_the_original():
    def query_only_too(q, k, cos, sin, unsqueeze_dim=1):
        return functions.half(q, q if k is None else k, cos, sin, unsqueeze_dim)[: 1 if k is None else 2]

    forward, site, original = patched(rope.find, "apply_rotary_pos_emb", query_only_too)
    q = values((2, 4, 6, 16), torch.float32, 1)
    (ours,), (theirs,) = (f(q, None, *tables(16)) for f in (forward, original))
    assert torch.equal(ours, theirs)
    assert site.fallbacks == {"a tensor is missing": 1}


def test_on_the_cpu_the_original_runs():
    forward, site, original = patched(rope.find, "apply_rotary_pos_emb", functions.half)
    for dtype in (torch.float32, torch.bfloat16):
        q, k = (values((2, 4, 6, 16), dtype, i).cpu() for i in (1, 2))
        args = q, k, *(t.cpu() for t in tables(16))
        assert all(torch.equal(a, b) for a, b in zip(forward(*args), original(*args), strict=True))
    assert site.fallbacks == {"not on an NPU": 2}


@pytest.mark.parametrize(("heads", "hits"), [(4, 1), (1000, 0)])
def test_a_key_with_more_heads_is_judged_for_itself(heads, hits):
    forward, site, original = patched(rope.find, "apply_rotary_pos_emb", functions.half)
    q, k = values((2, 2, 6, 16), torch.float32, 1), values((2, heads, 6, 16), torch.float32, 2)
    ours, theirs = (f(q, k, *tables(16)) for f in (forward, original))
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(ours, theirs, strict=True))
    assert site.hits == hits


def test_a_key_of_another_length_is_judged_for_itself():
    forward, site, original = patched(rope.find, "apply_rotary_pos_emb", functions.half)
    q, k = values((2, 2, 6, 16), torch.float32, 1), values((2, 2, 9, 16), torch.float32, 2)
    for function in (forward, original):
        with pytest.raises(RuntimeError):
            function(q, k, *tables(16))
    assert (site.hits, len(site.fallbacks)) == (0, 1)


@pytest.mark.parametrize("function", [functions.half, functions.interleaved_in_half_out])
def test_tables_that_need_a_gradient_get_the_right_one(function):
    forward, site, original = patched(rope.find, "apply_rotary_pos_emb", function)
    q, k = (values((2, 4, 6, 16), torch.float32, i).requires_grad_() for i in (1, 2))
    results = []
    for rotate in (original, forward):
        cos, sin = (t.requires_grad_() for t in tables(16))
        y = rotate(q, k, cos, sin)
        results.append(torch.autograd.grad([x.square().sum() for x in y], (q, k, cos, sin)))
    for ours, theirs in zip(*reversed(results), strict=True):
        assert relative_error(ours, theirs) < 1e-5
    assert site.hits + sum(site.fallbacks.values()) == 1


@pytest.mark.parametrize("function", [functions.half, functions.interleaved_in_half_out])
def test_vmap_runs_the_original(function):
    forward, site, original = patched(rope.find, "apply_rotary_pos_emb", function)
    q, k = (values((3, 2, 4, 6, 16), torch.float32, i) for i in (1, 2))
    cos, sin = tables(16)
    ours = torch.vmap(lambda a, b: forward(a, b, cos, sin))(q, k)
    theirs = torch.vmap(lambda a, b: original(a, b, cos, sin))(q, k)
    assert all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))
    batched = tuple(t.expand(3, *t.shape) for t in (cos, sin))
    ours = torch.vmap(forward)(q, k, *batched)
    assert all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))
    assert site.hits == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(reentrant):
    forward, _, _ = patched(rope.find, "apply_rotary_pos_emb", functions.half)
    cos, sin = tables(16)
    results = []
    for function in (forward, lambda *args: checkpoint(forward, *args, use_reentrant=reentrant)):
        q, k = (values((2, 4, 6, 16), torch.float32, i).requires_grad_() for i in (1, 2))
        y = function(q, k, cos, sin)
        sum(x.square().sum() for x in y).backward()
        results.append((q.grad, k.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_the_layers_share_is_made_once_per_table():
    forward, _, _ = patched(rope.find, "apply_rotary_pos_emb", functions.interleaved_in_half_out)
    q, k = (values((2, 4, 6, 16), torch.float32, i).requires_grad_() for i in (1, 2))
    cos, sin = tables(16)

    def launches():
        with npu_patch.simulator.trace() as trace:
            forward(q, k, cos, sin)
        return trace.launches

    first = launches()
    assert launches() < first
    cos.mul_(1.0)  # another content
    assert launches() > launches()


def test_tables_die_with_their_model():
    forward, _, _ = patched(rope.find, "apply_rotary_pos_emb", functions.interleaved_in_half_out)
    q, k = (values((2, 4, 6, 16), torch.float32, i).requires_grad_() for i in (1, 2))
    torch.npu.synchronize()
    for i in range(20):
        forward(q, k, *tables(16, seed=i))
        if i == 4:
            before = torch.npu.memory_allocated()
    assert torch.npu.memory_allocated() <= before


@pytest.mark.parametrize("function", [functions.half, functions.interleaved_in_half_out])
def test_what_was_made_in_inference_mode_serves_training_later(function):
    forward, site, original = patched(rope.find, "apply_rotary_pos_emb", function)
    q, k = (values((2, 4, 6, 16), torch.float32, i) for i in (1, 2))
    cos, sin = tables(16)
    with torch.inference_mode():
        forward(q, k, cos, sin)
        forward(q, k, *tables(16))
    q.requires_grad_()
    ours, theirs = (torch.autograd.grad(f(q, k, cos, sin)[0].square().sum(), q)[0] for f in (forward, original))
    assert relative_error(ours, theirs) < 1e-6
    assert site.hits == 3


def test_the_signature_is_the_originals():
    forward, _, original = patched(rope.find, "apply_rotary_pos_emb", functions.half)
    assert inspect.signature(forward) == inspect.signature(original)
