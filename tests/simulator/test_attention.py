from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from .helpers import TOLERANCE, assert_near, assert_same_function, values

pytestmark = pytest.mark.usefixtures("simulated")

B, N, NKV, SQ, SKV, D, DV = 2, 4, 2, 5, 7, 8, 8
SCALE = 0.3
VERSIONS = ["npu_fusion_attention", "npu_fusion_attention_v3"]


def compressed() -> Tensor:
    return torch.triu(torch.ones(2048, 2048, dtype=torch.bool, device="npu"), diagonal=1)


def formula(
    q: Tensor, k: Tensor, v: Tensor, shown: Tensor | None = None, pse: Tensor | None = None, sink: Tensor | None = None
) -> Tensor:
    """Attention on [B, N, S, D], one head at a time; ``shown`` True where a key is seen."""
    outputs = []
    for head in range(q.shape[1]):
        kv = head // (q.shape[1] // k.shape[1])
        scores = q[:, head] @ k[:, kv].transpose(-1, -2)
        if pse is not None:
            scores = scores + pse[:, head]
        scores = scores * SCALE
        if shown is not None:
            here = shown if shown.dim() == 2 else shown[:, head if shown.shape[1] > 1 else 0]
            scores = torch.where(here, scores, torch.tensor(-math.inf, dtype=scores.dtype))
        if sink is not None:
            column = sink[head].reshape(1, 1, 1).expand(*scores.shape[:-1], 1)
            probabilities = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
        else:
            probabilities = scores.softmax(-1)
        outputs.append(probabilities @ v[:, kv])
    return torch.stack(outputs, 1)


def rule(visible: Callable[[int, int], bool], q_len: int = SQ, kv_len: int = SKV) -> Tensor:
    return torch.tensor([[visible(i, j) for j in range(kv_len)] for i in range(q_len)])


TO_LAYOUT: dict[str, Callable[[Tensor], Tensor]] = {
    "BNSD": lambda t: t,
    "BSND": lambda t: t.transpose(1, 2),
    "BSH": lambda t: t.transpose(1, 2).flatten(2),
    "SBH": lambda t: t.permute(2, 0, 1, 3).flatten(2),
}


def inputs(dtype: torch.dtype = torch.float32, dv: int = DV, nkv: int = NKV, q_len: int = SQ) -> list[Tensor]:
    return [
        values(B, N, q_len, D, dtype=dtype),
        values(B, nkv, SKV, D, seed=1, dtype=dtype),
        values(B, nkv, SKV, dv, seed=2, dtype=dtype),
    ]


def attention(op: str, layout: str = "BNSD", **arguments: Any) -> Callable[..., Tensor]:
    """The operator on [B, N, S, D] tensors, by way of ``layout``; the result as [B, N, Sq, Dv]."""

    def call(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
        laid = [TO_LAYOUT[layout](t) for t in (q, k, v)]
        out = getattr(torch.ops.npu, op)(*laid, N, layout, scale=SCALE, **arguments, **more)[0]
        if layout == "BNSD":
            return out
        if layout == "BSND":
            return out.transpose(1, 2)
        if layout == "BSH":
            return out.unflatten(-1, (N, -1)).transpose(1, 2)
        return out.unflatten(-1, (N, -1)).permute(1, 2, 0, 3)

    return call


@pytest.mark.parametrize("op", VERSIONS)
@pytest.mark.parametrize("layout", list(TO_LAYOUT))
@pytest.mark.parametrize("nkv", [4, 2, 1])
def test_full_attention_in_every_layout_with_grouped_heads(op: str, layout: str, nkv: int) -> None:
    assert_same_function(attention(op, layout), formula, inputs(nkv=nkv))


@pytest.mark.parametrize("layout", list(TO_LAYOUT))
def test_value_heads_may_be_narrower(layout: str) -> None:
    assert_same_function(attention("npu_fusion_attention", layout), formula, inputs(dv=6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    assert_same_function(attention("npu_fusion_attention"), formula, inputs(dtype), tolerance=4 * TOLERANCE[dtype])


def test_scale_is_one_where_it_is_not_given() -> None:
    q, k, v = inputs()
    out = torch.ops.npu.npu_fusion_attention(q.npu(), k.npu(), v.npu(), N, "BNSD")[0]
    assert_near(out, formula(q.double() / SCALE, k.double(), v.double()), 1e-6)


@pytest.mark.parametrize("op", VERSIONS)
@pytest.mark.parametrize("q_len", [3, 7])
@pytest.mark.parametrize(
    ("mode", "pre", "following", "visible"),
    [
        (2, 2147483647, 2147483647, lambda i, j, d: j <= i),
        (3, 2147483647, 2147483647, lambda i, j, d: j <= i + d),
        (4, 2, 0, lambda i, j, d: i + d - 2 <= j <= i + d),
        (4, 1, 2, lambda i, j, d: i + d - 1 <= j <= i + d + 2),
    ],
)
def test_compressed_modes(
    op: str, q_len: int, mode: int, pre: int, following: int, visible: Callable[[int, int, int], bool]
) -> None:
    shown = rule(lambda i, j: visible(i, j, SKV - q_len), q_len)
    arguments = {"atten_mask": compressed(), "sparse_mode": mode, "pre_tockens": pre, "next_tockens": following}
    assert_same_function(attention(op, **arguments), lambda *a: formula(*a, shown=shown), inputs(q_len=q_len))


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("shape", [(SQ, SKV), (1, 1, SQ, SKV), (B, 1, SQ, SKV), (B, N, SQ, SKV)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_masks_of_every_documented_shape_hide_where_they_are_true(
    mode: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    hidden = values(*shape, seed=5) > 0.3
    hidden[..., 0] = False
    call = attention("npu_fusion_attention", atten_mask=hidden.to(dtype).npu(), sparse_mode=mode)
    shown = (~hidden) if hidden.dim() == 2 else (~hidden).expand(B, *shape[1:])
    assert_same_function(call, lambda *a: formula(*a, shown=shown), inputs())


def test_mode_0_with_a_band_that_agrees_with_the_mask() -> None:
    shown = rule(lambda i, j: i - 1 <= j <= i)
    call = attention("npu_fusion_attention", atten_mask=(~shown).npu(), pre_tockens=1, next_tockens=0)
    assert_same_function(call, lambda *a: formula(*a, shown=shown), inputs())


@pytest.mark.parametrize("mode", [1, 2, 3, 4])
def test_without_a_mask_every_mode_is_full_attention(mode: int) -> None:
    call = attention("npu_fusion_attention", sparse_mode=mode, pre_tockens=1, next_tockens=0)
    assert_same_function(call, formula, inputs())


@pytest.mark.parametrize("op", VERSIONS)
@pytest.mark.parametrize("shape", [(B, N, SQ, SKV), (1, N, SQ, SKV), (B, N, 1, SKV)])
def test_pse_is_added_before_scaling_and_has_a_gradient(op: str, shape: tuple[int, ...]) -> None:
    assert_same_function(
        lambda q, k, v, pse: attention(op)(q, k, v, pse=pse),
        lambda q, k, v, pse: formula(q, k, v, pse=pse.expand(B, N, SQ, SKV)),
        [*inputs(), values(*shape, seed=3)],
    )


@pytest.mark.parametrize("op", VERSIONS)
@pytest.mark.parametrize("layout", ["BNSD", "BSH"])
def test_sink_joins_the_softmax_and_has_a_gradient(op: str, layout: str) -> None:
    shown = rule(lambda i, j: j <= i + SKV - SQ)
    arguments = {"atten_mask": compressed(), "sparse_mode": 3}
    assert_same_function(
        lambda q, k, v, sink: attention(op, layout, **arguments)(q, k, v, sink=sink),
        lambda q, k, v, sink: formula(q, k, v, shown=shown, sink=sink),
        [*inputs(), values(N, seed=3)],
    )


@pytest.mark.parametrize("op", VERSIONS)
@pytest.mark.parametrize("mode", [None, 2, 3, 4])
@pytest.mark.parametrize("layout", ["", "TND"])
@pytest.mark.parametrize("with_sink", [False, True])
def test_tnd_is_attention_per_sequence(op: str, mode: int | None, layout: str, with_sink: bool) -> None:
    q_ends, kv_ends = [3, 3, 7], [4, 4, 10]  # the second sequence is empty
    pre, following = 2, 0
    visible = {
        None: lambda i, j, d: True,
        2: lambda i, j, d: j <= i,
        3: lambda i, j, d: j <= i + d,
        4: lambda i, j, d: i + d - pre <= j <= i + d + following,
    }[mode]
    arguments: dict[str, Any] = {"scale": SCALE, "softmax_layout": layout}
    if mode is not None:
        arguments |= {"atten_mask": compressed(), "sparse_mode": mode, "pre_tockens": pre, "next_tockens": following}
    ends: list[Any] = [q_ends, kv_ends]
    if op.endswith("v3"):
        ends = [torch.tensor(e) for e in ends]

    def on_npu(q: Tensor, k: Tensor, v: Tensor, *sink: Tensor) -> Tensor:
        more = {"sink": sink[0]} if sink else {}
        arguments["actual_seq_qlen"], arguments["actual_seq_kvlen"] = ends
        return getattr(torch.ops.npu, op)(q, k, v, N, "TND", **arguments, **more)[0]

    def expected(q: Tensor, k: Tensor, v: Tensor, *sink: Tensor) -> Tensor:
        parts = []
        for a, b, c, e in ((0, 3, 0, 4), (3, 7, 4, 10)):
            one = [t.transpose(0, 1)[None] for t in (q[a:b], k[c:e], v[c:e])]
            shown = rule(lambda i, j, d=e - c - b + a: visible(i, j, d), b - a, e - c)
            parts.append(formula(*one, shown=shown, sink=sink[0] if sink else None)[0].transpose(0, 1))
        return torch.cat(parts)

    tensors = [values(7, N, D), values(10, NKV, D, seed=1), values(10, NKV, 6, seed=2)]
    assert_same_function(on_npu, expected, tensors + [values(N, seed=3)] * with_sink)


def test_tnd_with_an_explicit_mask_uses_its_top_left_corner_per_sequence() -> None:
    hidden = values(4, 6, seed=5) > 0.3
    hidden[:, 0] = False
    tensors = [values(7, N, D), values(10, NKV, D, seed=1), values(10, NKV, D, seed=2)]
    out = torch.ops.npu.npu_fusion_attention(
        *(t.npu() for t in tensors), N, "TND", scale=SCALE, atten_mask=hidden.npu(),
        actual_seq_qlen=[3, 7], actual_seq_kvlen=[4, 10],
    )[0]  # fmt: skip
    q, k, v = (t.double() for t in tensors)
    for a, b, c, e in ((0, 3, 0, 4), (3, 7, 4, 10)):
        one = [t.transpose(0, 1)[None] for t in (q[a:b], k[c:e], v[c:e])]
        assert_near(out[a:b], formula(*one, shown=~hidden[: b - a, : e - c])[0].transpose(0, 1), 1e-6)


def test_statistics_are_the_row_maximum_and_sum_eight_times() -> None:
    q, k, v = inputs(nkv=4)
    _, maximum, total, *_ = torch.ops.npu.npu_fusion_attention(q.npu(), k.npu(), v.npu(), N, "BNSD", scale=SCALE)
    scores = q.double() @ k.double().transpose(-1, -2) * SCALE
    top = scores.amax(-1, keepdim=True)
    assert maximum.shape == total.shape == (B, N, SQ, 8)
    assert_near(maximum, top.expand(-1, -1, -1, 8), 1e-6)
    assert_near(total, (scores - top).exp().sum(-1, keepdim=True).expand(-1, -1, -1, 8), 1e-6)


def test_tnd_statistics_are_stored_head_by_head_unless_asked_otherwise() -> None:
    q, k, v = (values(6, N, D, seed=i).npu() for i in range(3))
    ends = {"actual_seq_qlen": [2, 6], "actual_seq_kvlen": [2, 6]}
    default = torch.ops.npu.npu_fusion_attention(q, k, v, N, "TND", **ends)[1]
    tokens_first = torch.ops.npu.npu_fusion_attention(q, k, v, N, "TND", softmax_layout="TND", **ends)[1]
    assert torch.equal(default.view(N, 6, 8).transpose(0, 1), tokens_first)
    assert not torch.equal(default, tokens_first)


def test_backward_uses_the_saved_statistics_and_output() -> None:
    q, k, v = (t.npu() for t in inputs(nkv=4))
    out, maximum, total, *_ = torch.ops.npu.npu_fusion_attention(q, k, v, N, "BNSD", scale=SCALE)

    def gradient(maximum: Tensor, total: Tensor, out: Tensor) -> Tensor:
        return torch.ops.npu.npu_fusion_attention_grad(
            q, k, v, torch.ones_like(out) * q[..., :1], N, "BNSD", softmax_max=maximum, softmax_sum=total,
            attention_in=out, scale_value=SCALE,
        )[0]  # fmt: skip

    right = gradient(maximum, total, out)
    for wrong in (
        gradient(maximum + 1, total, out),
        gradient(maximum, total * 2, out),
        gradient(maximum, total, out * 2),
    ):
        assert not torch.allclose(right, wrong)
    with pytest.raises(RuntimeError, match="softmax_max"):
        gradient(None, total, out)  # type: ignore[arg-type]


def hidden_row() -> tuple[Tensor, Tensor]:
    """A mask that hides everything from row 1, and that row."""
    hidden = torch.zeros(SQ, SKV, dtype=torch.bool)
    hidden[1] = True
    return hidden, torch.arange(SQ) == 1


def test_a_fully_hidden_row_is_zero_with_inner_precise_2_and_so_are_its_gradients() -> None:
    hidden, row = hidden_row()
    q, k, v = (t.npu().requires_grad_() for t in inputs())
    out = attention("npu_fusion_attention", atten_mask=hidden.npu(), inner_precise=2)(q, k, v)
    assert (out[:, :, row] == 0).all()
    out[:, :, row].sum().backward()
    for t in (q, k, v):
        assert (t.grad == 0).all()
    q2, k2, v2 = (t.detach().cpu().double() for t in (q, k, v))
    assert_near(out[:, :, ~row], formula(q2, k2, v2)[:, :, ~row], 3e-6)


def test_a_fully_hidden_row_is_the_mean_of_all_values_otherwise() -> None:
    hidden, row = hidden_row()
    q, k, v = (t.npu().requires_grad_() for t in inputs(nkv=4))
    out = attention("npu_fusion_attention", atten_mask=hidden.npu())(q, k, v)
    mean = v.detach().cpu().double().mean(2, keepdim=True)
    assert_near(out[:, :, row], mean, 3e-6)
    out[:, :, row].sum().backward()
    assert (q.grad == 0).all()
    assert (k.grad == 0).all()
    assert_near(v.grad, torch.full((B, N, SKV, D), 1 / SKV).double(), 3e-6)


def test_mode_3_with_more_queries_than_keys_zeroes_the_rows_that_see_nothing() -> None:
    q, k, v = values(B, N, SKV + 2, D), values(B, N, SKV, D, seed=1), values(B, N, SKV, D, seed=2)
    call = attention("npu_fusion_attention", atten_mask=compressed(), sparse_mode=3)
    ours = [t.npu().requires_grad_() for t in (q, k, v)]
    out = call(*ours)
    assert (out[:, :, :2] == 0).all()
    shown = rule(lambda i, j: j <= i, SKV, SKV)
    assert_near(out[:, :, 2:], formula(q[:, :, 2:].double(), k.double(), v.double(), shown=shown), 3e-6)
    out.sum().backward()
    assert (ours[0].grad[:, :, :2] == 0).all()


def test_stock_scaled_dot_product_attention_reaches_the_fused_operator() -> None:
    import npu_patch.simulator

    q, k, v = inputs(nkv=4)
    shown = rule(lambda i, j: (i + j) % 3 != 0 and i != 2)  # row 2 sees nothing: stock models have such rows
    ours = [t.npu().requires_grad_() for t in (q, k, v)]
    with npu_patch.simulator.trace() as t:
        out = torch.nn.functional.scaled_dot_product_attention(*ours, attn_mask=shown.npu())
        out.sum().backward()
    assert t.launches_by_op["npu.npu_fusion_attention_v3"] == 1
    assert t.launches_by_op["npu.npu_fusion_attention_grad_v3"] == 1
    assert all(x.grad.isfinite().all() for x in ours)
    seen = torch.arange(SQ) != 2
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=shown)
    assert_near(out[:, :, seen], expected.double()[:, :, seen], 3e-6)
