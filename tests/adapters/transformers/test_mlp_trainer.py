"""The library's own trainer, with everything on that could get in the way of a patched MLP and loss."""

from __future__ import annotations

import pytest
import torch

import npu_patch

from . import tiny
from .test_mlp import PACKED


def losses(folder) -> list[float]:
    from transformers import Trainer, TrainingArguments, set_seed

    set_seed(0)
    built = tiny.any_model("phi3", **PACKED["phi3"])
    rows = torch.randint(3, tiny.VOCABULARY, (16, 20), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": torch.where(torch.arange(20) < 5, -100, row)} for row in rows]
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        learning_rate=1e-3,
        bf16=True,
        gradient_checkpointing=True,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=built, args=arguments, train_dataset=data)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_autocast_accumulation_and_checkpointing_train_to_the_unpatched_losses(tmp_path):
    pytest.importorskip("accelerate")
    stock = losses(tmp_path)
    with npu_patch.scope("swiglu", "cross_entropy"):
        before = {op: npu_patch.status().hits(op) for op in ("swiglu", "cross_entropy")}
        patched = losses(tmp_path)
        hits = {op: npu_patch.status().hits(op) - count for op, count in before.items()}
    assert hits == {"swiglu": 4 * 2 * 2 * 2, "cross_entropy": 4 * 2}  # steps, parts, layers, and once more each layer
    assert patched == pytest.approx(stock, rel=1e-3)
