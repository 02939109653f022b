"""Tiny models of transformers' dense families, two layers each, with inputs; built on the CPU and moved to the NPU."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 128
PAD, IMAGE, VIDEO, VISION_START, VISION_END = 0, 5, 6, 7, 8
_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEAD: dict[str, Any] = {"head_dim": 16}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 2,  # no layer with experts
}
_LANGUAGE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", _HEAD),
    "gemma2": ("gemma2", {**_HEAD, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma2 without a cap": (
        "gemma2",
        {**_HEAD, "sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": None},
    ),
    "gemma3": (
        "gemma3_text",
        {
            **_HEAD,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "deepseek_v2": ("deepseek_v2", _LATENT),
    "deepseek_v3": ("deepseek_v3", _LATENT),
    "glm4": ("glm4", _HEAD),
    "mistral": ("mistral", {"sliding_window": 8}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "gpt_oss": (
        "gpt_oss",
        {
            **_HEAD,
            "num_local_experts": 2,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": _ROPE,
        },
    ),
}
LANGUAGE = tuple(_LANGUAGE)
"""Causal language models; gpt_oss has experts, all of them chosen, and is here for its sinks."""
VISION = ("qwen2_5_vl", "qwen3_vl")
"""Models with a vision tower."""


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model, with the same weights for every call, spread out so that nothing is near zero or one."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name in VISION:
            model = AutoModelForImageTextToText.from_config(_vision_config(name), dtype=dtype)
        else:
            kind, own = _LANGUAGE[name]
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**_COMMON, **own}), dtype=dtype)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.dim() == 1
            spread = torch.randn(parameter.shape, generator=generator) * (0.3 if flat else 0.05)
            parameter.copy_(parameter + spread if flat else spread)
    return model.to("npu")


def inputs(name: str, batch: int = 2, length: int = 20) -> dict[str, Any]:
    """Keyword arguments of a forward without labels."""
    generator = torch.Generator().manual_seed(3)
    if name not in VISION:
        return {"input_ids": torch.randint(10, VOCABULARY, (batch, length), generator=generator).to("npu")}
    ids = torch.randint(10, VOCABULARY, (1, length), generator=generator)
    ids[0, 3], ids[0, 4:8] = VISION_START, IMAGE
    patch = {"qwen2_5_vl": 14, "qwen3_vl": 16}[name]
    given = {
        "input_ids": ids,
        "pixel_values": torch.randn(16, 3 * 2 * patch * patch, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == IMAGE).long(),
    }
    return {key: value.to("npu") for key, value in given.items()}


def _vision_config(name: str) -> Any:
    from transformers import AutoConfig

    text = {**_COMMON, "rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64}
    if name == "qwen2_5_vl":
        vision |= {"patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56}
    else:
        text |= {**_HEAD, "rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2], "mrope_interleaved": True}}
        vision |= {"patch_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    return AutoConfig.for_model(
        name,
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
