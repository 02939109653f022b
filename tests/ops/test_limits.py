"""Every limit by itself: facts that fit but for one thing have a reason, and the last ones that fit have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from npu_patch.ops import attention, attention_limits, rms_norm, rope
from npu_patch.ops.attention import Mask
from npu_patch.ops.masks import MaskFacts, TensorFacts

from .tools import random

NPU, CPU = torch.device("npu", 0), torch.device("cpu")
FLOAT, BOOL = torch.float32, torch.bool


def attention_reason(**changes: Any) -> str | None:
    """Of (2, 4, 3, 8) queries over 5 keys of 2 heads, with changes."""
    facts: dict[str, Any] = {
        "query": (2, 4, 3, 8),
        "key": (2, 2, 5, 8),
        "value": (2, 2, 5, 8),
        "dtype": FLOAT,
        "device": NPU,
        "layout": "BNSD",
        "mask": Mask.full().describe(),
        "scale": None,
    }
    return attention_limits.judge(**{**facts, **changes})


def dense(*shape: int, dtype: torch.dtype = BOOL, device: torch.device = NPU, **more: Any) -> MaskFacts:
    return MaskFacts("dense", hidden=TensorFacts(torch.Size(shape), dtype, device), **more)


def biased(*shape: int, dtype: torch.dtype = FLOAT, device: torch.device = NPU, hard: bool = False) -> MaskFacts:
    return MaskFacts("full", bias=TensorFacts(torch.Size(shape), dtype, device), hard_bias=hard)


def packed(count: int, tokens: int) -> dict[str, Any]:
    shape = (tokens, 1, 8)
    mask = MaskFacts("documents", documents=count, ends=(tokens, tokens))
    return {"query": shape, "key": shape, "value": shape, "layout": "TND", "mask": mask}


ATTENTION = {
    "query, key and value are not 4-D": [
        {"query": (4, 3, 8)},
        {"key": (2, 5, 8)},
        {"value": (2, 5, 8)},
    ],
    "key and value do not fit together or to the query": [
        {"key": (1, 2, 5, 8)},
        {"value": (1, 2, 5, 8)},
        {"value": (2, 4, 5, 8)},
        {"value": (2, 2, 4, 8)},
    ],
    "an input is empty": [
        {"query": (0, 4, 3, 8), "key": (0, 2, 5, 8), "value": (0, 2, 5, 8)},
        {"query": (2, 4, 0, 8)},
        {"key": (2, 2, 0, 8), "value": (2, 2, 0, 8)},
        {"key": (2, 0, 5, 8), "value": (2, 0, 5, 8)},
        {"value": (2, 2, 5, 0)},
    ],
    "sequence or batch beyond the operator's limit": [
        {"query": (2, 4, (1 << 20) + 1, 8)},
        {"key": (2, 2, (1 << 20) + 1, 8), "value": (2, 2, (1 << 20) + 1, 8)},
        {"query": ((1 << 21) + 1, 4, 3, 8), "key": ((1 << 21) + 1, 2, 5, 8), "value": ((1 << 21) + 1, 2, 5, 8)},
    ],
    "the dense mask is not a bool tensor on the NPU": [
        {"mask": MaskFacts("dense")},
        {"mask": dense(3, 5, device=CPU)},
        {"mask": dense(3, 5, dtype=torch.int8)},
    ],
    "the dense mask's shape": [
        {"mask": dense(2, 5)},
        {"mask": dense(3, 4)},
        {"mask": dense(2, 3, 5)},
        {"mask": dense(3, 1, 3, 5)},
        {"mask": dense(2, 2, 3, 5)},
    ],
    "the bias is not a 4-D tensor on the NPU": [
        {"mask": biased(3, 5)},
        {"mask": biased(2, 4, 3, 5, device=CPU)},
    ],
    "the bias is not in the query's type": [
        {"mask": dense(3, 5, bias=TensorFacts(torch.Size((2, 4, 3, 5)), torch.bfloat16, NPU))},
    ],
    "a bias is exact only with a scale from 2**-20 to 1": [
        {"mask": biased(2, 4, 3, 5, hard=True), "scale": 1.5},
        {"mask": biased(2, 4, 3, 5, hard=True), "scale": 2**-21},
    ],
    "head size above 768": [
        {"query": (2, 4, 3, 776), "key": (2, 2, 5, 776)},
    ],
    "more than 256 heads": [
        {"query": (2, 258, 3, 8)},
    ],
    "more than 1024 documents": [
        packed(1025, 2000),
    ],
}


@pytest.mark.parametrize(("reason", "changes"), [(r, c) for r, rows in ATTENTION.items() for c in rows])
def test_attention_has_a_reason_for_each_thing_that_does_not_fit(reason: str, changes: dict[str, Any]) -> None:
    assert attention_reason(**changes) == reason


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"value": (2, 2, 5, 4)},
        {"query": (2, 4, 3, 768), "key": (2, 2, 5, 768)},
        {"query": (2, 256, 3, 8)},
        {"query": (2, 4, 1 << 20, 8)},
        {"key": (2, 2, 1 << 20, 8), "value": (2, 2, 1 << 20, 8)},
        {"query": (1 << 21, 4, 3, 8), "key": (1 << 21, 2, 5, 8), "value": (1 << 21, 2, 5, 8)},
        packed(1024, 2000),
        {"mask": dense(1, 5)},
        {"mask": dense(1, 4, 1, 5)},
        {"mask": dense(2, 1, 3, 5)},
        {"mask": biased(1, 4, 1, 5)},
        {"mask": biased(2, 4, 3, 5, hard=True), "scale": 1.0},
        {"mask": biased(2, 4, 3, 5, hard=True, dtype=torch.bfloat16), "dtype": torch.bfloat16, "scale": 2**-20},
        {"mask": biased(2, 4, 3, 5, hard=True, dtype=torch.bfloat16), "dtype": torch.bfloat16, "scale": 0.3},
    ],
)
def test_attention_takes_the_last_that_fits(changes: dict[str, Any]) -> None:
    assert attention_reason(**changes) is None


def states() -> list[torch.Tensor]:
    return [random(1, 2, 3, 8, grad=False, seed=i) for i in range(3)]


@pytest.mark.parametrize("which", [1, 2])
def test_attention_of_one_tensor_of_another_type_or_on_another_device_has_a_reason(which: int) -> None:
    tensors = states()
    tensors[which] = tensors[which].bfloat16()
    for reason, found in zip(*_both(tensors), strict=True):
        assert reason == found == "query, key and value differ in type"
    tensors = states()
    tensors[which] = tensors[which].cpu()
    for reason, found in zip(*_both(tensors), strict=True):
        assert reason == found == "key or value is on another device"


def _both(tensors: list[torch.Tensor]) -> tuple[list[str | None], list[str | None]]:
    """What `unsupported` says, and `attend`, which has a short cut of its own; twice, before and after it remembers."""
    said = [attention.unsupported(*tensors, Mask.full(), layout="BNSD") for _ in range(2)]
    return said, [attention.attend(*tensors, Mask.full(), "BNSD")[0] for _ in range(2)]


def test_a_reason_is_not_lost_to_a_later_question() -> None:
    q, k, v = states()
    odd = [x[..., :4] for x in (k, v)]
    assert attention.unsupported(q, *odd, Mask.full(), layout="BNSD", dropout=0.1) == "query and key head sizes differ"
    sinks = random(3, grad=False)
    reason = attention.unsupported(q, *odd, Mask.full(), layout="BNSD", sinks=sinks)
    assert reason == "query and key head sizes differ"


@pytest.mark.parametrize("wrong", [lambda s: s.bfloat16(), lambda s: s.cpu(), lambda s: s[:1]])
def test_sinks_that_do_not_fit_have_a_reason(wrong: Any) -> None:
    sinks = wrong(random(2, grad=False))
    reason = "sinks are not one float32 for each query head, on the NPU"
    assert attention.unsupported(*states(), Mask.full(), layout="BNSD", sinks=sinks) == reason
    assert attention.attend(*states(), Mask.full(), "BNSD", sinks=sinks) == (reason, None)


@pytest.mark.parametrize("which", [0, 1])
def test_the_gradient_of_one_tensor_through_the_log_sum_exp_has_a_reason(which: int) -> None:
    tensors = states()
    tensors[which].requires_grad_()
    reason = attention.unsupported(*tensors, Mask.full(), layout="BNSD", return_lse=True)
    assert reason == "gradient through the log-sum-exp"


class TestAttend:
    def test_gives_what_attention_gives_and_remembers_how(self) -> None:
        mask, tensors = Mask.band(2), states()
        for _ in range(2):
            reason, output = attention.attend(*tensors, mask, "BNSD", 0.25)
            assert reason is None
            torch.testing.assert_close(output, attention.attention(*tensors, mask, layout="BNSD", scale=0.25))
        assert len(mask.plans) == 1
        other = attention.attend(*tensors, mask, "BNSD", 0.5)[1]
        torch.testing.assert_close(other, attention.attention(*tensors, mask, layout="BNSD", scale=0.5))
        assert len(mask.plans) == 2

    def test_remembers_nothing_that_a_captured_graph_makes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mask, tensors = Mask.dense(torch.zeros(3, 3, dtype=BOOL, device="npu")), states()
        monkeypatch.setattr(torch.npu, "is_current_stream_capturing", lambda: True)
        assert attention.attend(*tensors, mask, "BNSD")[0] is None
        assert not mask.plans

    def test_asks_the_judge_about_what_is_remembered_for_other_shapes(self) -> None:
        mask, (q, k, v) = Mask.documents((3,), (3,)), states()
        flat = [x[0].transpose(0, 1) for x in (q, k, v)]
        assert attention.attend(*flat, mask, "TND")[0] is None
        longer = [torch.cat((x, x)) for x in flat]
        assert attention.attend(*longer, mask, "TND")[0] == "the document ends are not the packed length"

    def test_dropout_and_transforms_take_the_long_way(self) -> None:
        tensors = states()
        assert attention.attend(*tensors, Mask.full(), "BNSD", None, 2.0)[0] is not None
        reasons: list[str | None] = []

        def f(q: torch.Tensor) -> torch.Tensor:
            reasons.append(attention.attend(*tensors, Mask.full(), "BNSD")[0])
            return q.sum()

        torch.func.grad(f)(tensors[0])
        assert reasons == ["a torch.func transform or forward-mode differentiation is active"]


def test_an_input_without_dimensions_has_a_reason() -> None:
    x, weight = torch.ones((), device="npu"), torch.ones(4, device="npu")
    assert rms_norm.unsupported(x, weight) == "the weight's size is not the input's last size"


def test_the_dtype_that_a_weight_will_have_counts() -> None:
    x, weight = (torch.ones(4, device="npu", dtype=dtype) for dtype in (torch.bfloat16, torch.float16))
    assert rms_norm.unsupported(x, weight) is not None
    assert rms_norm.unsupported(x, weight, FLOAT) is None


def test_fake_tensors_are_judged_and_not_remembered() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = len(rms_norm._verdicts), len(rope._verdicts)
    with FakeTensorMode():
        x, weight = torch.empty(2, 7, device="npu"), torch.empty(5, device="npu")
        assert rms_norm.unsupported(x, weight) == "the weight's size is not the input's last size"
        q, table = torch.empty(1, 2, 3, 6, device="npu"), torch.empty(1, 1, 3, 4, device="npu")
        assert rope.unsupported(q, table, table, "half") == "the tables' last size is not the input's"
    assert (len(rms_norm._verdicts), len(rope._verdicts)) == before


@pytest.mark.parametrize("which", [1, 2])
def test_one_rotary_table_that_differs_has_a_reason(which: int) -> None:
    def reason(change: Any) -> str | None:
        tensors = [random(1, 2, 3, 8, grad=False), *(random(1, 1, 3, 8, grad=False) for _ in range(2))]
        tensors[which] = change(tensors[which])
        return rope.unsupported(*tensors, "half")

    assert reason(lambda x: x) is None
    assert reason(lambda x: x.bfloat16()) == "the tables are not in the input's type"
    assert reason(lambda x: x.cpu()) == "the tables are on another device"
    assert reason(lambda x: x[:, :, :1]) == "cos and sin differ in shape"
