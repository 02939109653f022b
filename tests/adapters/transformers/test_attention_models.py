"""Whole dense models with every default op: training, padded and packed batches, greedy decoding, the Trainer."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import npu_patch
import npu_patch.simulator

from ...support import tiny_models
from ...support.numerics import Run, assert_same_training, training_step
from ...support.tiny_models import LANGUAGE, VISION

OPS = tuple(row.name for row in npu_patch.ops() if row.default)
built = functools.lru_cache(maxsize=2)(tiny_models.build)
SOFT_CAPPED = {"gemma2": {"keyword softcap"}}


class Attention:
    """Hits and fallbacks of attention since it was made."""

    def __init__(self) -> None:
        self._status = npu_patch.status()

    def hits(self) -> int:
        return npu_patch.status().hits("attention") - self._status.hits("attention")

    def fallbacks(self) -> set[str]:
        before = self._status.fallbacks("attention")
        return {r for r, n in npu_patch.status().fallbacks("attention").items() if n > before.get(r, 0)}


def step(name: str, **given: Any) -> Run:
    model = built(name)
    arguments = {**tiny_models.inputs(name), "use_cache": False, **given}
    labels = arguments.pop("labels", arguments["input_ids"])
    return training_step(model, lambda: model(**arguments, labels=labels).loss)


def same_training(name: str, calls: int = 2, **given: Any) -> None:
    stock = step(name, **given)
    with npu_patch.scope(*OPS):
        attention = Attention()
        patched = step(name, **given)
        assert attention.fallbacks() == SOFT_CAPPED.get(name, set())
        assert attention.hits() == (0 if name in SOFT_CAPPED else calls)
    # gpt_oss computes its experts in bfloat16 whatever the model's type: unpatched, the gradient of a router's bias is
    # 0.7 of its norm away from the float64 one.
    loose = {"gradient": 1e-4, "loss": 1e-5} if name == "gpt_oss" else {}
    assert_same_training(stock, patched, **loose)


@pytest.mark.parametrize("name", LANGUAGE)
def test_training_is_the_same(name):
    same_training(name)


@pytest.mark.parametrize("name", VISION)
def test_vision_towers_train_the_same(name):
    same_training(name, calls=4)


@pytest.mark.parametrize("name", LANGUAGE)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_train_the_same(name, side):
    ids = tiny_models.inputs(name)["input_ids"]
    mask = torch.ones_like(ids)
    if side == "left":
        mask[0, :5] = 0
    else:
        mask[1, -7:] = 0
    same_training(name, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))


@pytest.mark.parametrize("name", LANGUAGE)
def test_packed_batches_train_the_same(name):
    rows = [[8, 12], [5, 15]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows]).to("npu")
    same_training(name, position_ids=positions)


@pytest.mark.parametrize("name", LANGUAGE)
def test_greedy_tokens_are_identical(name):
    model, ids = built(name).eval(), tiny_models.inputs(name, length=12)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    stock = model.generate(ids, **settings)
    with npu_patch.scope(*OPS):
        attention = Attention()
        patched = model.generate(ids, **settings)
        assert attention.hits() == (0 if name in SOFT_CAPPED else 2 * 16)
    model.train()
    assert torch.equal(stock, patched)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "gemma2 without a cap", "gpt_oss"])
@pytest.mark.parametrize("kind", ["plain", "all seen", "packed"])
def test_no_wait_for_the_device_is_added(name, kind):
    model, given = built(name), tiny_models.inputs(name)
    if kind == "all seen":
        given["attention_mask"] = torch.ones_like(given["input_ids"])
    positions = torch.cat([torch.arange(8), torch.arange(12)]).expand(2, -1).contiguous()

    def syncs() -> int:
        for _ in range(2):  # what is made once is made in the first step
            fresh = {"position_ids": positions.to("npu")} if kind == "packed" else {}
            with npu_patch.simulator.trace() as trace:
                model(**given, **fresh, use_cache=False).logits.sum().backward()
        model.zero_grad(set_to_none=True)
        return trace.host_syncs

    stock = syncs()
    with npu_patch.scope("attention"):
        assert syncs() <= stock


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_trainer_gets_the_unpatched_losses(name, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    rows = tiny_models.inputs(name, batch=8, length=16)["input_ids"].cpu()
    data = [{"input_ids": row, "labels": row} for row in rows]

    def losses() -> list[float]:
        model = tiny_models.build(name)
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            bf16=True,
            max_steps=4,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            seed=0,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    stock = losses()
    with npu_patch.scope(*OPS):
        attention = Attention()
        patched = losses()
        assert attention.hits() == 4 * 2 * 2 * 2  # steps, micro batches, layers, once more in the backward
        assert not attention.fallbacks()
    assert len(stock) == 4
    assert patched == pytest.approx(stock, rel=1e-3)
