"""Sorting by expert ids and back, with the operators' own gradients, against loops over tokens and slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from .helpers import assert_same_function, values

pytestmark = pytest.mark.usefixtures("simulated")

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
npu = torch.ops.npu


def ids(tokens: int = 6, experts: int = 4, top_k: int = 2, dtype: torch.dtype = torch.int32) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]).to(dtype)


def copies(index: Tensor) -> list[tuple[int, int]]:
    """(token, slot) of each row, sorted by expert, then token, then slot."""
    rows = index.tolist() if index.dim() == 2 else [[i] for i in index.tolist()]
    return [pair for _, *pair in sorted((e, t, s) for t, row in enumerate(rows) for s, e in enumerate(row))]  # type: ignore[misc]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("index", [ids(), ids(dtype=torch.int64), ids(top_k=4), ids(top_k=1), ids()[:, 0]])
def test_rows_are_sorted_by_expert_and_indices_are_the_inverse(dtype: torch.dtype, index: Tensor) -> None:
    order, top_k = copies(index), 1 if index.dim() == 1 else index.shape[1]
    x = values(6, 5, dtype=dtype)
    permuted, sorted_indices = npu.npu_moe_token_permute(x.npu(), index.npu())
    assert torch.equal(permuted.cpu(), x[[t for t, _ in order]])
    assert sorted_indices.dtype == torch.int32
    assert [tuple(order[row]) for row in sorted_indices.tolist()] == [(t, s) for t in range(6) for s in range(top_k)]
    assert_same_function(
        lambda x: npu.npu_moe_token_permute(x, index.npu())[0], lambda x: x[[t for t, _ in order]], [x]
    )


@pytest.mark.parametrize(("given", "kept"), [(None, 12), (0, 12), (5, 5), (20, 12), (-3, 9)])
def test_num_out_tokens_keeps_the_first_rows_and_all_indices(given: int | None, kept: int) -> None:
    x, index = values(6, 5), ids()
    permuted, sorted_indices = npu.npu_moe_token_permute(x.npu(), index.npu(), given)
    assert torch.equal(permuted.cpu(), x[[t for t, _ in copies(index)][:kept]])
    assert sorted(sorted_indices.tolist()) == list(range(12))


def test_the_gradient_of_a_token_whose_copy_was_dropped_is_undefined() -> None:
    x, index = values(6, 5).npu().requires_grad_(), ids()
    npu.npu_moe_token_permute(x, index.npu(), 9)[0].sum().backward()
    dropped = {t for t, _ in copies(index)[9:]}
    assert x.grad is not None
    assert {t for t in range(6) if x.grad[t].isnan().any()} == dropped


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": values(6, 5).double()}, "tokens: dtype"),
        ({"tokens": values(7, 5)}, "indices: 6 rows for 7 tokens"),
        ({"tokens": values(6, 0)}, "tokens: empty"),
        ({"tokens": values(0, 5), "indices": ids()[:0]}, "tokens: empty"),
        ({"indices": ids().short()}, "indices: dtype"),
        ({"indices": ids().float()}, "indices: dtype"),
        ({"indices": ids() - 1}, "ids must be in"),
        ({"indices": ids() + (1 << 24) - 4}, "ids must be in"),
        ({"indices": ids(top_k=0)}, "top_k 0"),
        ({"indices": ids(experts=513, top_k=513)}, "top_k 513"),
        ({"padded_mode": True}, "padded_mode"),
    ],
)
def test_permute_refuses_what_is_not_documented(changes: dict[str, Any], reason: str) -> None:
    arguments = {"tokens": values(6, 5), "indices": ids(), **changes}
    moved = {name: x.npu() if isinstance(x, Tensor) else x for name, x in arguments.items()}
    with pytest.raises(RuntimeError, match=f"npu_moe_token_permute.*{reason}"):
        npu.npu_moe_token_permute(**moved)


ORDER = torch.tensor([3, 1, 0, 5, 2, 4], dtype=torch.int32)


def by_loop(rows: Tensor, probs: Tensor) -> Tensor:
    top_k = probs.shape[1]
    sums = [sum(rows[ORDER[t * top_k + s]] * probs[t, s] for s in range(top_k)) for t in range(probs.shape[0])]
    return torch.stack(sums)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("top_k", [1, 2, 3, 6])
def test_unpermute_weighs_and_sums_the_copies_of_each_token(dtype: torch.dtype, top_k: int) -> None:
    rows, probs = values(6, 5, dtype=dtype), values(6 // top_k, top_k, seed=1, dtype=dtype)
    assert_same_function(lambda r, p: npu.npu_moe_token_unpermute(r, ORDER.npu(), p), by_loop, [rows, probs])
    with torch.inference_mode():
        found = npu.npu_moe_token_unpermute(rows.npu(), ORDER.npu(), probs.npu())
    assert torch.equal(found, npu.npu_moe_token_unpermute(rows.npu(), ORDER.npu(), probs.npu()))


@pytest.mark.parametrize("dtype", FLOATS)
def test_unpermute_without_probs_sums_nothing(dtype: torch.dtype) -> None:
    rows = values(6, 5, dtype=dtype)
    assert_same_function(lambda r: npu.npu_moe_token_unpermute(r, ORDER.npu()), lambda r: r[ORDER.long()], [rows])


def test_unpermute_rounds_once() -> None:
    rows, probs = values(6, 64, dtype=torch.bfloat16), values(2, 3, seed=1, dtype=torch.bfloat16)
    exact = by_loop(rows.double(), probs.double())
    error = (npu.npu_moe_token_unpermute(rows.npu(), ORDER.npu(), probs.npu()).cpu().double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 * 1.01 + 1e-6).all()


@pytest.mark.parametrize("tokens", FLOATS)
@pytest.mark.parametrize("probs", FLOATS)
def test_probs_of_another_type_are_taken_and_have_no_usable_gradient(tokens: torch.dtype, probs: torch.dtype) -> None:
    rows = values(6, 5, dtype=tokens).npu().requires_grad_()
    weights = values(3, 2, dtype=probs).npu().requires_grad_()
    out = npu.npu_moe_token_unpermute(rows, ORDER.npu(), weights)
    assert not out.isnan().any()
    out.sum().backward()
    assert rows.grad is not None
    assert weights.grad is not None
    assert (rows.grad.dtype, weights.grad.dtype) == (tokens, probs)
    assert bool(rows.grad.isnan().all()) is bool(weights.grad.isnan().all()) is (tokens != probs)


@pytest.mark.parametrize("row", [-1, 6, 100])
def test_a_row_outside_is_undefined(row: int) -> None:
    order = ORDER.clone()
    order[2] = row
    out = npu.npu_moe_token_unpermute(values(6, 5).npu(), order.npu(), torch.ones(3, 2).npu())
    assert [bool(x.isnan().all()) for x in out] == [False, True, False]
    assert not out[[0, 2]].isnan().any()


def test_rows_that_no_index_names_get_an_undefined_gradient() -> None:
    rows = values(9, 5).npu().requires_grad_()
    npu.npu_moe_token_unpermute(rows, ORDER.npu(), torch.ones(3, 2).npu()).sum().backward()
    assert rows.grad is not None
    assert [bool(x.isnan().all()) for x in rows.grad] == [False] * 6 + [True] * 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"permuted_tokens": values(6, 5).double()}, "permuted_tokens: dtype"),
        ({"permuted_tokens": values(0, 5)}, "permuted_tokens: empty"),
        ({"sorted_indices": ORDER.long()}, "sorted_indices: dtype"),
        ({"sorted_indices": ORDER[:0], "probs": None}, "sorted_indices: empty"),
        ({"sorted_indices": ORDER.view(2, 3)}, "sorted_indices should be 1 dimensional"),
        ({"probs": values(3, 2).double()}, "probs: dtype"),
        ({"probs": values(2, 2)}, "probs: 4 elements for 6"),
        ({"probs": values(2, 4)}, "no multiple of top_k 4"),
        ({"sorted_indices": torch.zeros(513, dtype=torch.int32), "probs": values(1, 513)}, "513 is not in"),
        ({"padded_mode": True}, "padded_mode"),
        ({"restore_shape": [3, 5]}, "restore_shape"),
    ],
)
def test_unpermute_refuses_what_is_not_documented(changes: dict[str, Any], reason: str) -> None:
    arguments = {"permuted_tokens": values(6, 5), "sorted_indices": ORDER, "probs": values(3, 2), **changes}
    moved = {name: x.npu() if isinstance(x, Tensor) else x for name, x in arguments.items()}
    with pytest.raises(RuntimeError, match=reason):
        npu.npu_moe_token_unpermute(**moved)


def test_the_gradient_operators_refuse_what_the_forward_ones_do_not_give() -> None:
    rows, order, probs = values(6, 5).npu(), ORDER.npu(), torch.ones(3, 2).npu()
    with pytest.raises(RuntimeError, match=r"tokens_dtype: torch\.bfloat16 is not that of the gradient"):
        npu.npu_moe_token_permute_grad_v2(rows, order, 3, torch.bfloat16, 2)
    with pytest.raises(RuntimeError, match="top_k: 0 is not in"):
        npu.npu_moe_token_permute_grad_v2(rows, order, 3, torch.float32, 0)
    grad = values(3, 5).npu()
    with pytest.raises(RuntimeError, match="permuted_tokens: needed"):
        npu.npu_moe_token_unpermute_grad_v2(grad, order, 6, torch.float32, probs)
    with pytest.raises(RuntimeError, match="permuted_tokens: dtype"):
        npu.npu_moe_token_unpermute_grad_v2(grad, order, 6, torch.float32, probs, permuted_tokens=rows.bfloat16())
    with pytest.raises(RuntimeError, match="sorted_indices: rows must be in"):
        npu.npu_moe_token_unpermute_grad_v2(grad, order, 5, torch.float32, probs, permuted_tokens=rows[:5])


def test_both_generations_of_the_gradient_operators_agree() -> None:
    tokens, index = values(3, 5).npu(), torch.tensor([[1, 0], [0, 2], [2, 1]], dtype=torch.int32).npu()
    rows, order, probs = values(6, 5).npu(), ORDER.npu(), values(3, 2).npu()
    newer = npu.npu_moe_token_permute_grad_v2(rows, order, 3, torch.float32, 2)
    assert torch.equal(newer, npu.npu_moe_token_permute_grad(tokens, rows, index, order))
    newer = npu.npu_moe_token_unpermute_grad_v2(tokens, order, 6, torch.float32, probs, permuted_tokens=rows)
    older = npu.npu_moe_token_unpermute_grad(rows, tokens, order, probs)
    assert all(torch.equal(a, b) for a, b in zip(newer, older, strict=True))
