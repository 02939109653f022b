"""Scaled dot product attention: `npu_fusion_attention`, under torch.compile `npu_fusion_attention_v3`.

Source: operator documents torch_npu.npu_fusion_attention and npu_fusion_attention_v3 (op-plugin),
aclnnFlashAttentionScoreV2 and aclnnFlashAttentionVarLenScoreV2 to V5 (ops-transformer/attention/flash_attention_score).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .attention_limits import AXES, LAYOUTS, UNKNOWN_LAYOUT, judge, sizes
from .availability import is_ascend950, schema_has, soc_name
from .guards import FUNCTORCH, keep, subclass_reason, transforming
from .masks import Mask
from .per_tensor import Derived
from .verdicts import MOST, Verdicts

__all__ = ["LAYOUTS", "SAVE_OPS", "Mask", "Plan", "attend", "attention", "plan", "run", "unsupported"]

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
        reason = _sinks_reason(sinks, sizes(query.shape, layout)[1])
    if reason is None and return_lse:
        reason = _lse_reason(query, key, layout)
    return reason


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
    if layout not in AXES:
        raise ValueError(UNKNOWN_LAYOUT.format(layout))
    heads_at, length_at = AXES[layout]
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


Plan = tuple[int, str, dict[str, Any]]
"""What the operator gets beside query, key and value: the number of heads, the layout, and keywords."""


def plan(query: Tensor, key: Tensor, value: Tensor, mask: Mask, layout: str, scale: float | None) -> str | Plan | None:
    """`unsupported` and the operator's arguments in one, made once per mask and kind of tensors.

    For plain tensors of one dtype on one device, without dropout and sinks, outside of compilation and of transforms.

    Returns:
        The reason; or the arguments; or None where they cannot be had once for many calls.
    """
    facts = (query.shape, key.shape, value.shape, query.dtype, query.get_device(), layout, scale)
    known: str | Plan | None = mask.plans.get(facts)
    if known is not None or mask.bias is not None:
        return known
    made: str | Plan | None = judge(*facts[:4], query.device, layout, mask.facts, None)
    if made is None:
        shape, (heads_at, length_at) = query.shape, AXES[layout]
        with torch.inference_mode(False):
            options = _mask_options(mask, query, shape[length_at], key.shape[length_at])
        hidden = options.get("atten_mask")
        if hidden is not None and not keep(hidden):
            return None
        made = (shape[heads_at], layout, {"scale": shape[-1] ** -0.5 if scale is None else scale, **options})
    if soc_name():
        if len(mask.plans) >= MOST:
            mask.plans.clear()
        mask.plans[facts] = made
    return made


def run(plan: Plan, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`attention` of tensors that the plan was made for."""
    heads, layout, options = plan
    output: Tensor = torch.ops.npu.npu_fusion_attention.default(query, key, value, heads, layout, **options)[0]
    return output


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    layout: str,
    scale: float | None = None,
    dropout: float = 0.0,
    sinks: Tensor | None = None,
    eager: bool | None = None,
) -> tuple[str | None, Any]:
    """`unsupported` and `attention` in one, with the same arguments.

    Args:
        eager: whether nothing compiles, where the caller has asked.

    Returns:
        (reason, None), or (None, output).
    """
    if (
        type(query) is type(key) is type(value) is Tensor
        and dropout == 0.0
        and sinks is None
        and (eager or (eager is None and not is_compiling()))
        and not transforming()
        and key.dtype is (dtype := query.dtype)
        and value.dtype is dtype
        # -1 is the host; beside it a process with an NPU has no other kind of device.
        and key.get_device() == (index := query.get_device())
        and value.get_device() == index
    ):
        known = mask.plans.get((query.shape, key.shape, value.shape, dtype, index, layout, scale))
        if known is None:
            known = plan(query, key, value, mask, layout, scale)
        if known is not None:
            if isinstance(known, str):
                return known, None
            heads, layout, options = known
            return None, torch.ops.npu.npu_fusion_attention.default(query, key, value, heads, layout, **options)[0]
    reason = unsupported(query, key, value, mask, layout=layout, scale=scale, dropout=dropout, sinks=sinks)
    if reason is not None:
        return reason, None
    return None, attention(query, key, value, mask, layout=layout, scale=scale, dropout=dropout, sinks=sinks)


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
