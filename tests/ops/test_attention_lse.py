"""Attention with the log-sum-exp of its scores, and gradients through both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from npu_patch.ops import attention_lse as ops
from npu_patch.ops.attention import Mask
from npu_patch.simulator import trace

from . import formulas
from .tools import assert_close, assert_no_worse, compiled, random, relative_error, wide

ENDS = (3, 4, 9)


def inputs(heads: int = 4, kv_heads: int = 2, length: int = 9, size: int = 8, value_size: int = 8, **options: Any):
    """BNSD."""
    sizes = ((heads, size), (kv_heads, size), (kv_heads, value_size))
    return [random(2, n, length, d, seed=i, **options) for i, (n, d) in enumerate(sizes)]


def hidden_of(kind: str) -> Tensor:
    row, column = torch.arange(9)[:, None], torch.arange(9)[None]
    if kind == "documents":
        document = torch.bucketize(torch.arange(9), torch.tensor(ENDS), right=True)
        return (document[:, None] != document[None]) | (column > row)
    hidden = formulas.hidden_of("lower_right" if kind == "dense" else kind, 9, 9, 3)
    hidden = torch.zeros(9, 9, dtype=torch.bool) if hidden is None else hidden
    if kind == "dense":
        hidden = hidden.clone()
        hidden[4] = True
    return hidden


def mask_of(kind: str) -> Mask:
    if kind == "documents":
        ends = (*ENDS, *(9 + end for end in ENDS))
        return Mask.documents(ends, ends)
    if kind == "dense":
        return Mask.dense(hidden_of(kind).to("npu"))
    return {"full": Mask.full(), "lower_right": Mask.causal(), "band": Mask.band(3)}[kind]


def fused(query: Tensor, key: Tensor, value: Tensor, kind: str, layout: str, **options: Any) -> tuple[Tensor, Tensor]:
    """BNSD in and out, through the layout."""
    tensors = [query, key, value]
    if layout != "BNSD":
        tensors = [x.transpose(1, 2) for x in tensors]
    if layout == "TND":
        tensors = [x.flatten(0, 1) for x in tensors]
    reason = ops.unsupported(*tensors, mask_of(kind), layout=layout, **options)
    assert reason is None, reason
    out, lse = ops.attention(*tensors, mask_of(kind), layout=layout, **options)
    if layout == "TND":
        out, lse = out.unflatten(0, (2, -1)), lse.unflatten(0, (2, -1)).transpose(1, 2)
    return (out if layout == "BNSD" else out.transpose(1, 2)), lse


def formula(query: Tensor, key: Tensor, value: Tensor, kind: str, layout: str, **options: Any) -> tuple[Tensor, Tensor]:
    return formulas.attention(query, key, value, hidden_of(kind).to(query.device), **options)


def with_sinks(out: Tensor, lse: Tensor) -> Tensor:
    """What gpt_oss makes of the two: depends on the log-sum-exp, and is 0 where that is -inf."""
    return out * torch.sigmoid(lse - 0.3).unsqueeze(-1).to(out.dtype)


KINDS = [(kind, layout) for kind in ("full", "lower_right", "band", "dense") for layout in ("BNSD", "BSND")]


@pytest.mark.parametrize("value_size", [8, 5])
@pytest.mark.parametrize(("kind", "layout"), [*KINDS, ("documents", "TND")])
def test_gradients_through_both_are_those_of_the_formula(kind, layout, value_size):
    ours, theirs = (lambda *x, f=f: with_sinks(*f(*x, kind, layout, scale=0.4)) for f in (fused, formula))
    assert_close(ours, theirs, *inputs(value_size=value_size))


def test_it_is_one_operator_and_its_gradient():
    tensors = inputs()
    with trace() as t:
        with_sinks(*fused(*tensors, "band", "BSND")).sum().backward()
    assert t.launches_by_op["npu.npu_fusion_attention"] == 1
    assert t.launches_by_op["npu.npu_fusion_attention_grad"] == 1
    assert t.host_syncs == 0


@pytest.mark.parametrize("at", [0, 1])
def test_one_result_alone(at):
    tensors = inputs()
    gradients = torch.autograd.grad(fused(*tensors, "band", "BNSD")[at].sin().sum(), tensors)
    exact = [wide(x) for x in tensors]
    expected = torch.autograd.grad(formula(*exact, "band", "BNSD")[at].sin().sum(), exact, allow_unused=True)
    for a, b in zip(gradients, expected, strict=True):
        assert relative_error(a, torch.zeros_like(a) if b is None else b) < 1e-5


@pytest.mark.parametrize("value_size", [8, 5])
def test_bfloat16_is_no_worse_than_eager_attention(value_size):
    ours, original, exact = (
        lambda *x, f=f: with_sinks(*f(*x)).sin() + f(*x)[1].cos().unsqueeze(-1).to(x[0].dtype)
        for f in (
            lambda *x: fused(*x, "band", "BSND"),
            lambda *x: formula(*x, "band", "BSND"),
            lambda *x: formula(*x, "band", "BSND"),
        )
    )
    assert_no_worse(
        ours,
        original,
        exact,
        lambda seed: [
            random(2, n, 9, d, seed=3 * seed + i, dtype=torch.bfloat16)
            for i, (n, d) in enumerate(((4, 8), (2, 8), (2, value_size)))
        ],
    )


def test_a_gradient_of_the_lse_is_not_rounded_to_bfloat16():
    """What comes back to the log-sum-exp is between two bfloat16 numbers; its effect on the key is not."""
    tensors = inputs(dtype=torch.bfloat16)
    head = 1 + torch.arange(9) / 4096
    exact = [wide(x) for x in tensors]
    lse = fused(*tensors, "full", "BNSD")[1]
    ours = torch.autograd.grad((lse * head.npu()).sum(), tensors[1])[0]
    flat = torch.autograd.grad(fused(*tensors, "full", "BNSD")[1].sum(), tensors[1])[0]
    theirs = torch.autograd.grad((formula(*exact, "full", "BNSD")[1] * head.double()).sum(), exact[1])[0]
    assert relative_error(ours, theirs) < 2e-3
    assert not torch.equal(ours, flat)


def test_checkpoints_recompute_it():
    tensors = inputs()

    def step(*x: Tensor) -> Tensor:
        return with_sinks(*fused(*x, "lower_right", "BSND")).sin().sum()

    direct = torch.autograd.grad(step(*tensors), tensors)
    again = torch.autograd.grad(checkpoint(step, *tensors, use_reentrant=False), tensors)
    assert all(torch.equal(a, b) for a, b in zip(direct, again, strict=True))


def test_without_a_gradient_it_is_the_plain_operator():
    tensors = inputs(grad=False)
    out, lse = fused(*tensors, "lower_right", "BNSD")
    assert not out.requires_grad
    assert not lse.requires_grad
    exact = formula(*(wide(x) for x in tensors), "lower_right", "BNSD")
    assert relative_error(lse, exact[1]) < 1e-6


def test_what_is_refused(monkeypatch):
    q, k, v = inputs()
    call = {"layout": "BNSD"}
    assert ops.unsupported(q.cpu(), k.cpu(), v.cpu(), Mask.full(), **call) == "not on an NPU"
    bias = Mask.full().with_bias(torch.zeros(1, 1, 9, 9).npu())
    assert ops.unsupported(q, k, v, bias, **call, scale=0.5) == "gradient through the log-sum-exp with a bias"
    assert ops.unsupported(q.detach(), k.detach(), v.detach(), bias, **call, scale=0.5) is None
    wide_heads = inputs(size=760, value_size=760)
    reason = ops.unsupported(*wide_heads, Mask.full(), **call)
    assert reason == "gradient through the log-sum-exp with a head size above 752"
    monkeypatch.setattr(ops, "schema_has", lambda *_: False)
    assert ops.unsupported(q, k, v, Mask.full(), **call) == "gradient through the log-sum-exp"
    packed = Mask.documents((18,), (18,))
    tnd = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    assert ops.unsupported(*tnd, packed, layout="TND") == "log-sum-exp of packed documents"


def test_a_second_derivative_is_an_error_and_not_silently_zero():
    tensors = inputs()
    first = torch.autograd.grad(fused(*tensors, "full", "BNSD")[0].sin().sum(), tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first[0].sum().backward()


def test_compiling_is_a_reason():
    reasons = []

    def step(*x: Tensor) -> Tensor:
        reasons.append(ops.unsupported(*x, Mask.full(), layout="BNSD"))
        return x[0].sin()

    compiled(step)[0](*inputs())
    assert reasons == ["gradient through the log-sum-exp under torch.compile"]
