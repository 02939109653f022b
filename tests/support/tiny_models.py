"""Tiny models of transformers' families, two layers each, with inputs; built on the CPU and moved to the NPU.

What the installed version does not have is left out of the tuples of names.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
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
_WINDOW: dict[str, Any] = {"sliding_window": 8}
_GEMMA: dict[str, Any] = {**_HEAD, **_WINDOW, "query_pre_attn_scalar": 16}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# One layer without experts, one with them, as the checkpoints have it.
_DEEPSEEK: dict[str, Any] = {
    **_EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_GROUPS: dict[str, Any] = {"n_group": 2, "topk_group": 1}
_SPARSE: dict[str, Any] = {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 8}


FIFTH = importlib.util.find_spec("transformers.integrations.moe") is not None
"""Whether it is transformers 5: experts go through a registry, and every model's attention does."""


@dataclass(frozen=True)
class Calls:
    """How often one forward pass reaches what can be patched; a loss is one call of cross entropy more.

    Args:
        swiglu: outside of experts.
        experts: layers of experts that are recognised.
        gates: of them, those with the common gate.
    """

    rms_norm: int
    rope: int
    attention: int
    swiglu: int = 0
    experts: int = 0
    gates: int = 0


@dataclass(frozen=True)
class Family:
    """A family's configuration.

    Args:
        kind: its `model_type`.
        own: what differs from the common values.
        calls: of one forward pass, the vision tower's apart.
        tower: of the vision tower in one forward pass.
        experts: whether it has experts.
        module: the folder below `transformers.models`, where it is not `kind`.
    """

    kind: str
    calls: Calls
    own: Mapping[str, Any] = field(default_factory=dict)
    tower: Calls = Calls(0, 0, 0)
    experts: bool = False
    module: str = ""


_FAMILIES: dict[str, Family] = {
    "llama": Family("llama", Calls(5, 2, 2)),
    "qwen2": Family("qwen2", Calls(5, 2, 2)),
    "qwen3": Family("qwen3", Calls(9, 2, 2), _HEAD),
    "qwen3_moe": Family(
        "qwen3_moe",
        Calls(9, 2, 2, experts=2, gates=2),
        {**_HEAD, **_EXPERTS, "num_experts": 4, "norm_topk_prob": True},
        experts=True,
    ),
    "mixtral": Family(
        "mixtral", Calls(5, 2, 2, experts=2, gates=2), {"num_local_experts": 4, "num_experts_per_tok": 2}, experts=True
    ),
    "gemma2": Family("gemma2", Calls(9, 2, 2), _GEMMA),
    "gemma2 without a cap": Family("gemma2", Calls(9, 2, 2), {**_GEMMA, "attn_logit_softcapping": None}),
    "gemma3": Family(
        "gemma3_text",
        Calls(13, 2, 2),
        {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"]},
        module="gemma3",
    ),
    "deepseek_v2": Family("deepseek_v2", Calls(9, 2, 2, experts=1, gates=1), _DEEPSEEK, experts=True),
    "deepseek_v3": Family("deepseek_v3", Calls(9, 2, 2, experts=1, gates=1), {**_DEEPSEEK, **_GROUPS}, experts=True),
    "deepseek_v32": Family(
        "deepseek_v32", Calls(9, 4, 2, experts=1, gates=1), {**_DEEPSEEK, **_GROUPS, **_SPARSE}, experts=True
    ),
    "glm_moe_dsa": Family(
        "glm_moe_dsa", Calls(9, 4, 2, experts=1, gates=1), {**_DEEPSEEK, **_GROUPS, **_SPARSE}, experts=True
    ),
    "glm4": Family("glm4", Calls(9, 2, 2, 2), _HEAD),
    "glm4_moe": Family(
        "glm4_moe",
        Calls(5, 2, 2, experts=1, gates=1),
        {
            **_HEAD,
            **_EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        experts=True,
    ),
    "gpt_oss": Family(
        "gpt_oss",
        Calls(5, 2, 2, experts=2 * FIFTH),
        {**_HEAD, **_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
        experts=True,
    ),
    "qwen3_next": Family(
        "qwen3_next",
        Calls(8, 1, 1, experts=2, gates=2),
        {
            **_HEAD,
            **_EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
        experts=True,
    ),
    "qwen2_moe": Family(
        "qwen2_moe",
        Calls(5, 2, 2 * FIFTH, experts=2, gates=2),
        {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
        experts=True,
    ),
    "olmoe": Family(
        "olmoe", Calls(9, 2, 2 * FIFTH, experts=2, gates=2), {"num_experts": 4, "num_experts_per_tok": 2}, experts=True
    ),
    "mistral": Family("mistral", Calls(5, 2, 2), _WINDOW),
    "phi3": Family("phi3", Calls(5, 2, 2, 2)),
    "olmo2": Family("olmo2", Calls(9, 2, 2)),
    "llama4_text": Family(
        "llama4_text",
        Calls(7, 1, 2),
        {
            **_HEAD,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "moe_layers": [1],
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 8,
        },
        experts=True,
        module="llama4",
    ),
    "qwen2_5_vl": Family("qwen2_5_vl", Calls(5, 2, 2), tower=Calls(5, 2, 4)),
    "qwen3_vl": Family("qwen3_vl", Calls(9, 2, 2), tower=Calls(0, 2, 4)),
}
VISION = ("qwen2_5_vl", "qwen3_vl")
"""Models with a vision tower."""


def _installed(family: Family) -> bool:
    return importlib.util.find_spec(f"transformers.models.{family.module or family.kind}") is not None


NAMES = tuple(name for name, family in _FAMILIES.items() if _installed(family))
LANGUAGE = tuple(name for name in NAMES if name not in VISION)
"""Causal language models."""
DENSE = tuple(name for name in NAMES if not _FAMILIES[name].experts)
"""Models without experts, vision towers included."""
EXPERTS = tuple(name for name in NAMES if _FAMILIES[name].experts)
"""Models with experts."""


def calls(name: str) -> Calls:
    """Of one forward pass of the language model."""
    return _FAMILIES[name].calls


def tower_calls(name: str) -> Calls:
    """Of one forward pass of the vision tower, of the two pictures of `inputs`."""
    return _FAMILIES[name].tower


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 7, spread: bool = True) -> Any:
    """The model, with the same weights for the same seed, spread out so that nothing is near zero or one.

    Args:
        spread: False leaves the weights as transformers itself initialises them.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0 if spread else seed)
        if name in VISION:
            model = AutoModelForImageTextToText.from_config(_vision_config(name), dtype=dtype)
        else:
            family = _FAMILIES[name]
            config = AutoConfig.for_model(family.kind, **{**_COMMON, **_rope(), **family.own})
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if spread:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                flat = parameter.dim() == 1
                values = torch.randn(parameter.shape, generator=generator) * (0.3 if flat else 0.05)
                parameter.copy_(parameter + values if flat else values)
    return model.to("npu")


def inputs(name: str, batch: int = 2, length: int = 20, seed: int = 3) -> dict[str, Any]:
    """Keyword arguments of a forward without labels; with a vision tower one picture in each row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, VOCABULARY, (batch, length), generator=generator)
    given = {"input_ids": ids}
    if name in VISION:
        ids[:, 6], ids[:, 7:11] = VISION_START, IMAGE
        patch = {"qwen2_5_vl": 14, "qwen3_vl": 16}[name]
        given |= {
            "pixel_values": torch.randn(batch * 16, 3 * 2 * patch * patch, generator=generator),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * batch),
        }
        if _takes(name, "mm_token_type_ids"):
            given["mm_token_type_ids"] = (ids == IMAGE).long()
    return {key: value.to("npu") for key, value in given.items()}


def packed_positions(name: str, rows: list[list[int]]) -> torch.Tensor:
    """`position_ids` of batches whose rows hold sequences of these lengths: (B, S), or (4, B, S) with a vision tower.

    The first of the four is what masks are made of, the others are time, height and width.
    """
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    return (positions.expand(4, -1, -1).contiguous() if name in VISION else positions).to("npu")


def _takes(name: str, argument: str) -> bool:
    from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[CONFIG_MAPPING[name]]
    return argument in inspect.signature(model.forward).parameters


def _rope(**more: Any) -> dict[str, Any]:
    """The settings of plain tables, under the name that the installed version has for them."""
    from transformers import LlamaConfig

    if hasattr(LlamaConfig(), "rope_parameters"):
        return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **more}}
    return {"rope_theta": 1e4, "rope_scaling": {"rope_type": "default", **more} if more else None}


def _vision_config(name: str) -> Any:
    from transformers import AutoConfig

    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64}
    if name == "qwen2_5_vl":
        text = {**_COMMON, **_rope(mrope_section=[2, 3, 3])}
        vision |= {"patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56}
    else:
        text = {**_COMMON, **_HEAD, **_rope(mrope_section=[3, 3, 2], mrope_interleaved=True)}
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
