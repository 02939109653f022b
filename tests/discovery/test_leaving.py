"""Mask builders that try to leave the process while they are looked at."""

from __future__ import annotations

import pytest
import torch

from npu_patch.discovery.masks import looks_at_packed, recognise_builder


def builder(error):
    def build(
        batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None, **more
    ):
        raise error

    return build


def packed(error):
    def find_packed_sequence_indices(position_ids: torch.Tensor):
        raise error

    return find_packed_sequence_indices


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), RuntimeError("no")], ids=repr)
def test_they_are_left_alone(error):
    assert recognise_builder(builder(error), False) is None
    assert looks_at_packed(packed(error)) is None


def test_an_interrupt_gets_through():
    with pytest.raises(KeyboardInterrupt):
        looks_at_packed(packed(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        recognise_builder(builder(KeyboardInterrupt()), False)
