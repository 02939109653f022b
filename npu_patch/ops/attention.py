"""Scaled dot product attention: `npu_fusion_attention`, under torch.compile `npu_fusion_attention_v3`.

Source: operator documents torch_npu.npu_fusion_attention and npu_fusion_attention_v3 (op-plugin),
aclnnFlashAttentionScoreV2 and aclnnFlashAttentionVarLenScoreV2 to V5 (ops-transformer/attention/flash_attention_score).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .availability import is_ascend950, schema_has
from .guards import FLOATS, FUNCTORCH, NOT_ON_NPU, dtype_name, keep, subclass_reason, transforming
from .masks import Mask, MaskFacts, TensorFacts
from .per_tensor import Derived
from .verdicts import Verdicts

__all__ = ["SAVE_OPS", "Mask", "attention", "unsupported"]

_AXES = {"BNSD": (1, 2), "BSND": (2, 1), "TND": (1, 0)}  # heads, length
LAYOUTS = tuple(_AXES)
_UNKNOWN = "layout {!r}: expected one of " + ", ".join(LAYOUTS)
_MAX_HEAD_SIZE, _MAX_HEADS, _MAX_LENGTH, _MAX_BATCH, _MAX_DOCUMENTS = 768, 256, 1 << 20, 1 << 21, 1024
_TRIANGLE = 2048  # side of the compressed mask of sparse modes 2 to 4, whatever the sequence lengths


def unsupported(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    *,
    layout: str,
    scale: float | None = None,
    dropout: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> str | None:
    """Why the fused operator cannot take this call, or None.  The arguments are those of `attention`."""
    plain = type(query) is type(key) is type(value) is Tensor
    if not plain and (reason := subclass_reason(query, key, value)):
        return reason
    if transforming():
        return FUNCTORCH
    if dropout != 0.0 and (reason := _dropout_reason(dropout, layout)):
        return reason
    dtype, device = query.dtype, query.device
    if key.dtype is not dtype or value.dtype is not dtype:
        return "query, key and value differ in type"
    if key.device != device or value.device != device:
        return "key or value is on another device"
    biased = None if mask.bias is None or scale is None else float(scale)
    if is_compiling():
        reason = _compiling_reason() or judge(
            query.shape, key.shape, value.shape, dtype, device, layout, mask.describe(), biased
        )
    else:
        facts = (query.shape, key.shape, value.shape, dtype, device, layout, mask.facts, biased)
        reason = _verdicts[facts] if plain else judge(*facts)
    if sinks is None and not return_lse:
        return reason
    if reason is None and sinks is not None:
        reason = _sinks_reason(sinks, _sizes(query.shape, layout)[1])
    if reason is None and return_lse:
        reason = _lse_reason(query, key, layout)
    return reason


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
    """`unsupported` for a query, key and value of these shapes, of one dtype and on one device.

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
    batch, heads, q_len, size = _sizes(query, layout)
    kv_batch, kv_heads, kv_len, key_size = _sizes(key, layout)
    value_batch, value_heads, value_len, value_size = _sizes(value, layout)
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


_verdicts = Verdicts(judge)


def _dropout_reason(dropout: float, layout: str) -> str | None:
    if not 0.0 < dropout < 1.0:
        return "a dropout that is not between 0 and 1"
    if layout == "TND":
        return "dropout of packed documents"
    return "dropout under torch.compile" if is_compiling() else None


def _compiling_reason() -> str | None:
    if not schema_has("npu_fusion_attention_v3"):
        return "torch.compile needs npu_fusion_attention_v3"
    if is_ascend950():
        return "torch.compile needs npu_fusion_attention_v3, which Ascend950 lacks"
    return None


def _sizes(shape: Sequence[int], layout: str) -> tuple[int, int, int, int]:
    """Batch (1 in TND), heads, length and head size."""
    if layout == "BSND":
        return shape[0], shape[2], shape[1], shape[3]
    if layout == "BNSD":
        return shape[0], shape[1], shape[2], shape[3]
    if layout == "TND":
        return 1, shape[1], shape[0], shape[2]
    raise ValueError(_UNKNOWN.format(layout))


def _sinks_reason(sinks: Tensor, heads: int) -> str | None:
    if reason := subclass_reason(sinks):
        return reason
    if not schema_has("npu_fusion_attention", "sink"):
        return "this torch_npu has no attention sinks"
    if is_ascend950():
        return "Ascend950 ignores attention sinks"
    if sinks.dtype != torch.float32 or sinks.device.type != "npu" or tuple(sinks.shape) != (heads,):
        return "sinks are not one float32 for each query head, on the NPU"
    return None


def _lse_reason(query: Tensor, key: Tensor, layout: str) -> str | None:
    # The operator's derivative takes the gradient of its first output only: others would be lost silently.
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        return "gradient through the log-sum-exp"
    if layout == "TND" and not schema_has("npu_fusion_attention", "softmax_layout"):
        return "log-sum-exp of packed documents"
    return None


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


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    *,
    layout: str,
    scale: float | None = None,
    dropout: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """`softmax(scale * query @ key.T, over what the mask shows) @ value`; query heads share key and value heads.

    Args:
        query: (B, N, Sq, D), (B, Sq, N, D) or (T, N, D) as `layout` says; float16, bfloat16 or float32.
        key: the same with Nkv heads, N a multiple of Nkv.
        value: as key, with a head size Dv <= D.
        mask: what each query may see.
        layout: "BNSD", "BSND" or "TND".
        scale: None means D ** -0.5.
        dropout: the share of probabilities that are dropped, the others being divided by 1 - dropout; drawn from the
            device's generator by the operator itself, which is also what torch_npu's own attention runs.
        sinks: (N,) float32, a logit of each head that takes part in the softmax and is then dropped.
        return_lse: also return the log-sum-exp of the scaled scores, without gradient.

    Returns:
        The output in the layout and dtype of the query, with head size Dv; a query that sees no key gets zeros.  With
        `return_lse` a pair: the output, and float32 (B, N, Sq), in TND (T, N).

    Raises:
        RuntimeError: the operator refuses the arguments; ask `unsupported` first.
        ValueError: an unknown layout.
    """
    if layout not in _AXES:
        raise ValueError(_UNKNOWN.format(layout))
    heads_at, length_at = _AXES[layout]
    shape = query.shape
    heads, q_len, kv_len = shape[heads_at], shape[length_at], key.shape[length_at]
    if scale is None:
        scale = shape[-1] ** -0.5
    if mask.bias is not None and not mask.hard_bias:
        mask = _with_infinities_hidden(mask, mask.bias, q_len, kv_len)
    options = _mask_options(mask, query, q_len, kv_len)
    if mask.bias is not None:
        options["pse"] = _pse(mask.bias, mask.hard_bias, scale, heads, q_len, kv_len)
    if sinks is not None:
        options["sink"] = sinks
    if dropout != 0.0:
        options["keep_prob"] = 1.0 - dropout
    if return_lse and layout == "TND":
        options["softmax_layout"] = "TND"  # the default is data ordered (N, T, 8) in a (T, N, 8) tensor
    if is_compiling():  # the shape functions promise the strides of the inputs, the operator's results are contiguous
        operator = torch.ops.npu.npu_fusion_attention_v3
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    else:
        operator = torch.ops.npu.npu_fusion_attention
    results = operator.default(query, key, value, heads, layout, scale=scale, **options)
    if not return_lse:
        return results[0]
    output, maximum, total = results[:3]
    # Both statistics hold one number eight times.
    return output, (maximum[..., 0] + total[..., 0].log()).detach()


def _mask_options(mask: Mask, query: Tensor, q_len: int, kv_len: int) -> dict[str, Any]:
    """The operator's arguments for a mask.  Without atten_mask it ignores sparse_mode: causal always comes with one."""
    kind = mask.kind
    if kind == "full":
        return {}
    if kind == "causal" or (kind == "band" and mask.window >= kv_len):  # type: ignore[operator]
        if mask.alignment == "upper_left":
            return {"atten_mask": _triangle(query.device), "sparse_mode": 2}
        if q_len == 1:
            return {}
        return _rows(q_len > kv_len, {"atten_mask": _triangle(query.device), "sparse_mode": 3})
    if kind == "band":
        return _rows(q_len > kv_len, _band(mask.window, query.device))
    if kind == "dense":
        hidden = mask.hidden
        assert hidden is not None
        shape = hidden.shape
        if shape[-2] != q_len:
            hidden = hidden.expand(*shape[:-2], q_len, shape[-1])
        if len(shape) == 4 and shape[0] == 1 and shape[1] != 1:
            # (1, N, Sq, Skv) is not among the operator's shapes.
            hidden = hidden.expand(query.shape[0], -1, -1, -1)
        return _rows(mask.may_hide_rows, {"atten_mask": hidden, "sparse_mode": 1})
    options: dict[str, Any] = {}
    if mask.is_causal and mask.window is not None:
        options = _band(mask.window, query.device)
    elif mask.is_causal:
        options = {"atten_mask": _triangle(query.device), "sparse_mode": 3}
    if is_compiling():  # v3 takes them as tensors on the host
        options["actual_seq_qlen"] = torch.tensor(mask.q_ends, dtype=torch.int64, device="cpu")
        options["actual_seq_kvlen"] = torch.tensor(mask.kv_ends, dtype=torch.int64, device="cpu")
    else:
        options["actual_seq_qlen"] = mask.q_ends
        options["actual_seq_kvlen"] = mask.kv_ends
    return options


def _band(window: int | None, device: torch.device) -> dict[str, Any]:
    assert window is not None
    return {"atten_mask": _triangle(device), "sparse_mode": 4, "pre_tockens": window - 1, "next_tockens": 0}


def _rows(may_hide: bool, options: dict[str, Any]) -> dict[str, Any]:
    """With inner_precise=2 the operator takes care of queries that see no key; it is slower."""
    if may_hide:
        options["inner_precise"] = 2
    return options


def _pse(bias: Tensor, hard: bool, scale: float, heads: int, q_len: int, kv_len: int) -> Tensor:
    """The bias as the operator takes it: added before scaling, of a full shape but for the batch, and finite.

    A bias of the type's lowest number, which hides a key, would overflow when divided by a scale below 1; a row of it
    gives equal weights.
    """
    if hard:
        return bias.expand(bias.shape[0], heads, q_len, kv_len)
    limit = torch.finfo(bias.dtype)
    return (bias / scale).clamp(limit.min, limit.max).expand(bias.shape[0], heads, q_len, kv_len)


_infinite = Derived(lambda bias: bias.detach() == -math.inf)


def _with_infinities_hidden(mask: Mask, bias: Tensor, q_len: int, kv_len: int) -> Mask:
    """The mask written out, with the keys that a bias of -inf hides.

    As a number in the operator's bias -inf would be the lowest one, and a row of it would give equal weights, not 0.
    """
    hidden = _infinite(bias)
    if mask.kind == "dense":
        assert mask.hidden is not None
        hidden = hidden | mask.hidden
    elif mask.kind != "full":
        ahead = kv_len - q_len if mask.alignment == "lower_right" else 0
        distance = torch.arange(kv_len, device=bias.device) - torch.arange(q_len, device=bias.device)[:, None] - ahead
        hidden = hidden | (distance > 0)
        if mask.window is not None:
            hidden = hidden | (distance <= -mask.window)
    return Mask.dense(hidden.expand(*hidden.shape[:-1], kv_len)).with_bias(bias)


_triangles: dict[torch.device, Tensor] = {}


def _triangle(device: torch.device) -> Tensor:
    """True above the diagonal, (2048, 2048): made once per device, on the device."""
    triangle = _triangles.get(device)
    if triangle is None:
        with torch.inference_mode(False):
            triangle = torch.ones(_TRIANGLE, _TRIANGLE, device=device, dtype=torch.float32).triu(1).bool()
        if keep(triangle):
            _triangles[device] = triangle
    return triangle


# torch.compile calls this while it traces and puts the one tensor into the graph as a constant.
_triangle._dynamo_marked_constant = True  # type: ignore[attr-defined]


def SAVE_OPS() -> list[Any]:
    """The operator overloads that selective activation checkpointing should save, as far as they exist here."""
    names = ("npu_fusion_attention", "npu_fusion_attention_v3")
    return [getattr(torch.ops.npu, name).default for name in names if schema_has(name)]
