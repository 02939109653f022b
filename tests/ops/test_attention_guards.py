"""Each guard of the fused attention: the reason, and that the operator itself refuses the call or gets it wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from npu_patch.ops import attention as ops
from npu_patch.ops.attention import Mask

from .tools import random


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return random(*shape, dtype=dtype, grad=False)


def call(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, layout: str = "BNSD", **options: Any) -> Any:
    return (q, k, v, mask or Mask.full()), {"layout": layout, **options}


def same(*shape: int, mask: Mask | None = None, layout: str = "BNSD", **options: Any) -> Any:
    return call(t(*shape), t(*shape), t(*shape), mask, layout, **options)


def hidden(*shape: int) -> Mask:
    return Mask.dense(torch.zeros(shape, dtype=torch.bool, device="npu"))


# reason -> a call that the operator itself refuses
REFUSED = {
    "query of type float64": lambda: call(*(t(1, 2, 3, 8).double() for _ in range(3))),
    "query, key and value differ in type": lambda: call(
        t(1, 2, 3, 8), t(1, 2, 3, 8), t(1, 2, 3, 8, dtype=torch.bfloat16)
    ),
    "key or value is on another device": lambda: call(t(1, 2, 3, 8), t(1, 2, 3, 8).cpu(), t(1, 2, 3, 8)),
    "query, key and value are not 4-D": lambda: same(2, 3, 8),
    "query, key and value are not 3-D": lambda: same(1, 2, 3, 8, layout="TND", mask=Mask.documents((3,), (3,))),
    "key and value do not fit together or to the query": lambda: call(t(2, 2, 3, 8), t(1, 2, 3, 8), t(1, 2, 3, 8)),
    "an input is empty": lambda: call(t(1, 2, 3, 8), t(1, 2, 0, 8), t(1, 2, 0, 8)),
    "query and key head sizes differ": lambda: call(t(1, 2, 3, 8), t(1, 2, 3, 4), t(1, 2, 3, 4)),
    "value head size above query head size": lambda: call(t(1, 2, 3, 8), t(1, 2, 3, 8), t(1, 2, 3, 16)),
    "head size above 768": lambda: same(1, 1, 2, 1024),
    "query heads are not a multiple of key heads": lambda: call(t(1, 3, 3, 8), t(1, 2, 3, 8), t(1, 2, 3, 8)),
    "more than 256 heads": lambda: same(1, 257, 2, 2),
    "packed documents need the TND layout, and TND needs documents": lambda: same(3, 2, 8, layout="TND"),
    "the document ends are not the packed length": lambda: same(3, 2, 8, layout="TND", mask=Mask.documents((2,), (2,))),
    "a query without a visible key in packed documents": lambda: call(
        t(4, 2, 8), t(3, 2, 8), t(3, 2, 8), Mask.documents((3, 4), (1, 3)), "TND"
    ),
    "the dense mask's shape": lambda: same(1, 2, 3, 8, mask=hidden(3, 4)),
    "the dense mask is not a bool tensor on the NPU": lambda: same(1, 2, 3, 8, mask=Mask.dense(t(3, 3))),
    "the bias does not broadcast to the scores": lambda: same(1, 2, 3, 8, mask=Mask.full().with_bias(t(1, 2, 3, 4))),
    "the bias is not a 4-D tensor on the NPU": lambda: same(
        1, 2, 3, 8, mask=Mask.full().with_bias(t(1, 2, 3, 3).cpu())
    ),
    "the bias is not in the query's type": lambda: same(
        1, 2, 3, 8, mask=Mask.full().with_bias(t(1, 2, 3, 3, dtype=torch.bfloat16))
    ),
    "sinks are not one float32 for each query head, on the NPU": lambda: same(1, 2, 3, 8, sinks=t(3)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_the_operator_refuses_has_a_reason(reason: str) -> None:
    args, options = REFUSED[reason]()
    assert ops.unsupported(*args, **options) == reason
    with pytest.raises((RuntimeError, IndexError)):
        ops.attention(*args, **options)


@pytest.mark.parametrize("shape", [(2, 4), (2, 1, 3, 3), (1, 3, 3, 3), (3,)])
def test_dense_masks_that_do_not_fit_have_a_reason(shape: tuple[int, ...]) -> None:
    args, options = same(1, 2, 3, 8, mask=hidden(*shape))
    assert ops.unsupported(*args, **options) == "the dense mask's shape"


@pytest.mark.parametrize("dropout", [1.0, -0.1, 1.5])
def test_a_dropout_that_leaves_nothing_or_is_none_has_a_reason(dropout: float) -> None:
    args, options = same(1, 2, 3, 8, dropout=dropout)
    assert ops.unsupported(*args, **options) == "a dropout that is not between 0 and 1"
    with pytest.raises(RuntimeError):
        ops.attention(*args, **options)


def test_dropout_of_packed_documents_has_a_reason() -> None:
    args = [t(6, 2, 8) for _ in range(3)]
    mask = Mask.documents((2, 6), (2, 6))
    assert ops.unsupported(*args, mask, layout="TND", dropout=0.1) == "dropout of packed documents"
    assert ops.unsupported(*args, mask, layout="TND") is None


def test_off_the_npu_there_is_a_reason() -> None:
    assert ops.unsupported(*(t(1, 2, 3, 8).cpu() for _ in range(3)), Mask.full(), layout="BNSD") == "not on an NPU"


def test_an_unknown_layout_is_an_error() -> None:
    args, _ = same(1, 2, 3, 8)
    with pytest.raises(ValueError, match="expected one of BNSD, BSND, TND"):
        ops.unsupported(*args, layout="BHSD")


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("which", ["query", "key", "value", "mask", "bias", "sinks"])
def test_a_tensor_subclass_has_a_reason(which: str) -> None:
    tensors = {"query": t(1, 2, 3, 8), "key": t(1, 2, 3, 8), "value": t(1, 2, 3, 8), "sinks": t(2)}
    tensors |= {"mask": torch.zeros(3, 3, dtype=torch.bool, device="npu"), "bias": t(1, 2, 3, 3)}
    tensors[which] = tensors[which].as_subclass(Subclass)
    mask = Mask.dense(tensors["mask"]).with_bias(tensors["bias"])
    reason = ops.unsupported(
        tensors["query"], tensors["key"], tensors["value"], mask, layout="BNSD", sinks=tensors["sinks"]
    )
    assert reason == "Subclass is not a plain tensor"


def test_under_a_function_transform_there_is_a_reason() -> None:
    k = t(1, 2, 3, 8)
    reasons: list[str | None] = []

    def f(q: Tensor) -> Tensor:
        reasons.append(ops.unsupported(q, k, k, Mask.full(), layout="BNSD"))
        return q.sum()

    torch.func.grad(f)(t(1, 2, 3, 8))
    torch.vmap(f)(t(2, 1, 2, 3, 8))
    assert reasons == ["a torch.func transform or forward-mode differentiation is active"] * 2


def test_a_gradient_through_the_log_sum_exp_has_a_reason() -> None:
    q, k, v = (random(1, 2, 3, 8, seed=i) for i in range(3))
    options: dict[str, Any] = {"layout": "BNSD", "return_lse": True}
    assert ops.unsupported(q, k, v, Mask.full(), **options) == "gradient through the log-sum-exp"
    assert ops.unsupported(q.detach(), k.detach(), v, Mask.full(), **options) is None
    with torch.no_grad():
        assert ops.unsupported(q, k, v, Mask.full(), **options) is None
    assert not ops.attention(q, k, v, Mask.full(), **options)[1].requires_grad


def test_the_operators_own_statistics_lose_their_gradient() -> None:
    q, k, v = (random(1, 2, 3, 8, seed=i) for i in range(3))
    output, maximum, total, *_ = torch.ops.npu.npu_fusion_attention(q, k, v, 2, "BNSD", scale=1.0)
    lse = maximum[..., 0] + total[..., 0].log()
    alone = torch.autograd.grad(output.sum(), (q, k), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(output.sum() + lse.sum(), (q, k)), alone)


def test_a_bias_that_division_by_the_scale_would_change_has_a_reason() -> None:
    reason = "a bias is exact only with a scale that is a power of two"
    bias = Mask.full().with_bias(t(1, 2, 3, 3, dtype=torch.bfloat16))
    narrow = [t(1, 2, 3, 8, dtype=torch.bfloat16) for _ in range(3)]
    assert ops.unsupported(*narrow, bias, layout="BNSD") == reason
    assert ops.unsupported(*narrow, bias, layout="BNSD", scale=0.25) is None
    half = [x.half() for x in narrow]
    assert (
        ops.unsupported(*half, Mask.full().with_bias(t(1, 2, 3, 3).half()), layout="BNSD", scale=0.25)
        == "a float16 bias may overflow when it is divided by the scale"
    )
    wide = [x.float() for x in narrow]
    assert ops.unsupported(*wide, Mask.full().with_bias(t(1, 2, 3, 3)), layout="BNSD", scale=0.0) == reason


def test_a_bias_on_documents_has_a_reason() -> None:
    mask = Mask.documents((3,), (3,)).with_bias(t(1, 2, 3, 3))
    args, options = same(3, 2, 8, layout="TND", mask=mask)
    assert ops.unsupported(*args, **options) == "a bias on packed documents"


def test_too_many_documents_have_a_reason() -> None:
    ends = tuple(range(1, 1026))
    args, options = same(1025, 1, 2, layout="TND", mask=Mask.documents(ends, ends))
    assert ops.unsupported(*args, **options) == "more than 1024 documents"


def test_lengths_beyond_the_documented_ones_have_a_reason() -> None:
    long = torch.empty(1, 1, (1 << 20) + 1, 1, device="npu", dtype=torch.float16)
    args, options = call(long[:, :, :2], long, long)
    assert ops.unsupported(*args, **options) == "sequence or batch beyond the operator's limit"
    with pytest.raises(RuntimeError):
        ops.attention(*args, **options)


def test_sinks_need_the_argument_and_a_chip_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    args, options = same(1, 2, 3, 8, sinks=t(2))
    assert ops.unsupported(*args, **options) is None
    with monkeypatch.context() as patch:
        patch.setattr(ops, "is_ascend950", lambda: True)
        assert ops.unsupported(*args, **options) == "Ascend950 ignores attention sinks"
    monkeypatch.setattr(ops, "schema_has", lambda operator, argument=None: argument != "sink")
    assert ops.unsupported(*args, **options) == "this torch_npu has no attention sinks"


def test_the_log_sum_exp_of_documents_needs_the_layout_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    args, options = same(3, 2, 8, layout="TND", mask=Mask.documents((3,), (3,)), return_lse=True)
    assert ops.unsupported(*args, **options) is None
    monkeypatch.setattr(ops, "schema_has", lambda operator, argument=None: argument != "softmax_layout")
    assert ops.unsupported(*args, **options) == "log-sum-exp of packed documents"


class TestMask:
    @pytest.mark.parametrize("window", [0, -3])
    def test_a_window_below_one_is_an_error(self, window: int) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            Mask.band(window)

    def test_an_unknown_alignment_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="lower_right, upper_left"):
            Mask.causal("bottom")

    @pytest.mark.parametrize(
        ("q_ends", "kv_ends", "options"),
        [
            ((), (), {}),
            ((2,), (1, 2), {}),
            ((0, 2), (0, 2), {}),
            ((2, 1), (2, 3), {}),
            ((2,), (2,), {"window": 0}),
            ((2,), (2,), {"causal": False, "window": 2}),
        ],
    )
    def test_documents_that_make_no_sense_are_an_error(
        self, q_ends: tuple[int, ...], kv_ends: tuple[int, ...], options: dict[str, Any]
    ) -> None:
        with pytest.raises(ValueError):  # noqa: PT011
            Mask.documents(q_ends, kv_ends, **options)

    def test_is_frozen(self) -> None:
        with pytest.raises(AttributeError):
            Mask.full().kind = "causal"  # type: ignore[misc]
