"""The debug models of torchtitan 0.2.2 on the NPU, and torchtitan 0.2.2 as it is without a compiler."""

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

from .models import mean_cross_entropy

BATCH, LENGTH = 2, 48
EOS = 7


class Tokenizer:
    eos_id = EOS


def build(
    family: str, flavor: str = "debugmodel", dtype: torch.dtype = torch.float32, length: int = LENGTH, **changes: Any
) -> torch.nn.Module:
    """A model without experts, with parameters that do not depend on the device's random numbers.

    Args:
        changes: arguments of the model that are not the flavor's.
    """
    from torchtitan.tools.utils import set_default_dtype

    spec = importlib.import_module(f"torchtitan.models.{family}").get_train_spec()
    arguments = dataclasses.replace(spec.model_args[flavor], max_seq_len=length, **changes)
    with torch.device("meta"), set_default_dtype(dtype):
        model = spec.model_cls(arguments)
    for layer in model.layers.values():
        if getattr(layer, "moe_enabled", False):
            layer.moe = _Nothing()
    model.to_empty(device="cpu")
    with torch.no_grad(), set_default_dtype(dtype):
        model.init_weights(buffer_device=torch.device("cpu"))
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            parameter.data = parameter.data.to(dtype)  # some of gpt_oss are bfloat16 in any model
            parameter.copy_(1 + 0.1 * noise if "norm" in name and "weight" in name else 0.05 * noise)
    return model.to("npu").train()


class _Nothing(torch.nn.Identity):
    def init_weights(self, *args: Any, **kwargs: Any) -> None:
        pass


def documents(*rows: tuple[int, ...]) -> Tensor:
    """Tokens whose documents have the given lengths; the last one of each says so, but for that of the row."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(EOS + 1, 2048, (len(rows), sum(rows[0])), generator=generator)
    for row, lengths in zip(tokens, rows, strict=True):
        ends = torch.tensor(lengths).cumsum(0)[:-1] - 1
        row[ends] = EOS
    return tokens.npu()


def loss_of(
    model: Any, tokens: Tensor, criterion: Callable[[Tensor, Tensor], Tensor] = mean_cross_entropy
) -> Callable[[], Tensor]:
    """A loss for `training_step`; masks are built anew in every call, as the trainer does."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, 2048, tokens.shape, generator=generator).npu()
    masked = getattr(model.model_args, "attn_type", "flex") in ("flex", "varlen")

    def loss() -> Tensor:
        fresh = tokens.clone()
        masks = {"attention_masks": model.get_attention_masks(fresh, Tokenizer())} if masked else {}
        return criterion(model(fresh, **masks), labels)

    return loss


@contextlib.contextmanager
def _held(flex_attention: Any, builder: Any, varlen: Any, debug: bool) -> Iterator[None]:
    from torchtitan.models import attention

    places = (
        (flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", debug),
        (attention.FlexAttentionWrapper, "_compiled_flex_attn", flex_attention),
        (attention, "_compiled_create_block_mask", builder),
        (attention.VarlenAttentionWrapper, "_compiled_varlen_attn", varlen),
    )
    before = [vars(owner)[name] for owner, name, _ in places]
    for owner, name, value in places:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(places, before, strict=True):
            setattr(owner, name, value)


def uncompiled() -> contextlib.AbstractContextManager[None]:
    """Inside: flex attention and mask builders run eagerly, packed documents in the stand-in."""
    from .stand_ins import varlen_attn

    return _held(flex.flex_attention, flex.create_block_mask, staticmethod(varlen_attn), True)


def uncompilable() -> contextlib.AbstractContextManager[None]:
    """Inside: every compiled function of torchtitan's attention raises when it is called."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a compiled function was called")

    return _held(refuse, refuse, staticmethod(refuse), flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG)
