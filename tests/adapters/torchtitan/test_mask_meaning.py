"""What a mask_mod shows is found by evaluating it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import and_masks, create_mask, noop_mask, or_masks

from npu_patch.adapters.torchtitan.mask_meaning import HEAD, SAMPLE, describe, reads, recognise

from .generation import current

pytestmark = current

CPU = torch.device("cpu")


def mods():
    from torchtitan.models.common import attention

    return attention


def positions_of(*rows):
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])


def agrees(meaning, mod, batch, length):
    """Whether the meaning shows what the mod shows, over all pairs."""
    keys = torch.arange(length)
    ours = (keys >= meaning.lower.unsqueeze(-1)) & (keys <= meaning.upper.unsqueeze(-1))
    theirs = create_mask(mod, batch, 1, length, length, device="cpu").squeeze(1)
    return torch.equal(ours, theirs.expand_as(ours))


def causal(b, h, q, kv):
    return q >= kv


@pytest.mark.parametrize("length", [1, 2, 7, 64, 600])
def test_causal(length):
    meaning = recognise(mods().get_causal_mask_mod(), 2, length, CPU)
    assert agrees(meaning, causal, 2, length)
    assert meaning.compact().kind == ("causal" if length > 1 else meaning.compact().kind)


def test_no_mask():
    meaning = recognise(noop_mask, 2, 20, CPU)
    assert meaning.compact().kind == "full"
    assert agrees(meaning, noop_mask, 2, 20)


@pytest.mark.parametrize("length", [40, 500])
@pytest.mark.parametrize("window", [1, 2, 3, 39, 40, 41, 1000])
def test_a_window_has_the_width_that_it_shows(window, length):
    mod = mods().get_sliding_window_mask_mod(window)
    meaning = recognise(mod, 2, length, CPU)
    assert agrees(meaning, mod, 2, length)
    mask = meaning.compact()
    if window < length:
        assert (mask.kind, mask.window) == ("band", window)
    else:
        assert mask.kind == "causal"


@pytest.mark.parametrize("rows", [((7, 1, 12),), ((20,), (3, 17)), ((1, 19), (19, 1)), ((5, 5, 5, 5), (20,))])
def test_documents_end_where_they_end(rows):
    positions = positions_of(*rows)
    mod = and_masks(mods().get_causal_mask_mod(), mods().get_efficient_causal_mask_mod_for_packed_document(positions))
    meaning = recognise(mod, len(rows), 20, CPU)
    assert agrees(meaning, mod, len(rows), 20)
    mask = meaning.compact()
    ends = tuple(torch.tensor([n for row in rows for n in row]).cumsum(0).tolist())
    assert (mask.kind, mask.q_ends, mask.kv_ends, mask.is_causal, mask.window) == ("documents", ends, ends, True, None)


def test_documents_without_causal_and_fixed_blocks():
    for mod in (mods().get_document_mask_mod(positions_of((20,), (3, 17))), mods().get_fixed_block_mask_mod(8)):
        meaning = recognise(mod, 2, 20, CPU)
        assert agrees(meaning, mod, 2, 20)
        assert meaning.compact().kind == "documents"
        assert not meaning.compact().is_causal


def test_a_window_inside_documents():
    positions = positions_of((12, 8), (20,))
    mod = and_masks(
        causal,
        mods().get_efficient_causal_mask_mod_for_packed_document(positions),
        mods().get_sliding_window_mask_mod(5),
    )
    meaning = recognise(mod, 2, 20, CPU)
    assert agrees(meaning, mod, 2, 20)
    assert (meaning.compact().kind, meaning.compact().window) == ("documents", 5)


def hole(b, h, q, kv):
    return (q >= kv) & ~((q == 71) & (kv == 13))


def prefix(b, h, q, kv):
    return (q >= kv) | (kv < 6)


def symmetric_band(b, h, q, kv):
    return (q - kv).abs() < 4


def strided(b, h, q, kv):
    return (q >= kv) & ((q - kv) % 2 == 0)


def dilated(b, h, q, kv):
    return (q >= kv) & ((q - kv < 4) | (kv % 16 == 0))


def per_head(b, h, q, kv):
    return (q >= kv) & ((h == 0) | (q - kv < 4))


def hides_rows(b, h, q, kv):
    return (q >= kv) & (q > 3)


UNKNOWN = [prefix, symmetric_band, strided, dilated, per_head, hides_rows]


@pytest.mark.parametrize("length", [40, 600])
@pytest.mark.parametrize("mod", UNKNOWN)
def test_anything_else_is_not_recognised(mod, length):
    assert recognise(mod, 2, length, CPU) is None


def test_a_hole_is_seen_where_all_pairs_are_looked_at():
    assert recognise(hole, 2, 200, CPU) is None
    assert recognise(hole, 2, 70, CPU) is not None  # the hole lies beyond


def late_hole(b, h, q, kv):
    return (q >= kv) & ~((kv == 777) & (q > 800) & (q < 900))


def one_pair_more(b, h, q, kv):
    return (q >= kv) | ((q == 1001) & (kv == 1900))


def boundary_key_less(b, h, q, kv):
    return (q >= kv) & ~((kv == 5000) & (q > 6500)) & ((q < 5000) | (kv >= 5000))


@pytest.mark.parametrize(
    ("mod", "length"), [(late_hole, 1024), (late_hole, 4000), (one_pair_more, 2048), (boundary_key_less, 7000)]
)
def test_few_exceptions_in_a_long_mask_are_seen(mod, length):
    assert recognise(mod, 1, length, CPU) is None


def test_a_long_mask_is_recognised():
    mod = and_masks(causal, mods().get_efficient_causal_mask_mod_for_packed_document(positions_of((5000, 1200))))
    assert recognise(mod, 1, 6200, CPU).compact().q_ends == (5000, 6200)


@pytest.mark.parametrize("head", [1, 2, 3, 7, 40, 300])
@pytest.mark.parametrize("length", [40, 600])
def test_heads_are_told_apart_from_any_head_on(head, length):
    def mod(b, h, q, kv):
        return (q >= kv) & ((h < head) | (q - kv < 4))

    assert recognise(mod, 2, length, CPU) is None


def test_what_a_mask_mod_reads():
    positions = positions_of((7, 13))
    document = mods().get_document_mask_mod(positions)
    assert [reads(causal, argument, CPU) for argument in (SAMPLE, HEAD)] == [False, False]
    assert [reads(document, argument, CPU) for argument in (SAMPLE, HEAD)] == [True, False]
    assert [reads(per_head, argument, CPU) for argument in (SAMPLE, HEAD)] == [False, True]
    assert [reads(and_masks(document, per_head), argument, CPU) for argument in (SAMPLE, HEAD)] == [True, True]


def test_names_say_nothing():
    def causal_mask(b, h, q, kv):
        return q <= kv

    def sliding_window_mod_window_size_7(b, h, q, kv):
        return q >= kv

    meaning = recognise(causal_mask, 1, 20, CPU)
    assert meaning is None
    assert recognise(sliding_window_mod_window_size_7, 1, 20, CPU).compact().kind == "causal"


def test_a_mod_that_cannot_be_evaluated_is_not_recognised():
    def broken(b, h, q, kv):
        raise KeyError("nothing here")

    assert recognise(broken, 1, 20, CPU) is None


def test_messages_name_what_a_mask_is_made_of():
    assert "hole" in describe(and_masks(causal, or_masks(hole, prefix)))
    assert "prefix" in describe(and_masks(causal, or_masks(hole, prefix)))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=8), min_size=1, max_size=3),
    window=st.none() | st.integers(1, 40),
    is_causal=st.booleans(),
)
def test_a_recognised_mask_shows_exactly_what_its_mod_shows(lengths, window, is_causal):
    total = max(sum(row) for row in lengths)
    rows = [row if sum(row) == total else [*row, total - sum(row)] for row in lengths]
    parts = [mods().get_document_mask_mod(positions_of(*rows))]
    if is_causal:
        parts.append(causal)
        if window is not None:
            parts.append(mods().get_sliding_window_mask_mod(window))
    mod = and_masks(*parts)
    meaning = recognise(mod, len(rows), total, CPU)
    assert meaning is not None
    assert agrees(meaning, mod, len(rows), total)
