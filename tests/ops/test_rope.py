from __future__ import annotations

import gc
import math
import threading

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from npu_patch.ops import rope
from npu_patch.ops.verdicts import Verdicts

from . import formulas
from .tools import Ran, assert_close, assert_no_worse, compiled, random, relative_error, wide

MODES = ("half", "interleave")


def tables(length: int, size: int, mode: str = "half", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """(length, size) tables of a plain rotation."""
    angles = torch.outer(torch.arange(length) * 0.7, 1.0 / 100.0 ** (torch.arange(0, size, 2) / size))
    full = torch.cat((angles, angles), -1) if mode == "half" else angles.repeat_interleave(2, -1)
    return full.cos().to(dtype).npu(), full.sin().to(dtype).npu()


def fused(x: Tensor, cos: Tensor, sin: Tensor, mode: str = "half") -> Tensor:
    assert rope.unsupported(x, cos, sin, mode) is None, rope.unsupported(x, cos, sin, mode)
    return rope.rotate(x, cos, sin, mode)


# name -> shape of x, shape of the table
LAYOUTS = {
    "BNSD 11SD": ((2, 3, 5, 8), (1, 1, 5, 8)),
    "BNSD B1SD": ((2, 3, 5, 8), (2, 1, 5, 8)),
    "BNSD one token": ((2, 9, 1, 8), (1, 1, 1, 8)),
    "BNSD one token per sample": ((2, 9, 1, 8), (2, 1, 1, 8)),
    "BNSD one head": ((2, 1, 5, 8), (2, 1, 5, 8)),
    "BNSD one head 11SD": ((2, 1, 5, 8), (1, 1, 5, 8)),
    "BSND 1S1D": ((2, 5, 3, 8), (1, 5, 1, 8)),
    "BSND BS1D": ((2, 5, 3, 8), (2, 5, 1, 8)),
    "BSND one token": ((2, 1, 9, 8), (2, 1, 1, 8)),
    "BSND full": ((2, 5, 3, 8), (2, 5, 3, 8)),
    "BNSD N above 8S": ((1, 33, 4, 8), (1, 1, 4, 8)),
    "SBND S11D": ((5, 2, 3, 8), (5, 1, 1, 8)),
    "TND T1D": ((5, 3, 8), (5, 1, 8)),
    "TND full": ((5, 3, 8), (5, 3, 8)),
}
SHARED = {"BNSD 11SD", "BNSD one token", "BNSD one head 11SD", "BSND 1S1D", "BNSD N above 8S", "SBND S11D", "TND T1D"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_equals_the_formula_in_every_layout_with_any_tables(layout: str, mode: str) -> None:
    """The tables are random: halves (neighbours) differ, and they are no rotation."""
    shape, table = LAYOUTS[layout]
    x, cos, sin = random(*shape), random(*table, seed=1, grad=False), random(*table, seed=2, grad=False)
    if mode == "interleave" and layout not in SHARED:
        assert rope.unsupported(x, cos, sin, mode) in (
            "interleave needs tables shared by the batch and the heads",
            "interleave needs tables shared by the heads",
        ) or (shape[0] == 1 or shape[2] == 1)
        return
    with Ran() as ran:
        fused(x, cos, sin, mode).sum().backward()
    assert ran["npu_rotary_mul"] == 2
    assert ran["npu_rotary_mul_backward"] == 0
    assert_close(
        lambda x, c, s: fused(x, c, s, mode), lambda x, c, s: formulas.rope(x, c, s, mode), x, cos, sin, most=1e-6
    )


def test_tables_with_a_yarn_factor_have_the_right_gradient() -> None:
    cos, sin = tables(5, 8)
    x = random(2, 3, 5, 8)
    assert_close(lambda x, c, s: fused(x, c, s), formulas.rope, x, (cos * 1.37)[None, None], (sin * 1.37)[None, None])


@pytest.mark.parametrize("shape", [(8, 64, 6, 128), (8, 64, 6, 72)])
def test_many_heads_and_an_unaligned_head_size_do_not_crash(shape: tuple[int, ...]) -> None:
    """B * N is above 8 * S, or D is not aligned: refused as BNSD, taken as BSND."""
    x, (cos, sin) = random(*shape), tables(shape[2], shape[3])
    cos, sin = cos[None, None], sin[None, None]
    with pytest.raises(RuntimeError):
        torch.ops.npu.npu_rotary_mul(x.detach(), cos, sin, "half")
    assert_close(fused, formulas.rope, x, cos, sin, most=1e-6)


def test_a_transposed_view_keeps_its_memory_layout() -> None:
    x = random(2, 5, 3, 8, grad=False).transpose(1, 2)
    cos, sin = tables(5, 8)
    assert fused(x, cos[None, None], sin[None, None]).stride() == (x * cos).stride()


def test_bfloat16_error_is_no_worse_than_the_originals() -> None:
    cos, sin = (t[None, None] for t in tables(16, 64, dtype=torch.bfloat16))

    def make(seed: int) -> list[Tensor]:
        return [random(2, 4, 16, 64, dtype=torch.bfloat16, seed=seed), cos, sin]

    assert_no_worse(fused, formulas.rope, formulas.rope, make)


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_input_rotated_in_float32_is_no_worse_than_the_original(mode: str) -> None:
    cos, sin = (t[None, :, None] for t in tables(16, 64, mode))

    def make(seed: int) -> list[Tensor]:
        return [random(2, 16, 4, 64, dtype=torch.bfloat16, seed=seed), cos, sin]

    def original(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        return formulas.rope(wide, c, s, mode).to(x.dtype)

    assert_no_worse(lambda x, c, s: fused(x.float(), c, s, mode).to(x.dtype), original, original, make)


def test_partial_rotation_is_the_original_on_the_slice() -> None:
    cos, sin = (t[None, None] for t in tables(5, 8))
    x = random(2, 3, 5, 20)

    def partial(rotate: object, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return torch.cat((rotate(x[..., :8], c, s), x[..., 8:]), -1)

    assert_close(lambda *a: partial(fused, *a), lambda *a: partial(formulas.rope, *a), x, cos, sin, most=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_double_backward_equals_the_formula(mode: str) -> None:
    x, head = random(2, 5, 3, 8), random(2, 5, 3, 8, seed=3)
    cos, sin = random(1, 5, 1, 8, seed=1, grad=False), random(1, 5, 1, 8, seed=2, grad=False)

    def second(rotate: object, x: Tensor, head: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        (first,) = torch.autograd.grad(rotate(x, cos, sin, mode).tanh(), x, head, create_graph=True)
        return list(torch.autograd.grad(first.square().sum(), (x, head)))

    exact = second(formulas.rope, *(wide(t) for t in (x, head, cos, sin)))
    for mine, theirs in zip(second(fused, x, head, cos, sin), exact, strict=True):
        assert relative_error(mine, theirs) < 1e-5


def test_learned_tables_get_their_gradient_from_the_operators_own_node() -> None:
    x = random(2, 9, 3, 8)
    cos, sin = random(1, 9, 1, 8, seed=1), random(1, 9, 1, 8, seed=2)
    assert_close(fused, formulas.rope, x, cos, sin)
    per_sample = random(2, 9, 1, 8, seed=1), random(2, 9, 1, 8, seed=2)
    assert_close(fused, formulas.rope, x, *per_sample)


def test_under_compilation_learned_tables_have_a_reason() -> None:
    x, cos, sin = random(2, 9, 3, 8), random(1, 9, 1, 8, seed=1), random(1, 9, 1, 8, seed=2)

    def f(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if rope.unsupported(x, cos, sin, "half") == "gradient to the tables under torch.compile":
            return formulas.rope(x, cos, sin)
        return rope.rotate(x, cos, sin, "half")

    traced, operators = compiled(f)
    found, exact = (torch.autograd.grad(g(x, cos, sin).square().sum(), (x, cos, sin)) for g in (traced, formulas.rope))
    torch.testing.assert_close(found, exact)
    assert not any("rotary" in name for name in operators)


def test_fullgraph_compilation_keeps_the_operator_forward_and_backward() -> None:
    x, (cos, sin) = random(2, 3, 5, 8), tables(5, 8)

    def f(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        adjoint = rope.adjoint_sine(sin, "half") if rope.needs_adjoint(x) else None
        assert rope.unsupported(x, cos[None, None], sin[None, None], "half") is None
        adjoint = None if adjoint is None else adjoint[None, None]
        return rope.rotate(x, cos[None, None], sin[None, None], "half", adjoint)

    traced, operators = compiled(f)
    rope.ADJOINTS["half"].clear()
    found, exact = (torch.autograd.grad(g(x, cos, sin).square().sum(), x)[0] for g in (traced, f))
    torch.testing.assert_close(found, exact)
    assert operators.count("npu.npu_rotary_mul.default") == 2
    assert not any("rotary_mul_backward" in name for name in operators)


def test_non_reentrant_checkpointing_gives_the_same_gradient() -> None:
    x, (cos, sin) = random(2, 3, 5, 8), (t[None, None] for t in tables(5, 8))
    plain = torch.autograd.grad(fused(x, cos, sin).square().sum(), x)
    again = torch.autograd.grad(checkpoint(fused, x, cos, sin, use_reentrant=False).square().sum(), x)
    torch.testing.assert_close(plain, again)


def saved_bytes(function: object, *inputs: Tensor) -> int:
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kept = function(*inputs)
    del kept
    return sum(storages.values())


def test_query_and_key_together_save_no_more_than_the_formula() -> None:
    q, k = random(2, 5, 4, 8), random(2, 5, 2, 8)
    cos, sin = (t[None, :, None] for t in tables(5, 8))

    def both(rotate: object, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, cos, sin), rotate(k, cos, sin)

    ours = saved_bytes(lambda q, k: both(fused, q, k), q, k)
    assert 0 < ours <= saved_bytes(lambda q, k: both(formulas.rope, q, k), q, k)
    assert ours < saved_bytes(lambda q: torch.ops.npu.npu_rotary_mul(q, cos, sin, "half"), q) + q.nbytes


class TestAdjointSine:
    def test_is_built_once_per_table_and_mode(self) -> None:
        sin = random(5, 8, grad=False)
        with Ran() as ran:
            first = rope.adjoint_sine(sin, "half")
            assert rope.adjoint_sine(sin, "half") is first
            assert rope.adjoint_sine(sin, "interleave") is not first
        assert ran["neg"] == 2
        expected = -torch.cat((sin[..., 4:], sin[..., :4]), -1)
        torch.testing.assert_close(first, expected)

    def test_follows_a_change_of_the_table_in_place(self) -> None:
        sin = random(5, 8, grad=False)
        before = rope.adjoint_sine(sin, "half")
        sin.mul_(2.0)
        torch.testing.assert_close(rope.adjoint_sine(sin, "half"), 2.0 * before)

    def test_follows_an_assignment_to_data(self) -> None:
        sin = random(5, 8, grad=False)
        before = rope.adjoint_sine(sin, "half")
        sin.data = sin * 3.0
        torch.testing.assert_close(rope.adjoint_sine(sin, "half"), 3.0 * before)

    def test_of_a_fake_table_is_not_remembered(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        rope.ADJOINTS["half"].clear()
        with FakeTensorMode():
            sin = torch.empty(5, 8, device="npu:0")
            assert rope.adjoint_sine(sin, "half").shape == (5, 8)
        assert not rope.ADJOINTS["half"]

    def test_dies_with_the_table(self) -> None:
        rope.ADJOINTS["half"].clear()
        sin = random(5, 8, grad=False)
        rope.adjoint_sine(sin, "half")
        assert len(rope.ADJOINTS["half"]) == 1
        del sin
        gc.collect()
        assert not rope.ADJOINTS["half"]

    def test_a_thousand_tables_leave_nothing_behind(self) -> None:
        rope.ADJOINTS["half"].clear()
        x = random(1, 2, 1, 4)
        for seed in range(1000):
            cos, sin = (torch.full((1, 2, 1, 4), float(seed)).npu() for _ in range(2))
            rope.rotate(x, cos, sin, "half").sum().backward()
        del cos, sin
        gc.collect()
        assert not rope.ADJOINTS["half"]

    def test_made_in_inference_mode_still_serves_training(self) -> None:
        x, (cos, sin) = random(1, 5, 2, 8), (t[None, :, None] for t in tables(5, 8))
        with torch.inference_mode():
            rope.adjoint_sine(sin, "half")
        fused(x, cos, sin).sum().backward()

    def test_a_table_made_in_inference_mode_is_not_remembered(self) -> None:
        rope.ADJOINTS["half"].clear()
        with torch.inference_mode():
            rope.adjoint_sine(torch.ones(5, 8, device="npu"), "half")
        assert not rope.ADJOINTS["half"]

    def test_threads_get_the_right_one(self) -> None:
        wrong: list[int] = []

        def work(seed: int) -> None:
            for i in range(50):
                sin = torch.full((2, 4), float(seed * 100 + i), device="npu")
                if not torch.equal(rope.adjoint_sine(sin, "half"), -sin):
                    wrong.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_is_not_built_without_a_gradient(self) -> None:
        x, (cos, sin) = random(1, 5, 2, 8), (t[None, :, None] for t in tables(5, 8))
        with torch.no_grad(), Ran() as ran:
            fused(x, cos, sin)
            assert not rope.needs_adjoint(x)
        assert ran["neg"] == 0
        assert rope.needs_adjoint(x.detach(), x)


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return random(*shape, dtype=dtype, grad=False)


# reason -> x, cos, sin, mode; the operator itself refuses each of them
REFUSED = {
    "input of type float64": lambda: (t(1, 5, 2, 8).double(), t(1, 5, 1, 8).double(), t(1, 5, 1, 8).double(), "half"),
    "rotary mode quarter": lambda: (t(1, 5, 2, 8), t(1, 5, 1, 8), t(1, 5, 1, 8), "quarter"),
    "the tables are on another device": lambda: (t(1, 5, 2, 8), t(1, 5, 1, 8).cpu(), t(1, 5, 1, 8), "half"),
    "the input and the tables are not both 3-D or both 4-D": lambda: (t(1, 5, 2, 8), t(5, 8), t(5, 8), "half"),
    "cos and sin differ in shape": lambda: (t(1, 5, 2, 8), t(1, 5, 1, 8), t(1, 1, 2, 8), "half"),
    "the tables' last size is not the input's": lambda: (t(1, 5, 2, 8), t(1, 5, 1, 4), t(1, 5, 1, 4), "half"),
    "odd head size": lambda: (t(1, 5, 2, 7), t(1, 5, 1, 7), t(1, 5, 1, 7), "half"),
    "the input is empty": lambda: (t(0, 5, 2, 8), t(1, 5, 1, 8), t(1, 5, 1, 8), "half"),
    "head size of 896 or above": lambda: (t(1, 2, 2, 896), t(1, 2, 1, 896), t(1, 2, 1, 896), "half"),
    "the tables do not broadcast to the input": lambda: (t(1, 5, 2, 8), t(1, 4, 1, 8), t(1, 4, 1, 8), "half"),
    "table layout is not T1D or TND": lambda: (t(5, 2, 8), t(1, 1, 8), t(1, 1, 8), "half"),
    "1000 heads or more": lambda: (t(2, 1000, 2), t(2, 1, 2), t(2, 1, 2), "half"),
    "table layout is not 1S1D, BS1D, S11D or of the input's shape": lambda: (
        t(2, 5, 3, 8),
        t(1, 5, 3, 8),
        t(1, 5, 3, 8),
        "half",
    ),
    "interleave needs tables shared by the heads": lambda: (t(5, 2, 8), t(5, 2, 8), t(5, 2, 8), "interleave"),
    "interleave needs tables shared by the batch and the heads": lambda: (
        t(2, 5, 3, 8),
        t(2, 5, 1, 8),
        t(2, 5, 1, 8),
        "interleave",
    ),
    "batch times heads of 1000 or above": lambda: (t(40, 2, 25, 2), t(1, 2, 1, 2), t(1, 2, 1, 2), "interleave"),
    "batch or heads of 1000 or above": lambda: (t(2, 3, 1000, 2), t(1, 3, 1, 2), t(1, 3, 1, 2), "half"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_the_operator_refuses_has_a_reason(reason: str) -> None:
    x, cos, sin, mode = REFUSED[reason]()
    assert rope.unsupported(x, cos, sin, mode) == reason
    with pytest.raises((RuntimeError, IndexError)):
        rope.rotate(x, cos, sin, mode)


def test_interleave_with_a_table_for_each_head_has_a_reason() -> None:
    x, table = t(1, 5, 3, 8), t(1, 5, 3, 8)
    assert rope.unsupported(x, table, table, "half") is None
    reason = "interleave needs tables shared by the batch and the heads"
    assert rope.unsupported(x, table, table, "interleave") == reason
    with pytest.raises(RuntimeError):
        rope.rotate(x, table, table, "interleave")


def test_learned_tables_beyond_the_backwards_limits_have_a_reason() -> None:
    def learned(*shape: int) -> Tensor:
        return random(*shape)

    cases = {
        "gradient to the tables with batch times heads above 1024": (t(33, 2, 32, 2), learned(1, 2, 1, 2)),
        "gradient to the tables with a batch not below the sequence length": (t(5, 2, 5, 8), learned(5, 1, 5, 8)),
    }
    for reason, (x, table) in cases.items():
        assert rope.unsupported(x, table, table, "half") == reason
        assert rope.unsupported(x, table.detach(), table.detach(), "half") is None
        with torch.no_grad():
            assert rope.unsupported(x, table, table, "half") is None
        with pytest.raises(RuntimeError):
            torch.ops.npu.npu_rotary_mul(x, table, table, "half").sum().backward()


def test_tables_in_another_type_have_a_reason_because_they_would_be_rounded() -> None:
    x, (cos, sin) = t(1, 5, 2, 64, dtype=torch.bfloat16), (u[None, :, None] for u in tables(5, 64))
    assert rope.unsupported(x, cos, sin, "half") == "the tables are not in the input's type"
    exact = formulas.rope(x.cpu().double(), cos.cpu().double(), sin.cpu().double())
    rounded = rope.rotate(x, cos, sin, "half").cpu().double()
    kept = rope.rotate(x.float(), cos, sin, "half").bfloat16().cpu().double()
    assert (kept - exact).norm() < 0.95 * (rounded - exact).norm()


def test_off_the_npu_there_is_a_reason() -> None:
    assert (
        rope.unsupported(*(u.cpu() for u in (t(1, 5, 2, 8), t(1, 5, 1, 8), t(1, 5, 1, 8))), "half") == "not on an NPU"
    )


class Subclass(torch.Tensor):
    pass


def test_a_tensor_subclass_has_a_reason() -> None:
    x, cos, sin = t(1, 5, 2, 8), t(1, 5, 1, 8), t(1, 5, 1, 8)
    for i in range(3):
        arguments = [u.as_subclass(Subclass) if i == j else u for j, u in enumerate((x, cos, sin))]
        assert rope.unsupported(*arguments, "half") == "Subclass is not a plain tensor"


def test_a_buffer_and_a_parameter_are_plain_tensors() -> None:
    x = t(1, 5, 2, 8)
    buffer = torch.nn.Buffer(t(1, 5, 1, 8))
    parameter = torch.nn.Parameter(t(1, 5, 1, 8), requires_grad=False)
    assert rope.unsupported(x, buffer, parameter, "half") is None


def test_under_a_function_transform_there_is_a_reason_and_the_operator_raises() -> None:
    x, (cos, sin) = t(4, 1, 5, 2, 8), (u[None, :, None] for u in tables(5, 8))
    reasons: list[str | None] = []

    def f(x: Tensor) -> Tensor:
        reasons.append(rope.unsupported(x, cos, sin, "half"))
        return formulas.rope(x, cos, sin).sum()

    torch.vmap(f)(x)
    torch.func.grad(f)(x[0])
    assert reasons == ["a torch.func transform or forward-mode differentiation is active"] * 2
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: rope.rotate(x, cos, sin, "half").sum())(x[0])


def test_ascend950_takes_any_broadcast_and_wider_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope, "is_ascend950", lambda: True)
    monkeypatch.setattr(rope, "_verdicts", Verdicts(rope.judge))  # the chip is one for a process
    assert rope.unsupported(t(2, 5, 3, 8), t(2, 5, 1, 8), t(2, 5, 1, 8), "interleave") is None
    assert rope.unsupported(t(1, 2, 1, 1024), t(1, 2, 1, 1024), t(1, 2, 1, 1024), "half") is None
    assert rope.unsupported(t(1, 2, 1, 1026), t(1, 2, 1, 1026), t(1, 2, 1, 1026), "half") == "head size above 1024"
    table = t(1, 4, 1, 8)
    assert rope.unsupported(t(1, 5, 2, 8), table, table, "half") == "the tables do not broadcast to the input"


def test_a_decoding_step_equals_the_same_row_of_the_whole_sequence() -> None:
    x, (cos, sin) = t(2, 8, 6, 16), tables(6, 16)
    whole = fused(x, cos[None, None], sin[None, None])
    step = fused(x[:, :, 5:], cos[None, None, 5:], sin[None, None, 5:])
    torch.testing.assert_close(step, whole[:, :, 5:])
    assert math.isfinite(whole.sum().item())


def test_no_argument_is_changed() -> None:
    x, (cos, sin) = random(2, 8, 6, 16), (u[None, None] for u in tables(6, 16))
    before = [u.detach().clone() for u in (x, cos, sin)]
    y = fused(x, cos, sin)
    head = torch.ones_like(y)
    y.backward(head)
    assert torch.equal(head, torch.ones_like(y))
    assert all(torch.equal(a, b) for a, b in zip(before, (x, cos, sin), strict=True))
