"""Debug models with experts, of both generations, shrunk so that a step takes a second."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support import fla

from . import families, previous
from .generation import CURRENT
from .models import packed_positions

ROWS = (48,), (7, 1, 40)
EXPERTS, HIDDEN = 8, 64
TRAINED = 3  # layers, by the trainer


def shrink(count: int, start: int = 0) -> Callable[[Any], None]:
    """So many layers from `start` on, with few and narrow experts."""

    def change(config: Any) -> None:
        config.layers = config.layers[start : start + count]
        for layer in config.layers:
            moe = getattr(layer, "moe", None)
            if moe is None:
                continue
            routed, router = moe.routed_experts, moe.router
            moe.num_experts = router.num_experts = router.gate.out_features = EXPERTS
            routed.inner_experts.num_experts = routed.token_dispatcher.num_experts = EXPERTS
            routed.inner_experts.hidden_dim = HIDDEN
            router.top_k = routed.token_dispatcher.top_k = min(router.top_k, 3)

    return change


def settle(model: torch.nn.Module) -> torch.nn.Module:
    """Routers that prefer some experts by far, so that no rounding error changes a choice."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate.weight" in name or "router" in name:
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
                parameter.copy_(0.5 * noise)
    return model


CURRENT_MODELS = {  # flavor and which layers; each of them has experts
    "qwen3": ("debugmodel_moe", 2, 0),
    "deepseek_v3": ("debugmodel", 2, 1),
    "gpt_oss": ("debugmodel", 2, 0),
    "kimi_k2_7": ("debugmodel", 2, 1),
    "qwen3_5": ("debugmodel_moe", 2, 2),
}


def current(family: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Callable[[], torch.Tensor]]:
    """A model of 0.3.0 and its loss."""
    if family == "qwen3_5":
        fla.install()
    flavor, count, start = CURRENT_MODELS[family]
    model = settle(families.build(family, flavor, "flex", dtype, change=shrink(count, start)))
    return model, families.loss_of(model, packed_positions(*ROWS), pictures_of(model))


def pictures_of(model: Any) -> tuple[tuple[int, int, int], ...]:
    """What a model that sees is shown."""
    return ((1, 4, 4), (1, 2, 4)) if getattr(model, "vision_encoder", None) is not None else ()


PREVIOUS_MODELS = ("llama4", "qwen3", "deepseek_v3", "gpt_oss")


def earlier(
    family: str, dtype: torch.dtype = torch.float32, grouped: bool = False, **moe: Any
) -> tuple[Any, Callable[[], torch.Tensor]]:
    """A model of 0.2.2 and its loss.

    Args:
        grouped: grouped products instead of a loop over the experts, which the trainer runs on an NPU in most models.
        moe: fields of its `moe_args`.
    """
    from torchtitan.tools.utils import set_default_dtype

    spec = importlib.import_module(f"torchtitan.models.{family}").get_train_spec()
    arguments = spec.model_args["debugmodel_moe" if family == "qwen3" else "debugmodel"]
    own = arguments.moe_args
    fields = {"num_experts": EXPERTS, "top_k": min(own.top_k, 3), "use_grouped_mm": grouped, **moe}
    changes: dict[str, Any] = {"n_layers": 3 if family == "deepseek_v3" else 2, "max_seq_len": 48}
    changes["moe_args"] = dataclasses.replace(own, **fields)
    if hasattr(arguments, "moe_inter_dim"):
        changes["moe_inter_dim"] = HIDDEN
    if family == "llama4":
        changes["interleave_moe_layer_step"] = 1
    arguments = dataclasses.replace(arguments, **changes)
    if family == "deepseek_v3":
        arguments.moe_impl = "standard"
    with torch.device("meta"), set_default_dtype(dtype):
        model = spec.model_cls(arguments)
    model.to_empty(device="cpu")
    with torch.no_grad(), set_default_dtype(dtype):
        model.init_weights(buffer_device=torch.device("cpu"))
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            parameter.data = parameter.data.to(dtype)  # some of gpt_oss are bfloat16 in any model
            parameter.copy_(1 + 0.1 * noise if "norm" in name and "weight" in name else 0.05 * noise)
    model = settle(model).to("npu").train()
    return model, previous.loss_of(model, previous.documents(*ROWS))


def made(family: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Callable[[], torch.Tensor]]:
    """A model of the installed generation."""
    return current(family, dtype) if CURRENT else earlier(family, dtype)


FAMILIES = tuple(CURRENT_MODELS) if CURRENT else PREVIOUS_MODELS


@contextlib.contextmanager
def without_bfloat16() -> Iterator[None]:
    """Inside: the experts of 0.3.0, which compute in bfloat16 whatever they are given, compute in its type."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", lambda self: self)
        yield
