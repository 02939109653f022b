"""Whole models: no wait for the device is added, and the Trainer sees the same losses."""

from __future__ import annotations

import functools

import pytest
import torch

import npu_patch
import npu_patch.simulator

from ...support import tiny_models
from .call import takes_positions

OPS = tuple(row.name for row in npu_patch.ops() if row.default)
built = functools.lru_cache(maxsize=2)(tiny_models.build)


class Attention:
    """Hits and fallbacks of attention since it was made."""

    def __init__(self) -> None:
        self._status = npu_patch.status()

    def hits(self) -> int:
        return npu_patch.status().hits("attention") - self._status.hits("attention")

    def fallbacks(self) -> set[str]:
        before = self._status.fallbacks("attention")
        return {r for r, n in npu_patch.status().fallbacks("attention").items() if n > before.get(r, 0)}


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "gemma2 without a cap", "gpt_oss"])
@pytest.mark.parametrize("kind", ["plain", "all seen", "packed"])
def test_no_wait_for_the_device_is_added(name, kind):
    from transformers.masking_utils import create_causal_mask

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
    # Builders that get the positions on the device, and ask nothing about them, leave them to be read: once a step.
    reads = {"plain": 1, "all seen": 1, "packed": 2}[kind] if takes_positions(create_causal_mask) else 0
    with npu_patch.scope("attention"):
        assert syncs() <= stock + reads


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
