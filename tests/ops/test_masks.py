"""Masks as they are made, and the checks below every op, one by one."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from npu_patch.ops import guards
from npu_patch.ops.masks import Mask

from .tools import random


def test_documents_may_be_empty_and_windows_of_one() -> None:
    mask = Mask.documents((2, 2, 6), (2, 2, 6), window=1)
    assert (mask.q_ends, mask.window, mask.may_hide_rows) == ((2, 2, 6), 1, False)
    assert Mask.band(1).window == 1


@pytest.mark.parametrize(
    ("q_ends", "kv_ends", "causal", "hides"),
    [
        ((2, 6), (2, 6), True, False),
        ((2, 6), (3, 8), True, False),
        ((2, 6), (1, 6), True, True),  # two queries, one key
        ((2, 6), (1, 6), False, False),
        ((2, 3, 6), (2, 2, 6), False, True),  # a query without a key
        ((2, 2, 6), (2, 3, 7), True, False),  # a key without a query
    ],
)
def test_documents_in_which_a_query_sees_nothing(q_ends, kv_ends, causal, hides) -> None:
    assert Mask.documents(q_ends, kv_ends, causal=causal).may_hide_rows is hides


@pytest.mark.parametrize(
    ("q_ends", "kv_ends", "options"),
    [
        ((), (), {}),
        ((2,), (2, 4), {}),
        ((0, 2), (1, 2), {}),
        ((1, 2), (0, 2), {}),
        ((3, 2), (2, 3), {}),
        ((2, 3), (3, 2), {}),
        ((2,), (2,), {"window": 0}),
        ((2,), (2,), {"window": 2, "causal": False}),
    ],
)
def test_what_is_no_packing_is_refused(q_ends, kv_ends, options) -> None:
    with pytest.raises(ValueError, match=r"document|window"):
        Mask.documents(q_ends, kv_ends, **options)


def test_other_alignments_and_windows_are_refused() -> None:
    assert Mask.causal() is not Mask.causal("upper_left")
    with pytest.raises(ValueError, match="alignment"):
        Mask.causal("center")
    with pytest.raises(ValueError, match="window"):
        Mask.band(0)


def test_forward_mode_differentiation_is_a_transform() -> None:
    assert not guards.transforming()
    with forward_ad.dual_level():
        assert guards.transforming()
    assert not guards.transforming()


def test_what_may_outlive_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    on_npu, on_host = random(2, grad=False), torch.ones(2)
    assert guards.keep(on_npu)
    assert guards.keep(on_host)
    monkeypatch.setattr(torch.npu, "is_current_stream_capturing", lambda: True)
    assert not guards.keep(on_npu)
    assert guards.keep(on_host)
    monkeypatch.delattr(torch.npu, "is_current_stream_capturing")
    assert guards.keep(on_npu)
    assert not guards.keep(torch.nn.Parameter(on_host))
    torch.vmap(lambda x: x if not guards.keep(on_host) else pytest.fail("kept"))(on_host)
