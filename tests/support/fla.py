"""A stand-in for the part of the package `fla` that torchtitan's qwen3_5 imports; its own needs a GPU."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types
from typing import Any

import torch
from torch import Tensor


def causal_conv1d(x: Tensor, weight: Tensor, cu_seqlens: Tensor, **_: Any) -> tuple[Tensor, None]:
    """A depthwise causal convolution of (1, T, D) that starts anew at every document, then silu."""
    size, parts = weight.shape[1], []
    ends = cu_seqlens.tolist()
    for start, end in itertools.pairwise(ends):
        padded = torch.nn.functional.pad(x[:, start:end].transpose(1, 2), (size - 1, 0))
        parts.append((padded.unfold(-1, size, 1) * weight[:, None, :]).sum(-1))
    return torch.nn.functional.silu(torch.cat(parts, -1)).transpose(1, 2), None


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **keywords: Any) -> tuple[Tensor, None]:
    """The recurrence, a token at a time, in float32: q, k (B, T, N, K), v (B, T, N, V), g, beta (B, T, N)."""
    starts = set() if keywords.get("cu_seqlens") is None else set(keywords["cu_seqlens"].tolist())
    q, k = (torch.nn.functional.normalize(x.float(), dim=-1) for x in (q, k))
    q, values, decay, rate = q * q.shape[-1] ** -0.5, v.float(), g.float().exp(), beta.float()
    empty = values.new_zeros(*v.shape[:1], *v.shape[2:3], k.shape[-1], v.shape[-1])
    state, outputs = empty, []
    for t in range(v.shape[1]):
        state = (empty if t in starts else state) * decay[:, t, :, None, None]
        change = (values[:, t] - torch.einsum("bnk,bnkv->bnv", k[:, t], state)) * rate[:, t, :, None]
        state = state + torch.einsum("bnk,bnv->bnkv", k[:, t], change)
        outputs.append(torch.einsum("bnk,bnkv->bnv", q[:, t], state))
    return torch.stack(outputs, 1).to(v.dtype), None


_MODULES: dict[str, dict[str, Any]] = {
    "fla": {},
    "fla.modules": {},
    "fla.modules.conv": {},
    "fla.modules.conv.causal_conv1d": {"causal_conv1d": causal_conv1d},
    "fla.modules.conv.triton": {},
    "fla.modules.conv.triton.ops": {
        "CausalConv1dFunction": type("CausalConv1dFunction", (torch.autograd.Function,), {})
    },
    "fla.ops": {},
    "fla.ops.gated_delta_rule": {
        "chunk_gated_delta_rule": gated_delta_rule,
        "fused_recurrent_gated_delta_rule": gated_delta_rule,
    },
    "fla.ops.gated_delta_rule.chunk": {
        "ChunkGatedDeltaRuleFunction": type("ChunkGatedDeltaRuleFunction", (torch.autograd.Function,), {})
    },
    "fla.ops.gated_delta_rule.fused_recurrent": {
        "FusedRecurrentFunction": type("FusedRecurrentFunction", (torch.autograd.Function,), {})
    },
}


def install() -> None:
    """Put the stand-in where `import fla` finds it, unless the package itself is installed.

    Take it away after the test (`remove`): transformers, too, would take it for the package.
    """
    if "fla" in sys.modules or importlib.util.find_spec("fla") is not None:
        return
    for name, contents in _MODULES.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents, __path__=[], stand_in=True)
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)


def remove() -> None:
    """Take the stand-in away, if it is there."""
    if getattr(sys.modules.get("fla"), "stand_in", False):
        for name in _MODULES:
            sys.modules.pop(name, None)
