from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from .helpers import values

pytestmark = pytest.mark.usefixtures("simulated")


def call(
    q: tuple[int, ...] = (1, 2, 4, 8),
    k: tuple[int, ...] | None = None,
    v: tuple[int, ...] | None = None,
    heads: int = 2,
    layout: str = "BNSD",
    dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3,
    **arguments: Any,
) -> Any:
    k = q if k is None else k
    tensors = [values(*s, dtype=t).npu() for s, t in zip((q, k, k if v is None else v), dtypes, strict=True)]
    moved = {n: a.npu() if isinstance(a, Tensor) else a for n, a in arguments.items()}
    return torch.ops.npu.npu_fusion_attention(*tensors, heads, layout, **moved)


def refused(reason: str) -> Any:
    return pytest.raises(RuntimeError, match=f"(?s).*{reason}")


def triangle(dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.triu(torch.ones(2048, 2048, dtype=dtype), diagonal=1)


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TND: dict[str, Any] = {"q": (6, 2, 8), "layout": "TND"}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"dtypes": (BF16, F16, BF16)}, "key: dtype"),
        ({"dtypes": (BF16, BF16, F32)}, "value: dtype"),
        ({"dtypes": (torch.float64,) * 3}, "dtype|float64|Double"),
        ({"pse": torch.zeros(1, 2, 4, 4, dtype=BF16)}, "pse: dtype"),
        ({"k": (1, 2, 4, 16)}, "head size"),
        ({"v": (1, 2, 4, 16)}, "head size 16 is larger"),
        ({"q": (1, 1, 2, 769), "heads": 1}, "head size must be 1 to 768"),
        ({"q": (1, 257, 2, 2), "heads": 257}, "head_num: must be 1 to 256"),
        ({"k": (1, 3, 4, 8), "heads": 2}, "not a multiple of 3 key heads"),
        ({"v": (1, 1, 4, 8)}, "value: has 1 heads"),
        ({"v": (1, 2, 5, 8)}, "value: has 5 tokens"),
        ({"k": (2, 2, 4, 8)}, "key: batch 2"),
        ({"heads": 4}, "head_num|allocates"),
        ({"keep_prob": 1.5}, "keep_prob"),
        ({"inner_precise": 7}, "inner_precise"),
        (
            {"sparse_mode": 5, "atten_mask": torch.zeros(1, 2, 4, 4, dtype=torch.bool)},
            "sparse_mode: 5 is not simulated",
        ),
        ({"q": (0, 2, 4, 8)}, "empty"),
        ({"layout": "XYZ"}, "input_layout should be"),
        ({"pse": torch.zeros(1, 1, 4, 4)}, "pse: shape"),
        ({"sink": torch.zeros(3)}, "sink: shape"),
        ({"sink": torch.zeros(2, dtype=BF16)}, "sink: must be float32"),
        ({"actual_seq_qlen": [4], "actual_seq_kvlen": [4]}, "actual_seq_qlen: selects the varlen kernel"),
        ({"softmax_layout": "TND"}, "softmax_layout"),
    ],
)
def test_shapes_and_dtypes(arguments: dict[str, Any], reason: str) -> None:
    with refused(reason):
        call(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"padding_mask": torch.zeros(4, 4)},
        {"prefix": [1]},
        {"dropout_mask": torch.ones(8, dtype=torch.uint8)},
        {"seed": 3},
        {"offset": 8},
    ],
)
def test_arguments_that_are_not_simulated_are_refused_by_name(arguments: dict[str, Any]) -> None:
    with refused(f"npu_fusion_attention.*{next(iter(arguments))}"):
        call(**arguments)


@pytest.mark.parametrize(
    ("mask", "mode", "reason"),
    [
        (torch.zeros(4, 4), 0, "must be bool or uint8"),
        (torch.zeros(4, 5, dtype=torch.bool), 0, "shape"),
        (torch.zeros(1, 2, 1, 4, dtype=torch.bool), 0, "shape"),
        (torch.zeros(4, 4, dtype=torch.bool), 2, "needs the compressed mask"),
        (torch.zeros(4, 4, dtype=torch.bool), 3, "needs the compressed mask"),
        (torch.zeros(4, 4, dtype=torch.bool), 4, "needs the compressed mask"),
        (torch.zeros(2048, 2048, dtype=torch.bool), 2, "got another"),
        (triangle().t().contiguous(), 3, "got another"),
        (torch.tril(torch.ones(2048, 2048, dtype=torch.bool)), 3, "got another"),
        (torch.triu(torch.ones(2048, 2048, dtype=torch.bool)), 4, "got another"),
        (triangle(torch.uint8) * 2, 2, "got another"),
        (triangle(), 0, "shape"),
        (triangle(), 1, "shape"),
    ],
)
def test_masks(mask: Tensor, mode: int, reason: str) -> None:
    with refused(f"atten_mask: .*{reason}"):
        call(atten_mask=mask, sparse_mode=mode)


def test_compressed_mask_may_be_uint8() -> None:
    expected = call(atten_mask=triangle(), sparse_mode=3)[0]
    assert torch.equal(call(atten_mask=triangle(torch.uint8), sparse_mode=3)[0], expected)


@pytest.mark.parametrize(("pre", "following"), [(0, 100), (100, 0), (1, 1)])
def test_a_band_that_contradicts_the_mask_is_refused(pre: int, following: int) -> None:
    with refused("atten_mask: shows keys outside the band"):
        call(atten_mask=torch.zeros(4, 4, dtype=torch.bool), pre_tockens=pre, next_tockens=following)


@pytest.mark.parametrize(
    ("q_ends", "kv_ends", "more", "reason"),
    [
        (None, None, {}, "cannot be empty|needs the end"),
        ([0, 6], [0, 6], {}, "starts with 0"),
        ([4, 3, 6], [4, 5, 6], {}, "must not decrease"),
        ([3, 5], [3, 6], {}, "last end is 5"),
        ([3, 6], [3, 7], {}, "last end is 7"),
        ([3, 6], [6], {}, "same|sequences"),
        ([2, 6], [4, 6], {"atten_mask": triangle(), "sparse_mode": 3}, "needs Sq <= Skv"),
        ([2, 6], [6, 6], {}, "sees no key"),
        ([2, 6], [2, 6], {"atten_mask": torch.ones(4, 4, dtype=torch.bool)}, "sees no key"),
        ([2, 6], [2, 6], {"atten_mask": torch.zeros(6, 6, dtype=torch.bool)}, "max Sq"),
        ([2, 6], [2, 6], {"pse": torch.zeros(1, 2, 6, 6)}, "pse"),
        ([2, 6], [2, 6], {"softmax_layout": "NTD"}, "softmax_layout|layout"),
    ],
)
def test_tnd(q_ends: Any, kv_ends: Any, more: dict[str, Any], reason: str) -> None:
    with refused(reason):
        call(**TND, actual_seq_qlen=q_ends, actual_seq_kvlen=kv_ends, **more)


def test_v3_takes_ends_as_cpu_tensors_of_integers_only() -> None:
    q = values(6, 2, 8).npu()
    ends = torch.tensor([2, 6])
    torch.ops.npu.npu_fusion_attention_v3(q, q, q, 2, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends)
    for wrong in (ends.npu(), ends[None], ends.float()):
        with refused("actual_seq_qlen: must be|tensor must be"):
            torch.ops.npu.npu_fusion_attention_v3(q, q, q, 2, "TND", actual_seq_qlen=wrong, actual_seq_kvlen=wrong)


def test_v1_takes_ends_as_lists_only() -> None:
    with refused("actual_seq_qlen"):
        call(**TND, actual_seq_qlen=torch.tensor([6]), actual_seq_kvlen=torch.tensor([6]))


def test_sink_on_ascend950_is_refused_because_the_forward_ignores_it(as_soc: Callable[[str], None]) -> None:
    as_soc("Ascend950")
    call()
    with refused("Ascend950.*sink: the forward ignores it"):
        call(sink=torch.zeros(2))
