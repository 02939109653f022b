"""What torchtitan's data loader hands over is known on the host: a step that uses it waits for the device nowhere."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils.data import IterableDataset

import npu_patch
from npu_patch.adapters.torchtitan.batches import HostTensor, host_copy
from npu_patch.adapters.torchtitan.positions import facts
from npu_patch.simulator import trace

from .generation import CURRENT, current, previous

dataloader = pytest.importorskip("torchtitan.components.dataloader", reason="torchtitan")
LENGTH = 48
ROWS = (48,), (7, 1, 40)


class Rows(IterableDataset):
    """Rows of packed documents: their positions, and tokens of which 7 ends a document."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(3)
        while True:
            for lengths in ROWS:
                positions = torch.cat([torch.arange(n) for n in lengths])
                tokens = torch.randint(8, 2000, (LENGTH,), generator=generator)
                tokens[torch.tensor(lengths).cumsum(0)[:-1] - 1] = 7
                yield {"input": tokens, "positions": positions, "weights": positions.float()}, tokens


def loader():
    return dataloader.ParallelAwareDataloader(Rows(), 0, 1, batch_size=2)


def batch():
    return next(iter(loader()))


def moved(what="positions"):
    with npu_patch.scope("attention"):
        return batch()[0][what].to("npu")


def test_what_was_moved_is_known_without_a_wait():
    for what in ("positions", "input"):
        tensor = moved(what)
        assert type(tensor) is torch.Tensor
        with trace() as t:
            known = facts(tensor)
        assert t.host_syncs == 0
        assert torch.equal(known.host, tensor.cpu())


@pytest.mark.parametrize("move", [lambda x: x.npu(), lambda x: x.to(device="npu", non_blocking=True)])
def test_every_way_to_move_is_seen(move):
    with npu_patch.scope("attention"):
        assert host_copy(move(batch()[0]["positions"])) is not None


def test_what_was_written_to_afterwards_is_read_again():
    tensor = moved()
    tensor[0, 0] = 5
    with trace() as t:
        assert facts(tensor).host[0, 0] == 5
    assert t.host_syncs == 1


def test_a_buffer_that_is_used_again_changes_nothing():
    with npu_patch.scope("attention"):
        buffer = batch()[0]["positions"]
        tensor = buffer.to("npu")
        buffer.zero_()
    assert torch.equal(facts(tensor).host, tensor.cpu())
    assert tensor.any()


def test_another_type_or_what_was_computed_is_not_taken_for_it():
    with npu_patch.scope("attention"):
        positions = batch()[0]["positions"]
        assert host_copy(positions.to("npu", torch.int32)) is None
        assert type(positions + 1) is type(positions[0]) is type(positions.clone()) is torch.Tensor
        assert host_copy((positions + 1).to("npu")) is None


def test_a_batch_is_otherwise_what_the_loader_makes():
    stock, labels = batch()
    with npu_patch.scope("attention"):
        patched, patched_labels = batch()
    assert [type(x) for x in patched.values()] == [HostTensor, HostTensor, torch.Tensor]
    assert type(patched) is dict
    assert list(patched) == list(stock)
    assert all(torch.equal(patched[name], stock[name]) for name in stock)
    assert torch.equal(labels, patched_labels)
    for copied in (copy.deepcopy(patched["input"]), pickle.loads(pickle.dumps(patched["input"]))):
        assert type(copied) is torch.Tensor
        assert torch.equal(copied, stock["input"])
    assert {type(x) for x in batch()[0].values()} == {torch.Tensor}  # the original is back


def test_the_state_of_a_loader_is_the_loader_s():
    def states():
        own = loader()
        batches = iter(own)
        next(batches)
        return own.state_dict()

    stock = states()
    with npu_patch.scope("attention"):
        assert states() == stock


@current
@pytest.mark.parametrize("backend", ["flex", "varlen"])
def test_a_training_step_of_0_3_waits_for_nothing(backend):
    from .models import build

    model = build("llama3", backend=backend)

    def step():
        inputs, labels = batch()
        tokens, positions, labels = inputs["input"].to("npu"), inputs["positions"].to("npu"), labels.to("npu")
        logits = model(tokens, positions=positions, attention_masks=model.get_attention_masks(positions))
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()).backward()

    assert waits(step) == 0


@previous
@pytest.mark.parametrize("flavor", ["debugmodel_flex_attn", "debugmodel_varlen_attn"])
def test_a_training_step_of_0_2_waits_for_nothing(flavor):
    from .previous import Tokenizer, build

    model = build("llama3", flavor, attn_mask_type="block_causal")

    def step():
        inputs, labels = batch()
        tokens, labels = inputs["input"].to("npu"), labels.to("npu")
        logits = model(tokens, attention_masks=model.get_attention_masks(tokens, Tokenizer()))
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()).backward()

    assert waits(step) == 0


def waits(step):
    with npu_patch.scope("rms_norm", "rope", "attention", "cross_entropy"):
        step()  # compares the rotary tables of the layers, once in their life
        with trace() as t:
            step()
    assert t.launches_by_op["npu.npu_fusion_attention"] > 0
    return t.host_syncs


@pytest.mark.skipif(not CURRENT, reason="0.2.2 asks nothing of positions")
def test_positions_outside_of_the_tables_are_refused_as_ever():
    from torchtitan.models.common.rope import CosSinRoPE

    rope = CosSinRoPE(CosSinRoPE.Config(dim=16, max_seq_len=LENGTH - 1, theta=50.0)).npu()
    x = torch.randn(2, LENGTH, 1, 16).npu()
    with npu_patch.scope("rope", "attention"), pytest.raises(RuntimeError, match="position"):
        rope(x, x, batch()[0]["positions"].to("npu"))
