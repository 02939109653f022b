"""What the fused attention takes: shapes, dtypes, layouts and masks.

Source: operator documents torch_npu.npu_fusion_attention (op-plugin), aclnnFlashAttentionScoreV2 and
aclnnFlashAttentionVarLenScoreV2 to V5 (ops-transformer/attention/flash_attention_score).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .guards import FLOATS, NOT_ON_NPU, dtype_name
from .masks import MaskFacts, TensorFacts

AXES = {"BNSD": (1, 2), "BSND": (2, 1), "TND": (1, 0)}  # heads, length
LAYOUTS = tuple(AXES)
UNKNOWN_LAYOUT = "layout {!r}: expected one of " + ", ".join(LAYOUTS)
_MAX_HEAD_SIZE, _MAX_HEADS, _MAX_LENGTH, _MAX_BATCH, _MAX_DOCUMENTS = 768, 256, 1 << 20, 1 << 21, 1024


def judge(
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    layout: str,
    mask: MaskFacts,
    scale: float | None,
) -> str | None:
    """Why the operator cannot take a query, key and value of these shapes, one dtype and one device, or None.

    Args:
        scale: counts where the mask has a bias.
    """
    if device.type != "npu":
        return NOT_ON_NPU
    if mask.subclass is not None:
        return mask.subclass
    if dtype not in FLOATS:
        return f"query of type {dtype_name(dtype)}"
    rank = 3 if layout == "TND" else 4
    if len(query) != rank or len(key) != rank or len(value) != rank:
        return f"query, key and value are not {rank}-D"
    batch, heads, q_len, size = sizes(query, layout)
    kv_batch, kv_heads, kv_len, key_size = sizes(key, layout)
    value_batch, value_heads, value_len, value_size = sizes(value, layout)
    if kv_batch != batch or value_batch != batch or value_heads != kv_heads or value_len != kv_len:
        return "key and value do not fit together or to the query"
    if batch == 0 or q_len == 0 or kv_len == 0 or kv_heads == 0 or value_size == 0:
        return "an input is empty"
    if key_size != size:
        return "query and key head sizes differ"
    if value_size > size:
        return "value head size above query head size"
    if size > _MAX_HEAD_SIZE:
        return "head size above 768"
    if heads % kv_heads:
        return "query heads are not a multiple of key heads"
    if heads > _MAX_HEADS:
        return "more than 256 heads"
    if q_len > _MAX_LENGTH or kv_len > _MAX_LENGTH or batch > _MAX_BATCH:
        return "sequence or batch beyond the operator's limit"
    if (layout == "TND") != (mask.kind == "documents"):
        return "packed documents need the TND layout, and TND needs documents"
    if mask.kind == "documents":
        return _documents_reason(mask, q_len, kv_len)
    if mask.kind == "dense" and (reason := _dense_reason(mask.hidden, batch, heads, q_len, kv_len)):
        return reason
    if mask.bias is not None:
        scale = size**-0.5 if scale is None else scale
        return _bias_reason(mask.bias, mask.hard_bias, dtype, scale, batch, heads, q_len, kv_len)
    return None


def sizes(shape: Sequence[int], layout: str) -> tuple[int, int, int, int]:
    """Batch (1 in TND), heads, length and head size."""
    if layout == "BSND":
        return shape[0], shape[2], shape[1], shape[3]
    if layout == "BNSD":
        return shape[0], shape[1], shape[2], shape[3]
    if layout == "TND":
        return 1, shape[1], shape[0], shape[2]
    raise ValueError(UNKNOWN_LAYOUT.format(layout))


def _documents_reason(mask: MaskFacts, q_len: int, kv_len: int) -> str | None:
    if mask.bias is not None:
        return "a bias on packed documents"
    if mask.documents > _MAX_DOCUMENTS:
        return "more than 1024 documents"
    if mask.ends != (q_len, kv_len):
        return "the document ends are not the packed length"
    if mask.may_hide_rows:
        return "a query without a visible key in packed documents"
    return None


def _dense_reason(hidden: TensorFacts | None, batch: int, heads: int, q_len: int, kv_len: int) -> str | None:
    if hidden is None or hidden.dtype != torch.bool or hidden.device.type != "npu":
        return "the dense mask is not a bool tensor on the NPU"
    shape = hidden.shape
    if len(shape) not in (2, 4) or shape[-1] != kv_len or shape[-2] not in (1, q_len):
        return "the dense mask's shape"
    if len(shape) == 4 and (shape[0] not in (1, batch) or shape[1] not in (1, heads)):
        return "the dense mask's shape"
    return None


def _bias_reason(
    bias: TensorFacts,
    hard: bool,
    dtype: torch.dtype,
    scale: float,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
) -> str | None:
    if bias.device.type != "npu" or len(bias.shape) != 4:
        return "the bias is not a 4-D tensor on the NPU"
    for size, own in zip((batch, heads, q_len, kv_len), bias.shape, strict=True):
        if own != size and own != 1:
            return "the bias does not broadcast to the scores"
    if bias.dtype != dtype:
        return "the bias is not in the query's type"
    # The operator adds before it scales: softmax(scale * (q k + bias / scale)).
    if dtype == torch.float16:
        return "a float16 bias may overflow when it is divided by the scale"
    if hard:  # 0 and the lowest number, as they are: neither is rounded, and the lowest number drowns every score
        return None if 2**-20 <= scale <= 1.0 else "a bias is exact only with a scale from 2**-20 to 1"
    if scale <= 0.0 or (dtype != torch.float32 and math.frexp(scale)[0] != 0.5):
        return "a bias is exact only with a scale that is a power of two"
    return None
