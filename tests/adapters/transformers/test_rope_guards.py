"""What patched rope functions ask of tensors and tables before they are rotated, and what backward they record."""

from __future__ import annotations

import pytest
import torch

from npu_patch.adapters.transformers import rope

from ...discovery import test_rotary as functions
from ...support.numerics import relative_error
from .call import patched
from .test_rope_calls import tables, values

# With tables as given, and with tables that are made and remembered.
FUNCTIONS = [functions.half, functions.half_width_tables]
ONE_DEVICE = "query, key and tables are not on one device"


def inputs(function):
    q, k = (values((2, 4, 6, 16), torch.float32, i) for i in (1, 2))
    return [q, k, *tables(16 if function is functions.half else 8)]


def outcome(function, args):
    try:
        return function(*args)
    except (RuntimeError, TypeError) as error:
        return type(error)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("moved", [(0,), (1,), (2,), (3,), (2, 3), (0, 1), (1, 2, 3)], ids=str)
def test_tensors_and_tables_are_on_one_device(function, known, moved):
    forward, site, original = patched(rope.find, "apply_rotary_pos_emb", function)
    args = inputs(function)
    if known:
        forward(*args)
    args = [x.cpu() if i in moved else x for i, x in enumerate(args)]
    assert outcome(forward, args) is outcome(original, args) is RuntimeError
    assert (site.hits, site.fallbacks) == (int(known), {ONE_DEVICE: 1})


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("which", [2, 3])
def test_tables_of_different_shapes_run_the_original(function, which):
    forward, site, original = patched(rope.find, "apply_rotary_pos_emb", function)
    args = inputs(function)
    args[which] = args[which][:1]
    assert all(torch.equal(a, b) for a, b in zip(forward(*args), original(*args), strict=True))
    assert site.fallbacks == {"cos and sin differ": 1}


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("which", range(4))
def test_a_subclass_runs_the_original(function, which):
    forward, site, original = patched(rope.find, "apply_rotary_pos_emb", function)
    args = inputs(function)
    args[which] = args[which].as_subclass(Subclass)
    assert all(torch.equal(a, b) for a, b in zip(forward(*args), original(*args), strict=True))
    assert site.fallbacks == {"Subclass is not a plain tensor": 1}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)], ids=str)
def test_a_rotation_records_a_backward_that_saves_no_activation(function, which):
    forward, site, _ = patched(rope.find, "apply_rotary_pos_emb", function)
    args = inputs(function)
    for i in which:
        args[i].requires_grad_()
    for _ in range(2):  # what is remembered of the tables, too
        rotated = forward(*args)
        assert all(y.requires_grad for i, y in enumerate(rotated) if i in which)
        names = set()
        for y in rotated:
            node = y.grad_fn
            while node is not None and node.next_functions and "Rotate" not in node.name():
                node = node.next_functions[0][0]
            names |= set() if node is None else {node.name()}
        assert names == {"RotateBackward"}
    with torch.no_grad():
        assert not any(y.requires_grad for y in forward(*args))
    assert site.hits == 3


@pytest.mark.parametrize("function", [*FUNCTIONS, functions.half_in_float32])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("learned", [(2,), (3,), (2, 3)], ids=str)
def test_one_table_that_needs_a_gradient_gets_the_right_one(function, known, learned):
    forward, site, original = patched(rope.find, "apply_rotary_pos_emb", function)
    args = [*inputs(functions.half if function is functions.half_in_float32 else function)]
    if known:
        forward(*args)
    for i in (0, 1, *learned):
        args[i].requires_grad_()
    leaves = [args[i] for i in (0, 1, *learned)]
    ours, theirs = (torch.autograd.grad(sum(y.square().sum() for y in f(*args)), leaves) for f in (forward, original))
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(ours, theirs, strict=True))
    assert site.hits == 1 + known
    with torch.no_grad():
        assert all(relative_error(a, b) < 1e-6 for a, b in zip(forward(*args), original(*args), strict=True))
    assert site.hits == 2 + known


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("which", [2, 3])
def test_tables_that_change_in_place_are_read_again(function, which):
    forward, site, original = patched(rope.find, "apply_rotary_pos_emb", function)
    args = inputs(function)
    for i in (0, 1):
        args[i].requires_grad_()
    for _ in range(2):
        results = []
        for f in (forward, original):
            rotated = f(*args)
            gradients = torch.autograd.grad(sum(y.square().sum() for y in rotated), args[:2])
            results.append([*rotated, *gradients])
        assert all(relative_error(ours, theirs) < 1e-5 for ours, theirs in zip(*results, strict=True))
        args[which].mul_(-0.5)
    assert site.hits == 2
