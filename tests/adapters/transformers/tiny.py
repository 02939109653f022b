"""Tiny models of three families, and what the tests do with them."""

from __future__ import annotations

from typing import Any

import torch

import npu_patch

from ...support.numerics import Run, training_step

OPS = ("rms_norm", "rope", "attention")
VOCABULARY = 128
_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 8, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
FAMILIES = tuple(_FAMILIES)
NORMS = {"llama": 5, "qwen3": 9, "gemma3": 13}
"""Calls of norms per forward; ropes and attentions are one per layer."""


def model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    kind, own = _FAMILIES[family]
    return any_model(kind, dtype, **own)


def any_model(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The same weights for every call, spread out so that nothing is near zero or one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**_COMMON, **changes})
    built = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in built.parameters():
            spread = torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.dim() == 1 else 0.05)
            parameter.copy_(parameter + spread if parameter.dim() == 1 else spread)
    return built.to("npu")


def tokens(batch: int = 2, length: int = 20) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator).to("npu")


def step(built: Any, ids: torch.Tensor, **kwargs: Any) -> Run:
    """One training step; labels are the inputs unless given."""
    labels = kwargs.pop("labels", ids)
    kwargs.setdefault("use_cache", False)
    return training_step(getattr(built, "_orig_mod", built), lambda: built(input_ids=ids, labels=labels, **kwargs).loss)


def hits() -> dict[str, int]:
    status = npu_patch.status()
    return {op: status.hits(op) for op in OPS}


def fallbacks() -> dict[str, int]:
    status = npu_patch.status()
    return {reason: count for op in OPS for reason, count in status.fallbacks(op).items()}


class Counting:
    """Hits and fallbacks since it was made, over a process whose counters run on."""

    def __init__(self) -> None:
        self._hits, self._fallbacks = hits(), fallbacks()

    def hits(self) -> dict[str, int]:
        return {op: count - self._hits.get(op, 0) for op, count in hits().items()}

    def fallbacks(self) -> dict[str, int]:
        now = {reason: count - self._fallbacks.get(reason, 0) for reason, count in fallbacks().items()}
        return {reason: count for reason, count in now.items() if count}
