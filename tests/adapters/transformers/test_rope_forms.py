"""Single calls of patched rope functions whose tables have another form."""

from __future__ import annotations

import pytest
import torch

from npu_patch.adapters.transformers import rope

from ...discovery import rope_forms as functions
from ...support.numerics import relative_error
from .call import patched
from .test_rope_calls import tables, values

PAIR, TOKENS_FIRST = [(2, 4, 6, 16), (2, 2, 6, 16)], [(2, 6, 4, 16), (2, 6, 2, 16)]


def angles(width, tokens=6, batch=None):
    shape = (tokens, width) if batch is None else (batch, tokens, width)
    return values(shape, torch.float32, 7)


def polar(batch, scale=1.3):
    t = angles(8, batch=batch)
    return torch.complex(t.cos() * scale, t.sin() * scale)


def one_sample(width, tokens=6):
    return [t[0] for t in tables(width, batch=1, tokens=tokens)]


def in_three(width):
    return [values((3, 2, 6, width), torch.float32, seed) for seed in (5, 6)]


POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5], [7, 6, 5, 4, 3, 2]])

CALLS = {
    "rows": (functions.rows, PAIR, lambda: one_sample(16)),
    "last tokens": (functions.last_tokens, PAIR, lambda: one_sample(16, tokens=4)),
    "all tokens": (functions.last_tokens, PAIR, lambda: one_sample(16)),
    "by position": (functions.by_position, PAIR, lambda: [*one_sample(16, tokens=9), POSITIONS.to("npu")]),
    "in sections": (functions.in_sections, PAIR, lambda: [*in_three(16), [2, 5, 1]]),
    "complex, heads first": (functions.complex_heads_first, PAIR, lambda: [polar(1)]),
    "complex, tokens first": (functions.complex_tokens_first, TOKENS_FIRST, lambda: [polar(1)]),
    "complex rows": (functions.complex_rows, TOKENS_FIRST, lambda: [polar(None).unsqueeze(1)]),
    "ready": (functions.ready_tables, PAIR[:1], lambda: [t.unsqueeze(1) for t in tables(16)]),
    "ready, half width": (functions.ready_half_tables, TOKENS_FIRST[:1], lambda: [t.unsqueeze(2) for t in tables(8)]),
    "sine first": (functions.sine_first, TOKENS_FIRST[:1], lambda: tables(8, batch=1)),
    "single": (functions.single_heads_first, PAIR[:1], lambda: tables(16)),
    "single, dim": (functions.single_with_positions, TOKENS_FIRST[:1], lambda: [*tables(16), None, 2]),
    "angles": (functions.of_angles, [(1, 6, 4, 16)], lambda: [angles(8)]),
    "query alone": (functions.query_alone, PAIR, lambda: tables(16)),
    "backwards": (functions.backwards, PAIR, lambda: tables(16)),
    "last channels": (functions.last_channels, [(2, 4, 6, 24)], lambda: tables(8, batch=1)),
}


def run(function, tensors, rest):
    leaves = [x.detach().requires_grad_() for x in tensors]
    outputs = function(*leaves, *rest)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = torch.autograd.grad(outputs, leaves, [values(y.shape, y.dtype, 9) for y in outputs])
    return [*outputs, *gradients]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_rotated_and_gradients_are_the_originals(name, dtype):
    function, shapes, rest = CALLS[name]
    forward, site, original = patched(rope.find, "apply_rotary_pos_emb", function)
    tensors, arguments = [values(shape, dtype, i) for i, shape in enumerate(shapes)], rest()
    for ours, theirs in zip(run(forward, tensors, arguments), run(original, tensors, arguments), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert relative_error(ours, theirs) < (1e-6 if dtype is torch.float32 else 1e-2)
    assert (site.hits, site.fallbacks) == (1, {})


OTHERS = {
    "rows of samples": (functions.rows, PAIR, lambda: [t.unsqueeze(1) for t in tables(16)]),
    "keywords": (lambda q, k, cos, sin, **kwargs: functions.last_tokens(q, k, cos, sin), PAIR, lambda: one_sample(16)),
    "one position for all": (functions.by_position, PAIR, lambda: [*tables(16, batch=9), torch.tensor([4, 7]).npu()]),
    "sections of less": (functions.in_sections, PAIR, lambda: [*(t[:, 0] for t in in_three(16)), [2, 5, 1]]),
    "a double table": (functions.complex_heads_first, PAIR, lambda: [polar(1).to(torch.complex128)]),
    "a table for each head": (
        functions.ready_tables,
        PAIR[:1],
        lambda: [values((2, 4, 6, 16), torch.float32, i) for i in (1, 2)],
    ),
    "longer ready tables": (functions.ready_tables, PAIR[:1], lambda: [t.unsqueeze(1) for t in tables(16, tokens=9)]),
    "half angles": (functions.of_angles, [(1, 6, 4, 16)], lambda: [angles(8).half()]),
    "no key": (functions.query_alone, PAIR[:1], lambda: [None, *tables(16)]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_arguments_run_the_original(name):
    function, shapes, rest = OTHERS[name]
    forward, site, original = patched(rope.find, "apply_rotary_pos_emb", function)
    tensors, arguments = [values(shape, torch.float32, i) for i, shape in enumerate(shapes)], rest()
    keywords = {"scale": 1.0} if name == "keywords" else {}
    outcomes = []
    for one in (forward, original):
        try:
            outcomes.append(one(*tensors, *arguments, **keywords))
        except (RuntimeError, IndexError) as error:
            outcomes.append(str(error))
    if isinstance(outcomes[1], str):
        assert outcomes[0] == outcomes[1]
    else:
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    assert site.hits == 0
    assert len(site.fallbacks) == 1


def test_what_the_layers_share_is_made_once_per_table():
    import npu_patch.simulator

    for name in ("complex, heads first", "in sections", "angles", "last tokens", "backwards"):
        function, shapes, rest = CALLS[name]
        forward, _, _ = patched(rope.find, "apply_rotary_pos_emb", function)
        tensors, arguments = [values(shape, torch.float32, i) for i, shape in enumerate(shapes)], rest()
        counts = []
        for _ in range(2):
            with npu_patch.simulator.trace() as trace:
                run(forward, tensors, arguments)
            counts.append(trace.launches)
        assert counts[1] < counts[0], name
