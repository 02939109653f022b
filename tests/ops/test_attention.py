from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from npu_patch.ops import attention as ops
from npu_patch.ops.attention import Mask

from . import formulas
from .tools import Ran, assert_close, assert_no_worse, compiled, random, relative_error, wide


def fused(query: Tensor, key: Tensor, value: Tensor, mask: Mask, layout: str = "BNSD", **options: Any) -> Any:
    reason = ops.unsupported(query, key, value, mask, layout=layout, **options)
    assert reason is None, reason
    return ops.attention(query, key, value, mask, layout=layout, **options)


def inputs(
    q_len: int,
    kv_len: int,
    heads: int = 2,
    kv_heads: int = 2,
    size: int = 8,
    value_size: int | None = None,
    **options: Any,
) -> list[Tensor]:
    """BNSD."""
    return [
        random(2, heads, q_len, size, **options),
        random(2, kv_heads, kv_len, size, **{"seed": 1, **options}),
        random(2, kv_heads, kv_len, value_size or size, **{"seed": 2, **options}),
    ]


def mask_of(kind: str, window: int) -> Mask:
    if kind == "full":
        return Mask.full()
    return Mask.band(window) if kind == "band" else Mask.causal(kind)


KINDS = ("full", "lower_right", "upper_left", "band")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    q_len=st.integers(1, 9),
    kv_len=st.integers(1, 9),
    window=st.integers(1, 10),
    kv_heads=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from(list(TOLERANCE)),
    layout=st.sampled_from(["BNSD", "BSND"]),
)
def test_every_mask_equals_the_formula_and_hides_later_tokens(
    kind: str, q_len: int, kv_len: int, window: int, kv_heads: int, dtype: torch.dtype, layout: str
) -> None:
    bnsd = inputs(q_len, kv_len, 4, kv_heads, dtype=dtype)
    mask, hidden = mask_of(kind, window), formulas.hidden_of(kind, q_len, kv_len, window)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layout == "BNSD":
            return fused(q, k, v, mask)
        return fused(*(x.transpose(1, 2) for x in (q, k, v)), mask, layout).transpose(1, 2)

    assert_close(ours, lambda q, k, v: formulas.attention(q, k, v, hidden)[0], *bnsd, most=TOLERANCE[dtype])
    if kind == "full" or kv_len == 1:
        return
    q, k, v = (x.detach() for x in bnsd)
    before = ours(q, k, v)
    k[:, :, -1], v[:, :, -1] = 100.0, -100.0
    after = ours(q, k, v)
    last = kv_len - 1
    blind = hidden[:, last]
    assert torch.equal(before[:, :, blind], after[:, :, blind])
    if not blind.all():
        assert not torch.equal(before, after)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=4),
    is_causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 6)),
    kv_heads=st.sampled_from([1, 2]),
    same=st.booleans(),
)
def test_packed_documents_see_only_themselves(
    lengths: list[tuple[int, int]], is_causal: bool, window: int | None, kv_heads: int, same: bool
) -> None:
    q_lens = [q for q, _ in lengths]
    kv_lens = q_lens if same else [q + more for q, more in lengths]
    mask = Mask.documents(
        tuple(accumulate(q_lens)), tuple(accumulate(kv_lens)), is_causal, window if is_causal else None
    )
    hidden = torch.ones(sum(q_lens), sum(kv_lens), dtype=torch.bool)
    row = column = 0
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        kind = "full" if not is_causal else "lower_right" if window is None else "band"
        own = formulas.hidden_of(kind, q_len, kv_len, window or 0)
        hidden[row : row + q_len, column : column + kv_len] = False if own is None else own
        row, column = row + q_len, column + kv_len
    q = random(sum(q_lens), 2, 8)
    k, v = random(sum(kv_lens), kv_heads, 8, seed=1), random(sum(kv_lens), kv_heads, 8, seed=2)

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return formulas.attention(q, k, v, hidden)[0][0].transpose(0, 1)

    assert_close(lambda q, k, v: fused(q, k, v, mask, "TND"), formula, q, k, v)
    with torch.no_grad():
        _, lse = fused(q, k, v, mask, "TND", return_lse=True)
    _, exact = formulas.attention(*(wide(x).transpose(0, 1)[None] for x in (q, k, v)), hidden)
    assert lse.shape == (sum(q_lens), 2)
    assert relative_error(lse, exact[0].transpose(0, 1)) < 1e-5


@pytest.mark.parametrize(
    "shape", [(2, 4, 5, 7), (2, 1, 5, 7), (1, 1, 5, 7), (1, 4, 5, 7), (5, 7), (2, 1, 1, 7), (1, 7)]
)
@pytest.mark.parametrize("rows", [True, False])
def test_dense_masks_of_every_shape_equal_the_formula(shape: tuple[int, ...], rows: bool) -> None:
    hidden = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.4
    hidden[..., 0] = False
    if rows and shape[-2] > 1:
        hidden[..., 2, :] = True
    mask = Mask.dense(hidden.npu(), may_hide_rows=rows)
    assert_close(
        lambda q, k, v: fused(q, k, v, mask), lambda q, k, v: formulas.attention(q, k, v, hidden)[0], *inputs(5, 7, 4)
    )


def test_a_hidden_row_without_its_handling_is_wrong() -> None:
    hidden = torch.zeros(5, 7, dtype=torch.bool)
    hidden[2] = True
    arguments = inputs(5, 7)
    careless = fused(*arguments, Mask.dense(hidden.npu(), may_hide_rows=False))
    assert careless[:, :, 2].abs().max() > 0
    assert fused(*arguments, Mask.dense(hidden.npu())).detach()[:, :, 2].abs().max() == 0


def test_a_causal_mask_always_reaches_the_operator_as_a_mask() -> None:
    """Without atten_mask the operator ignores sparse_mode and lets every query see the future."""
    q, k, v = inputs(6, 6)
    careless = torch.ops.npu.npu_fusion_attention(q, k, v, 2, "BNSD", scale=8**-0.5, sparse_mode=3)[0]
    torch.testing.assert_close(careless, fused(q, k, v, Mask.full()))
    assert not torch.allclose(careless, fused(q, k, v, Mask.causal()))


@pytest.mark.parametrize("size", [96, 256])
def test_packed_head_sizes_96_and_256_equal_the_formula(size: int) -> None:
    q, k, v = (random(6, 2, size, seed=i) for i in range(3))
    mask = Mask.documents((2, 6), (2, 6))
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    hidden[2:, :2] = True

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return formulas.attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), hidden)[0][0].transpose(0, 1)

    assert_close(lambda q, k, v: fused(q, k, v, mask, "TND"), formula, q, k, v)


def test_the_default_scale_is_the_heads_and_a_given_one_is_used() -> None:
    for scale in (None, 0.3):
        assert_close(
            lambda q, k, v, s=scale: fused(q, k, v, Mask.causal(), scale=s),
            lambda q, k, v, s=scale: formulas.attention(q, k, v, formulas.hidden_of("lower_right", 5, 5), s)[0],
            *inputs(5, 5),
        )


def test_a_smaller_value_head_size_equals_the_formula() -> None:
    hidden = formulas.hidden_of("lower_right", 5, 5)
    assert_close(
        lambda q, k, v: fused(q, k, v, Mask.causal()),
        lambda q, k, v: formulas.attention(q, k, v, hidden)[0],
        *inputs(5, 5, size=12, value_size=8),
    )


def test_bfloat16_error_is_no_worse_than_scaled_dot_product_attention() -> None:
    hidden = formulas.hidden_of("lower_right", 16, 16)

    def original(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.dtype == torch.float64:
            return formulas.attention(q, k, v, hidden)[0]
        return torch.nn.functional.scaled_dot_product_attention(*(x.cpu() for x in (q, k, v)), is_causal=True).npu()

    assert_no_worse(
        lambda q, k, v: fused(q, k, v, Mask.causal()),
        original,
        original,
        lambda seed: [random(2, 2, 16, 32, dtype=torch.bfloat16, seed=10 * seed + i) for i in range(3)],
    )


def test_sinks_take_part_in_the_softmax_and_get_a_gradient() -> None:
    hidden = formulas.hidden_of("lower_right", 5, 7)
    assert_close(
        lambda q, k, v, s: fused(q, k, v, Mask.causal(), sinks=s),
        lambda q, k, v, s: formulas.attention(q, k, v, hidden, sinks=s)[0],
        *inputs(5, 7),
        random(2, seed=5),
    )


@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (1, 4, 5, 7), (2, 1, 5, 7), (1, 1, 1, 7)])
@pytest.mark.parametrize("scale", [None, 0.25])
def test_a_bias_is_added_to_the_scaled_scores_and_gets_a_gradient(shape: tuple[int, ...], scale: float | None) -> None:
    hidden = formulas.hidden_of("lower_right", 5, 7)
    assert_close(
        lambda q, k, v, b: fused(q, k, v, Mask.causal().with_bias(b), scale=scale),
        lambda q, k, v, b: formulas.attention(q, k, v, hidden, scale, b)[0],
        *inputs(5, 7, 4),
        random(*shape, seed=6),
    )


def test_a_bias_of_the_lowest_number_hides_and_a_row_of_it_gives_equal_weights() -> None:
    bias = torch.zeros(1, 1, 5, 7)
    bias[..., 3:] = torch.finfo(torch.float32).min
    bias[:, :, 2] = torch.finfo(torch.float32).min
    q, k, v = inputs(5, 7, grad=False)
    found = fused(q, k, v, Mask.full().with_bias(bias.npu())).cpu()
    torch.testing.assert_close(found[:, :, 2], v.cpu().mean(2))
    visible = formulas.attention(q.cpu(), k.cpu()[:, :, :3], v.cpu()[:, :, :3])[0]
    torch.testing.assert_close(found[:, :, [0, 1, 3, 4]], visible[:, :, [0, 1, 3, 4]])


@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
def test_the_log_sum_exp_is_of_the_scaled_visible_scores(layout: str) -> None:
    bnsd = inputs(5, 7, grad=False)
    arguments = bnsd if layout == "BNSD" else [x.transpose(1, 2) for x in bnsd]
    output, lse = fused(*arguments, Mask.causal(), layout, return_lse=True)
    exact = formulas.attention(*(wide(x) for x in bnsd), formulas.hidden_of("lower_right", 5, 7))[1]
    assert lse.shape == (2, 2, 5)
    assert lse.dtype == torch.float32
    assert relative_error(lse, exact) < 1e-6
    torch.testing.assert_close(output, fused(*arguments, Mask.causal(), layout))


def test_the_fused_operator_runs_forward_and_backward_without_a_repeat() -> None:
    q, k, v = inputs(5, 5, 4, 1)
    fused(q, k, v, Mask.causal())
    with Ran() as ran:
        fused(q, k, v, Mask.causal()).sum().backward()
    assert (ran["npu_fusion_attention"], ran["npu_fusion_attention_grad"]) == (1, 1)
    for made in ("repeat_interleave", "expand", "clone", "copy_", "triu", "ones", "_local_scalar_dense", "mul"):
        # The one expand is the incoming gradient of sum().
        assert ran[made] == (made == "expand"), made


def test_a_thousand_calls_make_one_triangle_on_the_device() -> None:
    ops._triangles.clear()
    q, k, v = inputs(3, 3, grad=False)
    with Ran() as ran:
        for _ in range(500):
            ops._mask_options(Mask.causal(), q, 3, 3)
            ops._mask_options(Mask.band(2), q, 3, 3)
        fused(q, k, v, Mask.causal())
    assert (ran["triu"], ran["ones"]) == (1, 1)
    assert ran["_local_scalar_dense"] == ran["_to_copy"] - 1 == 0  # no host sync; one conversion to bool
    assert list(ops._triangles) == [q.device]
    before = torch.npu.memory_allocated()
    for _ in range(20):
        fused(q, k, v, Mask.causal())
    assert torch.npu.memory_allocated() == before


def test_the_triangle_made_in_inference_mode_serves_training_and_a_fake_one_is_not_kept() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    ops._triangles.clear()
    with FakeTensorMode():
        assert type(ops._triangle(torch.device("npu:0"))).__name__ == "FakeTensor"
    assert not ops._triangles
    arguments = inputs(3, 3)
    with torch.inference_mode():
        fused(*(x.detach() for x in arguments), Mask.causal())
    fused(*arguments, Mask.causal()).sum().backward()


def dense_of(q: Tensor) -> Mask:
    return Mask.dense(torch.ones(5, 5, dtype=torch.bool, device=q.device).triu(1), may_hide_rows=False)


@pytest.mark.parametrize("kind", [*KINDS, "dense"])
@pytest.mark.parametrize("shape", [(2, 2, 5, 7), (1, 2, 5, 7), (2, 1, 5, 7), (1, 1, 1, 7), (2, 1, 5, 1)])
@pytest.mark.parametrize("learned", [False, True])
def test_a_bias_of_minus_infinity_hides_and_a_row_of_it_gives_zero(
    kind: str, shape: tuple[int, ...], learned: bool
) -> None:
    bias = random(*shape, seed=3, grad=False)
    if shape[2] == 5:
        bias[:, :, 2] = -torch.inf
    if shape[3] == 7:
        bias[..., 4:6] = -torch.inf
    bias.requires_grad_(learned and shape[3] == 7)  # the gradient of what all keys get is 0
    if kind == "dense":
        unseen = torch.zeros(5, 7, dtype=torch.bool, device="npu")
        unseen[:, 0] = True
        unseen[4, :] = True
        mask = Mask.dense(unseen)
    else:
        mask, unseen = mask_of(kind, 2), formulas.hidden_of(kind, 5, 7, 2)

    def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * 0.5 + bias
        hidden = scores == -torch.inf
        if unseen is not None:
            hidden = hidden | unseen.to(q.device)
        weights = scores.masked_fill(hidden, torch.finfo(q.dtype).min).softmax(-1)
        return weights.masked_fill(hidden, 0.0) @ v

    q, k, v = inputs(5, 7)
    assert_close(lambda q, k, v, b: fused(q, k, v, mask.with_bias(b), scale=0.5), formula, q, k, v, bias)


@pytest.mark.parametrize("kind", [*KINDS, "dense", "bias"])
@pytest.mark.parametrize("cached", [True, False])
def test_fullgraph_compilation_keeps_the_operator(kind: str, cached: bool) -> None:
    arguments = inputs(5, 5)
    bias = random(1, 2, 5, 5, grad=False)

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if kind == "bias":
            return fused(q, k, v, Mask.causal().with_bias(bias))
        return fused(q, k, v, dense_of(q) if kind == "dense" else mask_of(kind, 3))

    if cached:
        f(*arguments)
    else:
        ops._triangles.clear()
    traced, operators = compiled(f)
    found = torch.autograd.grad(traced(*arguments).square().sum(), arguments)
    torch.testing.assert_close(found, torch.autograd.grad(f(*arguments).square().sum(), arguments))
    assert operators.count("npu.npu_fusion_attention_v3.default") == 1
    assert operators.count("npu.npu_fusion_attention_grad_v3.default") == 1
    assert kind == "dense" or not any("triu" in name for name in operators)


def test_fullgraph_compilation_of_packed_documents() -> None:
    arguments = [random(6, 2, 8, seed=i) for i in range(3)]
    mask = Mask.documents((2, 6), (2, 6))

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fused(q, k, v, mask, "TND")

    traced, operators = compiled(f)
    found = torch.autograd.grad(traced(*arguments).square().sum(), arguments)
    torch.testing.assert_close(found, torch.autograd.grad(f(*arguments).square().sum(), arguments))
    assert operators.count("npu.npu_fusion_attention_v3.default") == 1


def test_compilation_without_the_graph_capable_operator_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = inputs(3, 3, grad=False)
    monkeypatch.setattr(ops, "is_compiling", lambda: True)
    assert ops.unsupported(*arguments, Mask.full(), layout="BNSD") is None
    monkeypatch.setattr(ops, "is_ascend950", lambda: True)
    reason = "torch.compile needs npu_fusion_attention_v3, which Ascend950 lacks"
    assert ops.unsupported(*arguments, Mask.full(), layout="BNSD") == reason
    monkeypatch.setattr(ops, "schema_has", lambda operator, argument=None: operator != "npu_fusion_attention_v3")
    reason = "torch.compile needs npu_fusion_attention_v3"
    assert ops.unsupported(*arguments, Mask.full(), layout="BNSD") == reason


def test_checkpointing_that_saves_the_operator_runs_it_once() -> None:
    arguments = inputs(5, 5)
    plain = torch.autograd.grad(fused(*arguments, Mask.causal()).square().sum(), arguments)
    save = ops.SAVE_OPS()
    assert save == [torch.ops.npu.npu_fusion_attention.default, torch.ops.npu.npu_fusion_attention_v3.default]

    def contexts() -> Any:
        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if op in save else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    with Ran() as ran:
        output = checkpoint(
            lambda *a: fused(*a, Mask.causal()) * 1.0, *arguments, use_reentrant=False, context_fn=contexts
        )
        again = torch.autograd.grad(output.square().sum(), arguments)
    torch.testing.assert_close(plain, again)
    assert (ran["npu_fusion_attention"], ran["npu_fusion_attention_grad"]) == (1, 1)
