"""Tokens sorted by expert and back, by expert ids.

``sorted_indices`` is the inverse of a stable sort: ``sorted_indices[token * top_k + slot]`` is the row of that copy.
Source: operator documents torch_npu.npu_moe_token_permute and _unpermute (op-plugin), aclnnMoeTokenPermute,
aclnnMoeTokenUnpermute and their gradients (ops-transformer/moe).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import limits
from .base import UNDEFINED, Call, kernel

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_INDICES = (torch.int32, torch.int64)
_NAN = float("nan")


def _check_rows(call: Call, name: str, rows: Tensor) -> None:
    call.require(rows.dtype in _FLOATS, name, f"dtype {rows.dtype} is not supported")
    call.require(rows.dim() == 2, name, f"must be [rows, size], has {rows.dim()} dimensions")
    call.require(rows.numel() > 0, name, "empty tensors are not documented")


def _check_sorted(call: Call, sorted_indices: Tensor, top_k: int) -> None:
    name = "sorted_indices"
    call.require(sorted_indices.dtype == torch.int32, name, f"dtype {sorted_indices.dtype} is not int32")
    call.require(sorted_indices.dim() == 1, name, f"must be one-dimensional, has {sorted_indices.dim()} dimensions")
    call.require(sorted_indices.numel() > 0, name, "empty tensors are not documented")
    call.require(0 < top_k <= limits.MOE_TOP_K, "top_k", f"{top_k} is not in [1, {limits.MOE_TOP_K}]")
    count = sorted_indices.numel()
    call.require(count % top_k == 0, name, f"{count} indices are no multiple of top_k {top_k}")


def _check_probs(call: Call, probs: Tensor, sorted_indices: Tensor) -> None:
    call.require(probs.dtype in _FLOATS, "probs", f"dtype {probs.dtype} is not supported")
    call.require(probs.dim() == 2, "probs", f"must be [tokens, top_k], has {probs.dim()} dimensions")
    call.require(
        probs.numel() == sorted_indices.numel(),
        "probs",
        f"{probs.numel()} elements for {sorted_indices.numel()} sorted_indices",
    )


def _gathered(rows: Tensor, sorted_indices: Tensor) -> Tensor:
    """In float32; a row outside is other memory on the device, here NaN."""
    index = sorted_indices.long()
    outside = (index < 0) | (index >= rows.shape[0])
    return rows.float()[index.masked_fill(outside, 0)].masked_fill(outside[:, None], _NAN)


@kernel("npu_moe_token_permute", models=("tokens", "indices", "num_out_tokens"))
def npu_moe_token_permute(
    call: Call, tokens: Tensor, indices: Tensor, num_out_tokens: int | None
) -> tuple[Tensor, Tensor]:
    """``tokens [T, H]``, ``indices [T]`` or ``[T, top_k]`` → rows in the order of the experts, sorted_indices int32.

    The operator sorts through float32, hence the limits of ids and counts. ``num_out_tokens`` keeps the first rows.
    """
    _check_rows(call, "tokens", tokens)
    call.require(indices.dtype in _INDICES, "indices", f"dtype {indices.dtype} is neither int32 nor int64")
    call.require(indices.dim() in (1, 2), "indices", f"must be [tokens] or [tokens, top_k], has {indices.dim()}")
    call.require(
        indices.shape[0] == tokens.shape[0], "indices", f"{indices.shape[0]} rows for {tokens.shape[0]} tokens"
    )
    top_k = indices.shape[1] if indices.dim() == 2 else 1
    call.require(0 < top_k <= limits.MOE_TOP_K, "indices", f"top_k {top_k} is not in [1, {limits.MOE_TOP_K}]")
    count, most = indices.numel(), limits.MOE_INDICES
    call.require(count < most, "indices", f"{count} elements, must be below {most}")
    call.require(bool(((indices >= 0) & (indices < most)).all()), "indices", f"ids must be in [0, {most})")
    order = indices.reshape(-1).argsort(stable=True)
    kept = count if not num_out_tokens else min(num_out_tokens, count) if num_out_tokens > 0 else count + num_out_tokens
    return tokens[order[:kept] // top_k], order.argsort().int()


def _permute_grad(call: Call, grad: Tensor, sorted_indices: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
    """The sum over the copies of each token. What becomes of copies that were dropped is not documented: NaN."""
    _check_rows(call, "grad_permuted_tokens", grad)
    _check_sorted(call, sorted_indices, top_k)
    return _gathered(grad, sorted_indices).unflatten(0, (-1, top_k)).sum(1).to(dtype)


@kernel(
    "npu_moe_token_permute_grad_v2",
    models=("grad_permuted_tokens", "sorted_indices", "tokens_size_0", "tokens_dtype", "num_topK"),
)
def npu_moe_token_permute_grad_v2(
    call: Call,
    grad_permuted_tokens: Tensor,
    sorted_indices: Tensor,
    tokens_size_0: int,
    tokens_dtype: torch.dtype,
    num_topK: int,
) -> Tensor:
    grad = grad_permuted_tokens
    call.require(tokens_dtype == grad.dtype, "tokens_dtype", f"{tokens_dtype} is not that of the gradient {grad.dtype}")
    return _permute_grad(call, grad, sorted_indices, num_topK, tokens_dtype)


@kernel("npu_moe_token_permute_grad", models=("tokens", "grad_permuted_tokens", "indices", "sorted_indices"))
def npu_moe_token_permute_grad(
    call: Call, tokens: Tensor, grad_permuted_tokens: Tensor, indices: Tensor, sorted_indices: Tensor
) -> Tensor:
    """The form of older torch_npu."""
    top_k = indices.shape[1] if indices.dim() == 2 else 1
    return _permute_grad(call, grad_permuted_tokens, sorted_indices, top_k, tokens.dtype)


def _unpermute(call: Call, permuted: Tensor, sorted_indices: Tensor, probs: Tensor | None) -> Tensor:
    """Products and sum in float32, rounded once. Without ``probs`` nothing is summed: top_k is 1."""
    _check_rows(call, "permuted_tokens", permuted)
    _check_sorted(call, sorted_indices, 1 if probs is None else probs.shape[-1])
    rows = _gathered(permuted, sorted_indices)
    if probs is not None:
        _check_probs(call, probs, sorted_indices)
        rows = (rows.unflatten(0, probs.shape) * probs.float().unsqueeze(-1)).sum(1)
    return rows.to(permuted.dtype)


@kernel("_npu_moe_token_unpermute", models=("permuted_tokens", "sorted_indices", "probs"))
def _npu_moe_token_unpermute(
    call: Call, permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What the public operator calls where autograd looks on; the second output is the input itself."""
    return _unpermute(call, permuted_tokens, sorted_indices, probs), permuted_tokens


@kernel("npu_moe_token_unpermute", models=("permuted_tokens", "sorted_indices", "probs"))
def npu_moe_token_unpermute(
    call: Call, permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None
) -> Tensor:
    """What is called in inference mode."""
    return _unpermute(call, permuted_tokens, sorted_indices, probs)


def _unpermute_grad(
    call: Call, grad: Tensor, sorted_indices: Tensor, count: int, probs: Tensor | None, permuted: Tensor | None
) -> tuple[Tensor, object]:
    """Gradients of the rows and of ``probs``. Rows that no index names are not written.

    On the device float32 probs with bfloat16 tokens were seen to give NaN. No other pair of different types is known to
    work, so all of them do here.
    """
    _check_rows(call, "grad_unpermuted_tokens", grad)
    _check_sorted(call, sorted_indices, 1 if probs is None else probs.shape[-1])
    index = sorted_indices.long()
    call.require(bool(((index >= 0) & (index < count)).all()), "sorted_indices", f"rows must be in [0, {count})")
    grad_rows = torch.full((count, grad.shape[1]), _NAN, dtype=grad.dtype)
    if probs is None:
        call.require(grad.shape[0] == index.numel(), "grad_unpermuted_tokens", f"{grad.shape[0]} rows")
        grad_rows[index] = grad
        return grad_rows, UNDEFINED
    _check_probs(call, probs, sorted_indices)
    if permuted is None:
        call.refuse("permuted_tokens", "needed for the gradient of probs")
    call.require(permuted.dtype == grad.dtype, "permuted_tokens", f"dtype {permuted.dtype} is not {grad.dtype}")
    if probs.dtype != grad.dtype:
        return grad_rows, torch.full(probs.shape, _NAN, dtype=probs.dtype)
    wide = grad.float().unsqueeze(1)
    grad_rows[index] = (wide * probs.float().unsqueeze(-1)).flatten(0, 1).to(grad.dtype)
    grad_probs = (wide * permuted.float()[index].unflatten(0, probs.shape)).sum(-1)
    return grad_rows, grad_probs.to(probs.dtype)


@kernel(
    "npu_moe_token_unpermute_grad_v2",
    models=(
        "grad_unpermuted_tokens",
        "sorted_indices",
        "permuted_tokens_size_0",
        "permuted_tokens_dtype",
        "probs",
        "permuted_tokens",
    ),
)
def npu_moe_token_unpermute_grad_v2(
    call: Call,
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: torch.dtype,
    probs: Tensor | None,
    permuted_tokens: Tensor | None,
) -> tuple[Tensor, object]:
    grad, dtype = grad_unpermuted_tokens, permuted_tokens_dtype
    call.require(dtype == grad.dtype, "permuted_tokens_dtype", f"{dtype} is not that of the gradient {grad.dtype}")
    return _unpermute_grad(call, grad, sorted_indices, permuted_tokens_size_0, probs, permuted_tokens)


@kernel(
    "npu_moe_token_unpermute_grad",
    models=("permuted_tokens", "grad_unpermuted_tokens", "sorted_indices", "probs"),
)
def npu_moe_token_unpermute_grad(
    call: Call,
    permuted_tokens: Tensor,
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None,
) -> tuple[Tensor, object]:
    """The form of older torch_npu."""
    count = permuted_tokens.shape[0]
    return _unpermute_grad(call, grad_unpermuted_tokens, sorted_indices, count, probs, permuted_tokens)
