"""The products of torchtitan's experts, and the gate between them: recognised, fused, the same function."""

from __future__ import annotations

import importlib
import types

import pytest
import torch
import torch.nn.functional as F

import npu_patch
from npu_patch.adapters.torchtitan import experts_counts, experts_gate, experts_meaning
from npu_patch.discovery import NotRecognised
from npu_patch.registry import Target
from npu_patch.simulator import trace
from tests.support.numerics import Call, assert_no_worse, relative_error, replay

from .generation import CURRENT, PREVIOUS, current, previous
from .models import Counts

SIZE, HIDDEN = 16, 24
ROUTINGS = {
    "uneven": [5, 0, 9, 2],
    "one has all": [0, 16, 0, 0],
    "one row": [0, 0, 1, 0],
    "none": [0, 0, 0, 0],
    "one expert": [16],
}


@pytest.fixture(autouse=True)
def recognised():
    """Before a test changes anything."""
    if CURRENT:
        importlib.import_module("torchtitan.models.common.moe")
    with npu_patch.scope("gmm", "swiglu"):
        pass


def tensors(dtype, *shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * 0.5).to("npu", dtype).requires_grad_() for shape in shapes]


def fill(module):
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)))
    return module


def loop(x, matrices, counts, dtype=None):
    """silu(gate) * up, expert by expert."""
    gate, down, up = matrices
    parts = [
        (F.silu(rows @ a.t()) * (rows @ b.t())) @ c.t()
        for rows, a, b, c in zip(x.split(counts.tolist()), gate, up, down, strict=True)
    ]
    return torch.cat(parts)


# ---- torchtitan 0.3.0 ------------------------------------------------------------------------------------------------


def experts(count, dtype=torch.float32):
    from torchtitan.models.common.moe import GroupedExperts

    made = GroupedExperts(GroupedExperts.Config(dim=SIZE, hidden_dim=HIDDEN, num_experts=count))
    return fill(made).to("npu", dtype)


def matrices_of(module):
    return [module.w1_EFD, module.w2_EDF, module.w3_EFD]


@current
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("ops", ["gmm", "swiglu", "gmm,swiglu"])
def test_experts_in_float32(routing, ops, monkeypatch):
    """Were they not to compute in bfloat16, they would be the formula's; an expert without rows gets zero gradients."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self)
    counts = torch.tensor(ROUTINGS[routing])
    (x,) = tensors(torch.float32, (int(counts.sum()), SIZE))
    subject = experts(len(counts))
    with npu_patch.scope(*ops.split(",")):
        seen = Counts()
        with trace() as t:
            out = subject(x, counts.npu())
            ours = torch.autograd.grad(out, [x, *matrices_of(subject)], torch.ones_like(out))
        hits = {op: seen.take(op) for op in ops.split(",")}
    assert hits == {op: (3 if op == "gmm" else int(bool(len(x))), {}) for op in hits}
    if "gmm" in hits and len(x) and len(counts) > 1:
        assert t.launches_by_op["npu.npu_grouped_matmul"] == 9
        assert t.host_syncs == 0
    assert t.launches_by_op.get("npu.npu_swiglu", 0) == (1 if "swiglu" in hits and len(x) else 0)
    leaves = [tensor.detach().cpu().double().requires_grad_() for tensor in (x, *matrices_of(subject))]
    wanted = loop(leaves[0], leaves[1:], counts)
    theirs = torch.autograd.grad(wanted, leaves, torch.ones_like(wanted))
    assert out.dtype is torch.float32
    for one, other in zip((out, *ours), (wanted, *theirs), strict=True):
        assert relative_error(one, other) < 2e-6
    for gradient in ours[1:]:
        assert not gradient[counts.npu() == 0].any()


@current
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ops", ["gmm", "swiglu", "gmm,swiglu"])
def test_experts_in_bfloat16_are_no_further_from_exact(dtype, ops):
    """Whatever comes in, they multiply in bfloat16; compared is with a formula of what they multiply."""
    counts = torch.tensor([40, 0, 70, 18])
    x, *matrices = tensors(dtype, (128, SIZE), (4, HIDDEN, SIZE), (4, SIZE, HIDDEN), (4, HIDDEN, SIZE))
    for tensor in (x, *matrices):
        tensor.data = tensor.data.bfloat16().to(dtype)  # exact in both
    subject = experts(4, dtype)

    def run(x, w1, w2, w3):
        held = {"w1_EFD": w1, "w2_EDF": w2, "w3_EFD": w3}
        return torch.func.functional_call(subject, held, (x, counts.npu()))

    def fused(*given):
        with npu_patch.scope(*ops.split(",")):
            seen = Counts()
            out = run(*given)
            assert all(seen.take(op)[0] for op in ops.split(","))
        return out

    direction = torch.randn(128, SIZE, generator=torch.Generator().manual_seed(9)).to("npu", dtype)
    call = Call((x, *matrices), {}, {0: direction})
    # The gradients of experts without rows are exact in both.
    assert_no_worse(fused, run, lambda x, *matrices: loop(x, matrices, counts), [call])


@current
def test_less_is_kept_for_the_backward_pass():
    counts, kept = torch.tensor([40, 0, 70, 18]).npu(), {}
    (x,) = tensors(torch.bfloat16, (128, SIZE))
    subject = experts(4, torch.bfloat16)
    for ops in (("gmm",), ("gmm", "swiglu")):
        subject.zero_grad(set_to_none=True)
        with npu_patch.scope(*ops), trace(list(subject.parameters())) as t:
            subject(x, counts).sum().backward()
        kept[ops] = t.saved_bytes, t.launches
    one = 128 * HIDDEN * 2
    assert kept[("gmm",)][0] - kept[("gmm", "swiglu")][0] == one
    assert kept[("gmm", "swiglu")][1] <= kept[("gmm",)][1]


@current
def test_a_forward_that_runs_again_gives_identical_gradients():
    from torch.utils.checkpoint import checkpoint

    counts = torch.tensor([40, 0, 70, 18]).npu()
    (x,) = tensors(torch.bfloat16, (128, SIZE))
    subject = experts(4, torch.bfloat16)
    with npu_patch.scope("gmm", "swiglu"):
        results = []
        for run in (subject, lambda *given: checkpoint(subject, *given, use_reentrant=False)):
            results.append(torch.autograd.grad(run(x, counts).square().sum(), [x, *subject.parameters()]))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@current
def test_a_subclass_with_products_of_its_own_keeps_them():
    from torchtitan.models.common.moe import GroupedExperts

    class Doubled(GroupedExperts):
        def _grouped_mm(self, *, A, B_t, offs):
            return 2 * torch._grouped_mm(A, B_t, offs=offs)

    counts = torch.tensor([5, 3]).npu()
    (x,) = tensors(torch.bfloat16, (8, SIZE))
    subject = fill(Doubled(Doubled.Config(dim=SIZE, hidden_dim=HIDDEN, num_experts=2))).to("npu", torch.bfloat16)
    stock = subject(x, counts)
    with npu_patch.scope("gmm", "swiglu"):
        seen = Counts()
        out = subject(x, counts)
        assert (seen.take("gmm"), seen.take("swiglu")) == ((0, {}), (1, {}))
    assert relative_error(out, stock) < 1e-2


@current
def test_without_a_gradient_the_gate_is_the_original():
    counts = torch.tensor([5, 3]).npu()
    (x,) = tensors(torch.bfloat16, (8, SIZE))
    subject = experts(2, torch.bfloat16)
    with torch.no_grad(), npu_patch.scope("gmm", "swiglu"), trace() as t:
        subject(x, counts)
    assert t.launches_by_op["npu.npu_grouped_matmul"] == 3
    assert "npu.npu_swiglu" not in t.launches_by_op


@current
def test_counts_beside_offsets_are_forgotten_when_either_changes():
    counts = torch.tensor([5, 0, 3]).npu()
    offsets = experts_counts.offsets_of(counts)
    assert offsets.tolist() == [5, 5, 8]
    assert offsets.dtype is torch.int32
    assert experts_counts.counts_of(offsets) is counts
    assert experts_counts.counts_of(offsets.clone()) is None
    counts.add_(1)
    assert experts_counts.counts_of(offsets) is None
    again = experts_counts.offsets_of(counts)
    again.sub_(1)
    assert experts_counts.counts_of(again) is None
    assert experts_counts.counts_of(experts_counts.offsets_of(counts.int())) is None
    with torch.inference_mode():
        assert experts_counts.counts_of(experts_counts.offsets_of(counts)) is None


@current
def test_gpt_oss_multiplies_through_the_same_method():
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts as Experts

    counts = torch.tensor([5, 0, 9, 2]).npu()
    (x,) = tensors(torch.bfloat16, (16, SIZE))
    subject = fill(Experts(Experts.Config(dim=SIZE, hidden_dim=HIDDEN, num_experts=4))).to("npu", torch.bfloat16)
    stock = subject(x, counts)
    expected = torch.autograd.grad(stock, [x, *subject.parameters()], torch.ones_like(stock))
    with npu_patch.scope("gmm", "swiglu"), trace() as t:
        seen = Counts()
        out = subject(x, counts)
        found = torch.autograd.grad(out, [x, *subject.parameters()], torch.ones_like(out))
        assert (seen.take("gmm"), seen.take("swiglu")) == ((2, {}), (0, {}))
    assert t.host_syncs == 0
    for one, other in zip((out, *found), (stock, *expected), strict=True):
        assert relative_error(one, other) < 1e-2


@current
@pytest.mark.parametrize(
    "body",
    [
        "return torch._grouped_mm(A, B_t, offs=offs) * 2",
        "return torch._grouped_mm(A.detach(), B_t, offs=offs)",
        "return torch._grouped_mm(A, B_t, offs=offs + self.shift)",
        "return torch._grouped_mm(A, B_t, offs=offs) + torch.rand(1)[0] * 0",
    ],
)
def test_another_product_is_not_recognised(body):
    namespace = {"torch": torch}
    exec(f"def _grouped_mm(self, *, A, B_t, offs):\n    {body}", namespace)
    with pytest.raises(Exception):  # noqa: B017, PT011
        experts_meaning.recognise_product(namespace["_grouped_mm"])


@current
def test_experts_of_another_kind_are_no_target():
    from torchtitan.models.common.moe import GroupedExperts

    source = {"silu": "F.silu", "gelu": "F.gelu"}
    found = {}
    for name, function in source.items():
        module = types.ModuleType(f"torchtitan.models.{name}")
        code = f"""
class Experts(Base):
    def forward(self, x, counts):
        offs = counts.cumsum(0, dtype=torch.int32)
        side = [self._grouped_mm(A=x.bfloat16(), B_t=w.bfloat16().transpose(-2, -1), offs=offs)
                for w in (self.w3_EFD, self.w1_EFD)]
        hidden = {function}(side[0]) * side[1]
        return self._grouped_mm(A=hidden, B_t=self.w2_EDF.bfloat16().transpose(-2, -1), offs=offs).type_as(x)
"""
        vars(module).update(torch=torch, F=F, Base=GroupedExperts)
        exec(code, vars(module))
        module.Experts.Config = GroupedExperts.Config
        found[name] = [one for one in experts_gate.find(module) if isinstance(one, Target)]
    assert [target.meaning for target in found["silu"]] == [
        "w2_EDF(silu(w3_EFD) * w1_EFD) of every expert, in bfloat16"  # the other one is the gate
    ]
    assert found["gelu"] == []


# ---- torchtitan 0.2.2 ------------------------------------------------------------------------------------------------


def functions(family):
    if family == "gpt_oss":
        from torchtitan.models.gpt_oss.model import moe
    else:
        from torchtitan.models.moe import moe
    return moe


@previous
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("rest", [0, 3])
def test_the_loop_over_experts_in_float32(routing, rest):
    """Rows that belong to no expert come out as zero."""
    counts = torch.tensor(ROUTINGS[routing])
    x, *matrices = tensors(
        torch.float32,
        (int(counts.sum()) + rest, SIZE),
        *((len(counts), *shape) for shape in ((HIDDEN, SIZE), (SIZE, HIDDEN), (HIDDEN, SIZE))),
    )
    moe = functions("llama4")
    results = []
    for on in (False, True):
        with npu_patch.scope(gmm=on), trace() as t:
            seen = Counts()
            out = moe._run_experts_for_loop(*matrices, x, counts.npu())
            gradients = torch.autograd.grad(out, [x, *matrices], torch.ones_like(out))
            assert seen.take("gmm") == (int(on), {})
        results.append([out, *gradients])
    assert t.host_syncs == 0
    for stock, ours in zip(*results, strict=True):
        assert stock.dtype is ours.dtype
        assert relative_error(ours, stock) < 2e-6
    assert not results[1][0][int(counts.sum()) :].any()


@previous
def test_autocast_casts_the_loop_s_products():
    """As the trainer of 0.2.2 runs on one NPU: the result is of autocast's type."""
    counts = torch.tensor([5, 0, 9, 2])
    x, *matrices = tensors(torch.float32, (16, SIZE), (4, HIDDEN, SIZE), (4, SIZE, HIDDEN), (4, HIDDEN, SIZE))
    moe, results = functions("llama4"), []
    for on in (False, True):
        with npu_patch.scope(gmm=on), torch.autocast("npu", torch.bfloat16):
            seen = Counts()
            out = moe._run_experts_for_loop(*matrices, x, counts.npu())
            assert seen.take("gmm") == (int(on), {})
        results.append([out, *torch.autograd.grad(out, [x, *matrices], torch.ones_like(out))])
    assert results[0][0].dtype is torch.bfloat16
    for stock, ours in zip(*results, strict=True):
        assert stock.dtype is ours.dtype
        assert relative_error(ours, stock) < 1e-2


@previous
def test_autocast_with_biases_runs_the_original():
    counts = torch.tensor([5, 0, 9, 2])
    shapes = ((4, 2 * HIDDEN, SIZE), (4, 2 * HIDDEN), (4, SIZE, HIDDEN), (4, SIZE))
    x, *matrices = tensors(torch.float32, (16, SIZE), *shapes)
    with npu_patch.scope("gmm"), torch.autocast("npu", torch.bfloat16):
        seen = Counts()
        out = functions("gpt_oss")._run_experts_for_loop(*matrices, 0.7, x, counts.npu())
        assert seen.take("gmm") == (0, {"biases wider than the products, as under autocast": 1})
    assert out.dtype is torch.float32


@previous
@pytest.mark.parametrize("name", ["_run_experts_grouped_mm", "_run_experts_for_loop"])
@pytest.mark.parametrize("degree", [1, 2])
def test_limited_gates_with_biases(name, degree):
    counts = torch.tensor([5, 0, 9, 2])
    shapes = ((4, 2 * HIDDEN, SIZE), (4, 2 * HIDDEN), (4, SIZE, HIDDEN), (4, SIZE))
    x, *matrices = tensors(torch.bfloat16, (16, SIZE), *shapes)
    moe = functions("gpt_oss")

    def run(x, *matrices):
        return getattr(moe, name)(*matrices, 0.7, x, counts.npu(), degree)

    def fused(*given):
        with npu_patch.scope("gmm"):
            seen = Counts()
            out = run(*given)
            assert seen.take("gmm") == (1, {})
        return out

    def exact(x, w1, b1, w2, b2):
        parts = []
        for i, rows in enumerate(x.split(counts.tolist())):
            hidden = experts_meaning.limited_gate(rows @ w1[i].t() + b1[i], 0.7)
            parts.append(hidden @ w2[i].t() + experts_meaning.shared_bias(b2[i], degree))
        return torch.cat(parts)

    direction = torch.randn(16, SIZE, generator=torch.Generator().manual_seed(9)).to("npu", torch.bfloat16)
    call = Call((x, *matrices), {}, {0: direction})
    with trace() as t:
        replay(fused, call)
    assert t.launches_by_op["npu.npu_grouped_matmul"] >= 6
    assert t.host_syncs == 0
    assert_no_worse(fused, run, exact, [call])


@previous
def test_grouped_products_in_bfloat16_are_no_further_from_exact():
    counts = torch.tensor([40, 0, 70, 18])
    moe = functions("qwen3")
    shapes = ((4, HIDDEN, SIZE), (4, SIZE, HIDDEN), (4, HIDDEN, SIZE))
    x, *matrices = tensors(torch.bfloat16, (128, SIZE), *shapes)

    def run(x, *matrices):
        return moe._run_experts_grouped_mm(*matrices, x, counts.npu())

    def fused(*given):
        with npu_patch.scope("gmm"):
            seen = Counts()
            out = run(*given)
            assert seen.take("gmm") == (1, {})
        return out

    direction = torch.randn(128, SIZE, generator=torch.Generator().manual_seed(9)).to("npu", torch.bfloat16)
    call = Call((x, *matrices), {}, {0: direction})
    assert_no_worse(fused, run, lambda x, *matrices: loop(x, matrices, counts), [call])


@previous
def test_a_replacement_is_where_torch_compile_looks_for_it():
    moe = functions("llama4")
    original = moe._run_experts_grouped_mm
    with npu_patch.scope("gmm"):
        ours = moe._run_experts_grouped_mm
        assert ours is not original
        assert (ours.__module__, ours.__qualname__) == (original.__module__, original.__qualname__)
    assert moe._run_experts_grouped_mm is original


@previous
@pytest.mark.parametrize(
    ("old", "new"),
    [("F.silu", "F.gelu"), ("* (x @ c.t())", "+ (x @ c.t())"), ("@ b.t()", "@ b.t() * 2"), ("x @ a", "x.detach() @ a")],
)
def test_other_experts_are_not_recognised(old, new):
    source = """
def run(w1, w2, w3, x, counts):
    parts = [(F.silu(x @ a.t()) * (x @ c.t())) @ b.t() for x, a, b, c in zip(x.split(counts.tolist()), w1, w2, w3)]
    return torch.cat(parts)
"""
    namespace = {"torch": torch, "F": F}
    exec(source, namespace)
    assert experts_meaning.recognise_experts(namespace["run"]).dtype is None
    assert old in source
    exec(source.replace(old, new), namespace)
    with pytest.raises(NotRecognised):
        experts_meaning.recognise_experts(namespace["run"])


if not CURRENT and not PREVIOUS:
    pytest.skip("torchtitan", allow_module_level=True)
