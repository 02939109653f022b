"""The debug models of every family of torchtitan 0.3.0, on the NPU."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import inspect
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from .models import BATCH, LENGTH, mean_cross_entropy


def build(
    family: str,
    flavor: str = "debugmodel",
    backend: str | None = None,
    dtype: torch.dtype = torch.float32,
    length: int = LENGTH,
    change: Callable[[Any], None] | None = None,
) -> torch.nn.Module:
    """A model with parameters that do not depend on the device's random numbers.

    Args:
        change: is given the config before the model is built.
    """
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.tools.utils import set_default_dtype

    set_spmd_backend("partial_dtensor")
    registry = importlib.import_module(f"torchtitan.models.{family}").model_registry
    parameters, options = inspect.signature(registry).parameters, {}
    if backend is not None and "attn_backend" in parameters:
        options["attn_backend"] = backend
    if "moe_comm_backend" in parameters and parameters["moe_comm_backend"].default is inspect.Parameter.empty:
        options["moe_comm_backend"] = "standard"
    config = registry(flavor, **options).model
    for layer in getattr(config, "layers", ()):
        if getattr(getattr(layer, "attention", None), "rope", None) is not None:
            layer.attention.rope = dataclasses.replace(layer.attention.rope, max_seq_len=length)
    if change is not None:
        change(config)
    with torch.device("meta"), set_default_dtype(dtype):
        model = config.build()
    model.to_empty(device="cpu")
    with torch.no_grad(), set_default_dtype(dtype):
        model.init_weights()
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            parameter.copy_(1 + 0.1 * noise if "norm" in name and "weight" in name else 0.05 * noise)
    return model.to("npu").train()


def first_layers(count: int) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        config.layers = config.layers[:count]

    return change


def dense_layers(count: int) -> Callable[[Any], None]:
    """So many copies of the first layer, which has no experts."""

    def change(config: Any) -> None:
        config.layers = [copy.deepcopy(config.layers[0]) for _ in range(count)]

    return change


def tokens_of(model: Any, batch: int = BATCH, length: int = LENGTH, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size - 2, (batch, length), generator=generator)


def picture(model: Any, tokens: Tensor, grids: tuple[tuple[int, int, int], ...]) -> dict[str, Any]:
    """Inputs for the vision encoder; marks the tokens that stand for patches."""
    vocabulary, encoder = model.config.vocab_size, model.vision_encoder
    family = type(model).__module__.split(".")[2]
    image, video = vocabulary - 1, vocabulary - (1 if family == "kimi_k2_7" else 2)
    embedding = getattr(encoder, "patch_embed", None) or encoder.conv1_linear
    counts = [t * h * w for t, h, w in grids]
    generator = torch.Generator().manual_seed(7)
    size = embedding.weight.shape[1:].numel()
    pixels = torch.randn(len(grids), max(counts), size, generator=generator).to(embedding.weight.dtype)
    merged = 4 if family != "muse_glimmer" else encoder.downsample_factor**2
    for item, count in enumerate(counts):
        start = 3 + 20 * item
        tokens[0, start : start + count // merged] = image
    return {
        "pixel_values": pixels.npu(),
        "grid_thw": torch.tensor(grids).npu(),
        "special_tokens": {"image_id": image, "video_id": video},
    }


def loss_of(
    model: Any,
    positions: Tensor,
    grids: tuple[tuple[int, int, int], ...] = (),
    seed: int = 1,
    criterion: Callable[[Tensor, Tensor], Tensor] = mean_cross_entropy,
) -> Callable[[], Tensor]:
    """A loss for `training_step`; masks are built anew in every call, as the trainer does."""
    tokens, labels = (tokens_of(model, *positions.shape, seed=n) for n in (seed, seed + 100))
    pictures = picture(model, tokens, grids) if grids else {}
    tokens, labels = tokens.npu(), labels.npu()

    def loss() -> Tensor:
        fresh = positions.clone()
        logits = model(tokens, positions=fresh, attention_masks=model.get_attention_masks(fresh), **pictures)
        return criterion(logits, labels)

    return loss


@contextlib.contextmanager
def uncompiled_pictures(builder: Callable[..., Any] = create_block_mask) -> Iterator[None]:
    """Inside: the mask builders of vision encoders run eagerly."""
    import sys

    held = [
        (module, vars(module)["compiled_create_block_mask"])
        for name, module in list(sys.modules.items())
        if name.startswith("torchtitan.models.") and "compiled_create_block_mask" in vars(module)
    ]
    for module, _ in held:
        module.compiled_create_block_mask = builder
    try:
        yield
    finally:
        for module, own in held:
            module.compiled_create_block_mask = own
