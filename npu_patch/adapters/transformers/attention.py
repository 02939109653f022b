"""The `sdpa` entry of transformers' attention registry.

Replacing the entry reaches models that exist already, remote code and compiled models; replacing the function's names
would not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, is_autocast_enabled
from torch.compiler import is_compiling

from ...discovery import NotRecognised, foreign_code
from ...discovery.sdpa import recognise_sdpa
from ...ops import attention as op
from ...ops.guards import NOT_ON_NPU
from ...registry import Target, Unrecognised
from ...sites import Site
from . import LIBRARY, additive_masks, eager_attention, flash_attention, masks
from .fused import HARMLESS, dense_of, fused, hidden_where_not_zero, packed

_OP = "attention"
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
_ENTRY = "sdpa"


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """The `sdpa` and flash entries of the registry, mask builders, eager functions, as far as the module has them."""
    yield from masks.find(module)
    yield from additive_masks.find(module)
    yield from eager_attention.find(module)
    yield from flash_attention.find(module)
    registry = getattr(module, _REGISTRY, None)
    if registry is None or getattr(type(registry), "__module__", None) != module.__name__:
        return
    path = f"{_REGISTRY}[{_ENTRY}]"
    try:
        with foreign_code():
            entry = getattr(type(registry), "_global_mapping", registry)[_ENTRY]
            recognise_sdpa(entry)
            factory = adapter(entry)
    except NotRecognised as error:
        yield Unrecognised(_OP, LIBRARY, module.__name__, path, str(error))
        return
    yield Target(_OP, LIBRARY, module.__name__, path, factory, "scaled dot product")


def adapter(entry: FunctionType) -> Callable[[Any, Site], Callable[..., Any]]:
    """A factory for the entry's function, by its parameters.

    Raises:
        NotRecognised: they are not those of a known version.
    """
    code = entry.__code__
    names = code.co_varnames[: code.co_argcount]
    if names[:8] != _PARAMETERS or names[8:] not in ((), ("position_bias",)):
        raise NotRecognised(f"takes ({', '.join(names)})")
    return _with_position_bias if names[8:] else _without_position_bias


_harmless = HARMLESS.issuperset
_FULL, _CAUSAL = op.Mask.full(), op.Mask.causal("upper_left")
_PARAMETERS = ("module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal")


def _with_position_bias(original: Any, site: Site) -> Callable[..., Any]:
    def sdpa(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if position_bias is not None:
            why = "position_bias"
        else:
            reason, output = _attend(
                module, query, key, value, attention_mask, dropout, scaling, is_causal, kwargs, site
            )
            if reason is None:
                return output, None
            why = reason
            if attention_mask is not None and attention_mask.is_floating_point():
                # The original turns an additive mask into a bool one on an NPU; as a position bias it leaves it alone.
                position_bias, attention_mask, is_causal = attention_mask, None, False
        site.fallback(why)
        kwargs.update(dropout=dropout, scaling=scaling, is_causal=is_causal, position_bias=position_bias)
        return original(module, query, key, value, attention_mask, **kwargs)

    return sdpa


def _without_position_bias(original: Any, site: Site) -> Callable[..., Any]:
    def sdpa(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        reason, output = _attend(module, query, key, value, attention_mask, dropout, scaling, is_causal, kwargs, site)
        if reason is None:
            return output, None
        site.fallback(reason)
        if attention_mask is not None and attention_mask.is_floating_point() and query.device.type == "npu":
            return _added(module, query, key, value, attention_mask, dropout, scaling), None
        kwargs.update(dropout=dropout, scaling=scaling, is_causal=is_causal)
        return original(module, query, key, value, attention_mask, **kwargs)

    return sdpa


def _added(
    module: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, dropout: float, scaling: float | None
) -> Tensor:
    """With an additive mask, which the original turns into a bool one on an NPU."""
    groups = getattr(module, "num_key_value_groups", 1)
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    if bias.dim() == 4:
        bias = bias[..., : key.shape[2]]
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout, scale=scaling)
    return output.transpose(1, 2).contiguous()


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    kwargs: Mapping[str, Any],
    site: Site,
) -> tuple[str | None, Any]:
    """(reason, None) or (None, output of shape (B, S, N, Dv), contiguous)."""
    if kwargs and not _harmless(kwargs):
        for name, given in kwargs.items():
            if name not in HARMLESS and given is not None and given is not False:
                return f"keyword {name}", None
    groups = getattr(module, "num_key_value_groups", 1)
    shape, key_shape = query.shape, key.shape
    if len(shape) != 4 or len(key_shape) != 4 or shape[1] != (key_shape[1] * groups if groups > 1 else key_shape[1]):
        return "query heads are not key heads times num_key_value_groups", None
    if is_autocast_enabled("npu"):  # the stock function is cast by autocast, the operator is not
        dtype = torch.get_autocast_dtype("npu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    eager = not is_compiling()
    if attention_mask is not None:
        built = masks.built(attention_mask) if eager else None
        if built is not None:
            known = built.mask
            if known is None or built.q_len != shape[2] or built.kv_len != key_shape[2] or built.batch != shape[0]:
                known = built.written
            if known is not None:
                if known.kind != "documents":
                    return fused(query, key, value, known, scaling, site, None, dropout, eager)
                reason, output = packed(query, key, value, known, scaling, site, None, dropout, eager)
                if reason is None:
                    return None, output
        if attention_mask.dtype is torch.bool:
            if query.device.type != "npu":  # before anything is made of the mask
                return NOT_ON_NPU, None
            mask = dense_of(attention_mask)
            if built is not None and dense_of.get(attention_mask) is mask:
                built.written = mask
        elif attention_mask.is_floating_point():
            hard = masks.is_hard(attention_mask)
            mask = hidden_where_not_zero(attention_mask) if hard else op.Mask.full().with_bias(attention_mask)
        else:
            return f"a mask of type {str(attention_mask.dtype).removeprefix('torch.')}", None
    elif shape[2] > 1 and (is_causal if is_causal is not None else getattr(module, "is_causal", True)):
        if key_shape[2] > (q_len := shape[2]):  # an empty static cache: what lies behind the queries is not filled yet
            key, value = key[:, :, :q_len], value[:, :, :q_len]
        mask = _CAUSAL
    else:
        mask = _FULL
    return fused(query, key, value, mask, scaling, site, None, dropout, eager)
