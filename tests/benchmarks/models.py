"""The models whose launches, bytes and host syncs are counted: one training step each, patched and unpatched.

Two sequences of 512 tokens in bfloat16.  The transformers models are tiny configurations of the real classes; the
torchtitan models are its own debug models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

BATCH, LENGTH = 2, 512
_BASE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "head_dim": 32,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "query_pre_attn_scalar": 32,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_EXPERTS, "num_experts": 8, "norm_topk_prob": True}),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **_EXPERTS,
            "num_hidden_layers": 3,
            "num_key_value_heads": 8,
            "q_lora_rank": 96,
            "kv_lora_rank": 64,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "intermediate_size": 128,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "pad_token_id": 0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
}
TORCHTITAN = {  # name: family and flavor
    "llama3": ("llama3", "debugmodel"),
    "qwen3": ("qwen3", "debugmodel"),
    "deepseek_v3": ("deepseek_v3", "debugmodel"),  # 5 layers of 8 experts
    "qwen3_moe": ("qwen3", "debugmodel_moe"),  # 8 layers of 64 experts
}


@dataclasses.dataclass
class Subject:
    """A model on the device and a function that runs one forward and backward and returns the loss."""

    model: torch.nn.Module
    step: Callable[[], torch.Tensor]
    unpatched: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


def transformers_model(name: str, dtype: torch.dtype = torch.bfloat16, length: int = LENGTH) -> Subject:
    """A causal language model built on the CPU with a fixed seed, then moved."""
    import transformers

    config, cls, changes = TRANSFORMERS[name]
    torch.manual_seed(0)
    model = getattr(transformers, cls)._from_config(getattr(transformers, config)(**{**_BASE, **changes}), dtype=dtype)
    model = model.to("npu").train()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, _BASE["vocab_size"], (BATCH, length), generator=generator).to("npu")

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return loss

    return Subject(model, step)


def torchtitan_model(name: str, dtype: torch.dtype = torch.bfloat16, length: int = LENGTH) -> Subject:
    """A debug model of torchtitan.

    Unpatched it does not run on an NPU without a compiler (flex attention and its masks are compiled), so what patched
    counts are compared with is a stand-in: `scaled_dot_product_attention` with a dense causal mask made beforehand.
    """
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common import attention
    from torchtitan.tools.utils import set_default_dtype

    set_spmd_backend("partial_dtensor")
    family, flavor = TORCHTITAN[name]
    registry = importlib.import_module(f"torchtitan.models.{family}").model_registry
    config = registry(flavor, attn_backend="flex").model
    for layer in config.layers:
        layer.attention.rope = dataclasses.replace(layer.attention.rope, max_seq_len=length)
    with torch.device("meta"), set_default_dtype(dtype):
        model = config.build()
    model.to_empty(device="cpu")
    with torch.no_grad(), set_default_dtype(dtype):
        model.init_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            scale = 0.5 if "router.gate" in name else 0.02  # experts are chosen by more than rounding errors
            parameter.copy_(1 + 0.02 * noise if "norm" in name else scale * noise)
    model.to("npu").train()
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (
        torch.randint(0, config.vocab_size, (BATCH, length), generator=generator).to("npu") for _ in range(2)
    )
    loader = data_loader(length)
    valid = torch.tensor(float(BATCH * length)).to("npu")
    loss_function = CrossEntropyLoss.Config(global_vocab_size=config.vocab_size).build()
    dense = torch.ones(length, length, dtype=torch.bool).tril().view(1, 1, length, length).to("npu")
    standing_in = False

    @contextlib.contextmanager
    def stand_in() -> Iterator[None]:
        nonlocal standing_in

        def forward(self: Any, q: Any, k: Any, v: Any, *, scale: Any = None, enable_gqa: bool = False, **_: Any) -> Any:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=dense, scale=scale, enable_gqa=enable_gqa)
            return out.transpose(1, 2)

        original = attention.FlexAttention.forward
        attention.FlexAttention.forward, standing_in = forward, True
        try:
            yield
        finally:
            attention.FlexAttention.forward, standing_in = original, False

    def step() -> torch.Tensor:
        batch, _ = next(iter(loader))
        here = batch["positions"].to("npu")  # as the trainer does it: a new tensor in every step
        masks = dense if standing_in else model.get_attention_masks(here)
        logits = model(tokens, positions=here, attention_masks=masks)
        loss, _ = loss_function(logits, labels, valid)
        loss.backward()
        return loss

    return Subject(model, step, stand_in)


def data_loader(length: int) -> Any:
    """torchtitan's own data loader, of batches with positions."""
    from torch.utils.data import IterableDataset
    from torchtitan.components.dataloader import ParallelAwareDataloader

    class Rows(IterableDataset):
        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            row = torch.arange(length)
            while True:
                yield {"input": row, "positions": row}, row

    return ParallelAwareDataloader(Rows(), 0, 1, batch_size=BATCH)


def subject(name: str, **kwargs: Any) -> Subject:
    if name in TRANSFORMERS:
        return transformers_model(name, **kwargs)
    return torchtitan_model(name.removeprefix("torchtitan "), **kwargs)


NAMES = (*TRANSFORMERS, *(f"torchtitan {family}" for family in TORCHTITAN))
