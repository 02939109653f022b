"""torchtitan's debug models, shrunk; and torchtitan as it is without a compiler."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor

import npu_patch

BATCH, LENGTH = 2, 48
OPS = ("rms_norm", "rope", "attention")


def build(
    family: str, dtype: torch.dtype = torch.float32, layers: int = 2, length: int = LENGTH, backend: str = "flex"
) -> torch.nn.Module:
    """A debug model with few layers on the NPU, with parameters that do not depend on the device's random numbers."""
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.tools.utils import set_default_dtype

    set_spmd_backend("partial_dtensor")
    registry = importlib.import_module(f"torchtitan.models.{family}").model_registry
    config = registry("debugmodel", attn_backend=backend).model
    config.layers = config.layers[:layers]
    for layer in config.layers:
        layer.attention.rope = dataclasses.replace(layer.attention.rope, max_seq_len=length)
    with torch.device("meta"), set_default_dtype(dtype):
        model = config.build()
    model.to_empty(device="cpu")
    with torch.no_grad(), set_default_dtype(dtype):
        model.init_weights()
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.05 * noise)
    return model.to("npu").train()


def plain_positions(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.arange(length).repeat(batch, 1).to("npu")


def packed_positions(*rows: tuple[int, ...]) -> Tensor:
    """Rows of documents of the given lengths, restarting at 0."""
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows]).to("npu")


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def loss_of(model: torch.nn.Module, positions: Tensor) -> Callable[[], Tensor]:
    """A loss for `training_step`; masks are built anew in every call, as the trainer does."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(0, 2048, positions.shape, generator=generator).to("npu") for _ in range(2))

    def loss() -> Tensor:
        fresh = positions.clone()
        logits = model(tokens, positions=fresh, attention_masks=model.get_attention_masks(fresh))
        return mean_cross_entropy(logits, labels)

    return loss


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Inside: the flex attention and mask builders of torchtitan run eagerly, as with TORCHDYNAMO_DISABLE=1."""
    from torchtitan.models.common import attention

    debug = flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    compiled = attention.FlexAttention._compiled_flex_attn, attention._compiled_create_block_mask
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    attention.FlexAttention._compiled_flex_attn = flex.flex_attention
    attention._compiled_create_block_mask = flex.create_block_mask
    try:
        yield
    finally:
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = debug
        attention.FlexAttention._compiled_flex_attn, attention._compiled_create_block_mask = compiled


@contextlib.contextmanager
def uncompilable() -> Iterator[None]:
    """Inside: every compiled function of torchtitan's attention raises when it is called."""
    from torchtitan.models.common import attention

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a compiled function was called")

    compiled = attention.FlexAttention._compiled_flex_attn, attention._compiled_create_block_mask
    attention.FlexAttention._compiled_flex_attn = attention._compiled_create_block_mask = refuse
    try:
        yield
    finally:
        attention.FlexAttention._compiled_flex_attn, attention._compiled_create_block_mask = compiled


class Counts:
    """Hits and fallbacks of an op between construction and `take`; counters run on through the life of a process."""

    def __init__(self) -> None:
        self._before = self._read()

    @staticmethod
    def _read() -> dict[tuple[str, str], tuple[int, dict[str, int]]]:
        return {(row.op, row.target): (row.hits, dict(row.fallbacks)) for row in npu_patch.status()}

    def take(self, op: str) -> tuple[int, dict[str, int]]:
        hits, fallbacks = 0, {}
        for (own, target), (count, reasons) in self._read().items():
            if own != op:
                continue
            old_count, old_reasons = self._before.get((own, target), (0, {}))
            hits += count - old_count
            for reason, number in reasons.items():
                if number != old_reasons.get(reason, 0):
                    fallbacks[reason] = fallbacks.get(reason, 0) + number - old_reasons.get(reason, 0)
        return hits, fallbacks
