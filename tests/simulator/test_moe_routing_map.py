"""Sorting by a map of tokens and experts and back, against loops over experts and tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from .helpers import assert_same_function, values

pytestmark = pytest.mark.usefixtures("simulated")

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
npu = torch.ops.npu
TOKENS, EXPERTS, TOP_K, CAPACITY = 6, 4, 2, 3


def routing_map(dtype: torch.dtype = torch.bool) -> Tensor:
    """Two experts for each token."""
    scores = values(TOKENS, EXPERTS, seed=3)
    return (scores >= scores.sort(1).values[:, -TOP_K, None]).to(dtype)


def rows() -> list[tuple[int, int]]:
    """(expert, token) of each row."""
    return [(e, t) for e in range(EXPERTS) for t in range(TOKENS) if routing_map()[t, e]]


def padded_rows() -> list[tuple[int, int]]:
    """The first of each expert's own tokens; where there are too few, tokens that are not its own."""
    chosen = routing_map()
    result = []
    for e in range(EXPERTS):
        own = [t for t in range(TOKENS) if chosen[t, e]]
        others = [t for t in range(TOKENS) if not chosen[t, e]]
        result += [(e, t) for t in (own + others)[:CAPACITY]]
    return result


def permute(x: Tensor, probs: Tensor | None, pad: bool, map_dtype: torch.dtype = torch.bool) -> Any:
    count = EXPERTS * CAPACITY if pad else TOKENS * TOP_K
    return npu.npu_moe_token_permute_with_routing_map(
        x, routing_map(map_dtype).npu(), probs=probs, num_out_tokens=count, drop_and_pad=pad
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("map_dtype", [torch.bool, torch.int8])
@pytest.mark.parametrize("pad", [False, True])
def test_rows_and_probs_are_sorted_by_expert(dtype: torch.dtype, map_dtype: torch.dtype, pad: bool) -> None:
    x, probs = values(TOKENS, 5, dtype=dtype), values(TOKENS, EXPERTS, seed=1, dtype=dtype)
    expected = padded_rows() if pad else rows()
    permuted, weights, index = permute(x.npu(), probs.npu(), pad, map_dtype)
    assert torch.equal(permuted.cpu(), x[[t for _, t in expected]])
    assert weights.tolist() == [probs[t, e].item() for e, t in expected]
    if pad:
        assert index.tolist() == [t for _, t in expected]
    else:  # slots in the order of expert ids, and not of scores as in the form with ids
        slots = [(e, t) for t in range(TOKENS) for e in range(EXPERTS) if routing_map()[t, e]]
        assert [expected[i] for i in index.tolist()] == slots


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_permuting_has_the_gradients_of_a_gather(dtype: torch.dtype, pad: bool) -> None:
    experts, tokens = zip(*(padded_rows() if pad else rows()), strict=True)

    def on_npu(x: Tensor, probs: Tensor) -> Tensor:
        permuted, weights, _ = permute(x, probs, pad)
        return torch.cat((permuted, weights.unsqueeze(1)), 1)

    def formula(x: Tensor, probs: Tensor) -> Tensor:
        return torch.cat((x[list(tokens)], probs[list(tokens), list(experts)].unsqueeze(1)), 1)

    inputs = [values(TOKENS, 5, dtype=dtype), values(TOKENS, EXPERTS, seed=1, dtype=dtype)]
    assert_same_function(on_npu, formula, inputs)
    assert_same_function(lambda x: permute(x, None, pad)[0], lambda x: x[list(tokens)], inputs[:1])


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_unpermuting_weighs_and_sums_with_gradients(dtype: torch.dtype, pad: bool) -> None:
    placed = padded_rows() if pad else rows()
    _, _, index = permute(values(TOKENS, 5).npu(), None, pad)

    def on_npu(r: Tensor, probs: Tensor | None = None) -> Tensor:
        return npu.npu_moe_token_unpermute_with_routing_map(
            r, index, [TOKENS, 5], probs=probs, routing_map=routing_map().npu(), drop_and_pad=pad
        )

    def formula(r: Tensor, probs: Tensor | None = None) -> Tensor:
        result = [r.new_zeros(5) for _ in range(TOKENS)]
        for row, (e, t) in enumerate(placed):
            result[t] = result[t] + r[row] * (1 if probs is None else probs[t, e])
        return torch.stack(result)

    inputs = [values(len(placed), 5, dtype=dtype), values(TOKENS, EXPERTS, seed=1, dtype=dtype)]
    assert_same_function(on_npu, formula, inputs)
    assert_same_function(on_npu, formula, inputs[:1])
    with torch.inference_mode():
        found = on_npu(inputs[0].npu(), inputs[1].npu())
    assert torch.equal(found, on_npu(inputs[0].npu(), inputs[1].npu()))


def test_the_default_of_num_out_tokens_would_drop_rows_and_is_refused() -> None:
    with pytest.raises(RuntimeError, match="routing_map: each token must have the 1 experts"):
        npu.npu_moe_token_permute_with_routing_map(values(TOKENS, 5).npu(), routing_map().npu())


UNEVEN = routing_map()
UNEVEN[0] = torch.tensor([True, False, False, False])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": values(TOKENS, 5).double()}, "tokens: dtype"),
        ({"tokens": values(TOKENS, 0)}, "tokens: empty"),
        ({"routing_map": routing_map(torch.int32)}, "routing_map: dtype"),
        ({"routing_map": routing_map()[1:]}, "routing_map: 5 rows for 6 tokens"),
        ({"routing_map": UNEVEN}, "routing_map: each token must have the 2 experts"),
        ({"num_out_tokens": TOKENS * 3}, "routing_map: each token must have the 3 experts"),
        ({"probs": values(TOKENS, EXPERTS, dtype=torch.bfloat16)}, "probs: dtype"),
        ({"probs": values(TOKENS, 3)}, "probs: shape"),
        ({"drop_and_pad": True, "num_out_tokens": EXPERTS * (TOKENS + 1)}, "a capacity of 7 for 6 tokens"),
        ({"drop_and_pad": True, "num_out_tokens": EXPERTS - 1}, "a capacity of 0"),
    ],
)
def test_permuting_refuses_what_is_not_documented(changes: dict[str, Any], reason: str) -> None:
    arguments = {"tokens": values(TOKENS, 5), "routing_map": routing_map(), "num_out_tokens": TOKENS * TOP_K, **changes}
    moved = {name: x.npu() if isinstance(x, Tensor) else x for name, x in arguments.items()}
    with pytest.raises(RuntimeError, match=reason):
        npu.npu_moe_token_permute_with_routing_map(**moved)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"permuted_tokens": values(12, 5).double()}, "permuted_tokens: dtype"),
        ({"sorted_indices": torch.arange(12)}, "sorted_indices: dtype"),
        ({"sorted_indices": torch.arange(12, dtype=torch.int32) + 1}, "sorted_indices: must be in"),
        ({"sorted_indices": torch.arange(11, dtype=torch.int32)}, "sorted_indices: 11 for 6 tokens"),
        ({"restore_shape": [TOKENS, 6]}, "restore_shape: 6 columns for 5"),
        ({"probs": values(TOKENS, EXPERTS)}, "routing_map: needed"),
        ({"probs": values(TOKENS, EXPERTS), "routing_map": UNEVEN}, "routing_map: each token must have"),
        (
            {"probs": values(TOKENS, EXPERTS, dtype=torch.bfloat16), "routing_map": routing_map()},
            "probs: dtype",
        ),
    ],
)
def test_unpermuting_refuses_what_is_not_documented(changes: dict[str, Any], reason: str) -> None:
    arguments = {
        "permuted_tokens": values(12, 5),
        "sorted_indices": torch.arange(12, dtype=torch.int32),
        "restore_shape": [TOKENS, 5],
        **changes,
    }
    moved = {name: x.npu() if isinstance(x, Tensor) else x for name, x in arguments.items()}
    with pytest.raises(RuntimeError, match=reason):
        npu.npu_moe_token_unpermute_with_routing_map(**moved)


def test_they_are_not_documented_for_ascend950(as_soc) -> None:
    as_soc("Ascend950")
    with pytest.raises(RuntimeError, match="not documented for this chip"):
        permute(values(TOKENS, 5).npu(), None, False)
