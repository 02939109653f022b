"""torchtitan's routers, of both generations: the same choice, weights, scores, counts and gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import npu_patch
from npu_patch.simulator import trace
from tests.ops.tools import Ran
from tests.support.numerics import assert_same_training, relative_error, training_step

from . import moe_models
from .generation import CURRENT, current, previous
from .models import Counts
from .ranks import run_on_ranks

EXPERTS, WIDTH, TOP_K = 16, 24, 4


def kind() -> type[nn.Module]:
    if CURRENT:
        from torchtitan.models.common.moe import TokenChoiceTopKRouter
    else:
        from torchtitan.models.moe.moe import TokenChoiceTopKRouter
    return TokenChoiceTopKRouter


def router(dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    settings = {
        "num_experts": EXPERTS,
        "num_expert_groups": None,
        "num_limited_groups": None,
        "top_k": TOP_K,
        "score_func": "sigmoid",
        "route_norm": True,
        "route_scale": 2.5,
        "_debug_force_load_balance": False,
    }
    cls = kind()
    made = cls.__new__(cls)
    nn.Module.__init__(made)
    made.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
    noise = torch.randn(EXPERTS, WIDTH, generator=torch.Generator().manual_seed(0))
    made.gate.weight = nn.Parameter(noise / WIDTH**0.5)
    for name, value in (settings | changes).items():
        setattr(made, name, value)
    return made.to("npu", dtype)


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    shape = (3, 10, WIDTH) if CURRENT else (30, WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to("npu", dtype).requires_grad_()


def bias() -> Tensor:
    return torch.linspace(-0.3, 0.4, EXPERTS)[torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(2))].npu()


def ordered(results: tuple[Tensor, ...]) -> list[Tensor]:
    """Weights and experts with the experts of a token in rising order; torch.topk was asked for none."""
    order = results[1].argsort(-1)
    return [results[0].gather(-1, order), results[1].gather(-1, order), results[2]]


def gradients(results: list[Tensor], x: Tensor, module: nn.Module) -> list[Tensor]:
    loss = torch.zeros((), device=x.device)
    for one in results:
        if one.requires_grad:
            loss = loss + (one * torch.linspace(-1, 1, one.numel()).view(one.shape).npu()).sum()
    return list(torch.autograd.grad(loss, [x, *module.parameters()]))


def both(module: nn.Module, x: Tensor, *given: Tensor | None) -> tuple[list[Tensor], list[Tensor], dict[str, int]]:
    """Results of the fused router and of the original, and why it was not fused."""
    theirs = ordered(module(x, *given))
    with npu_patch.scope("router"):
        counts = Counts()
        ours = ordered(module(x, *given))
        hits, reasons = counts.take("router")
    assert hits + sum(reasons.values()) == 1
    return ours, theirs, reasons


ALONE = "sigmoid scores that are not divided by their sum: fused, that launches as much"
WAYS = list(itertools.product(("sigmoid", "softmax"), (True, False), (None, (4, 2)), (False, True)))


@pytest.mark.parametrize(("score", "norm", "groups", "biased"), WAYS)
def test_every_way_to_choose_is_the_same(score, norm, groups, biased):
    count, kept = groups or (None, None)
    module = router(score_func=score, route_norm=norm, num_expert_groups=count, num_limited_groups=kept)
    x = tokens()
    given = (bias(),) if biased else ()
    ours, theirs, reasons = both(module, x, *given)
    assert torch.equal(ours[1], theirs[1])
    if score == "sigmoid" and not norm and not groups:
        assert list(reasons) == [ALONE]
        return
    assert reasons == {}
    for one, other in zip(ours, theirs, strict=True):
        assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
        assert relative_error(one, other) <= 2e-6
    for one, other in zip(gradients(ours, x, module), gradients(theirs, x, module), strict=True):
        assert relative_error(one, other) <= 1e-5
    moved = []
    for on in (True, False):
        with npu_patch.scope(router=on), trace() as t:
            gradients(ordered(module(x, *given)), x, module)
        moved.append((t.launches, t.bytes_read + t.bytes_written))
    assert moved[0] != moved[1]
    assert all(one <= other for one, other in zip(*moved, strict=True)), moved


def test_a_bias_of_none_is_none():
    module, x = router(), tokens()
    ours, theirs, reasons = both(module, x, None)
    assert reasons == {}
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gate_of_half_tokens_computes_as_the_original_has_it(dtype):
    """0.3.0 projects under autocast to float32, 0.2.2 in the model's type."""
    module, x = router(torch.bfloat16), tokens(torch.bfloat16)
    if CURRENT:
        module = module.to(dtype)
    ours, theirs, reasons = both(module, x, bias())
    assert reasons == {}
    assert torch.equal(ours[1], theirs[1])
    assert [one.dtype for one in ours] == [one.dtype for one in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert relative_error(one, other) <= 2e-6
    for one, other in zip(gradients(ours, x, module), gradients(theirs, x, module), strict=True):
        assert one.dtype is other.dtype
        assert relative_error(one, other) <= 1e-2


def test_hooks_on_the_gate_see_one_call():
    module, seen = router(), []
    module.gate.register_forward_hook(lambda *_: seen.append(1))
    with npu_patch.scope("router"):
        module(tokens(), bias())
        assert len(seen) == 1
        module._debug_force_load_balance = True
        module(tokens(), bias())
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"_debug_force_load_balance": True}, "_debug_force_load_balance is True"),
        ({"num_expert_groups": 8, "num_limited_groups": 4}, "groups of 2 of 16 experts"),
        ({"num_expert_groups": 4, "num_limited_groups": 1, "top_k": 4, "route_scale": torch.ones(()).npu()}, "type"),
    ],
)
def test_what_stays_the_original_has_a_reason(changes, reason):
    ours, theirs, reasons = both(router(**changes), tokens(), bias())
    assert list(reasons.values()) == [1]
    assert reason in next(iter(reasons))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_subclass_with_other_groups_has_a_reason():
    class Other(kind()):  # type: ignore[misc]
        def _get_node_limited_routing_scores(self, scores: Tensor) -> Tensor:
            return scores

    module = router(num_expert_groups=4, num_limited_groups=2)
    module.__class__ = Other
    _, _, reasons = both(module, tokens(), bias())
    assert reasons == {"Other overrides _get_node_limited_routing_scores": 1}


def test_one_launch_chooses_from_groups():
    module = router(num_expert_groups=4, num_limited_groups=2)
    launches = []
    for on in (True, False):
        with npu_patch.scope(router=on), torch.no_grad(), trace() as t:
            module(tokens(), bias())
        launches.append(t.launches)
        assert t.host_syncs == 0
    assert launches[0] <= launches[1] - 9, launches


@current
def test_compiled_the_router_is_the_same():
    module, x = router(num_expert_groups=4, num_limited_groups=2), tokens()
    with npu_patch.scope("router"):
        plain = ordered(module(x, bias()))
        fresh = ordered(torch.compile(module, backend="aot_eager", fullgraph=True)(x, bias()))
        rows = [row.state for row in npu_patch.status() if row.target.endswith("TokenChoiceTopKRouter.forward")]
    assert rows == ["compiled"]
    assert torch.equal(fresh[1], plain[1])
    for one, other in zip(gradients(fresh, x, module), gradients(plain, x, module), strict=True):
        assert relative_error(one, other) <= 1e-5


# ---- models ----------------------------------------------------------------------------------------------------------


# qwen3_5, which needs a picture for a step, has the router of qwen3.
@pytest.mark.parametrize("family", [name for name in moe_models.FAMILIES if name != "qwen3_5"])
def test_a_training_step_is_the_same(family):
    model, loss = moe_models.made(family)
    routers = sum(isinstance(module, kind()) for module in model.modules())
    assert routers
    with moe_models.without_bfloat16():
        with npu_patch.scope("attention"):
            stock = training_step(model, loss)
        with npu_patch.scope("attention", "router"):
            counts = Counts()
            run = training_step(model, loss)
            # In 0.2.2 llama4 divides no scores.
            assert counts.take("router") == ((0, {ALONE: routers}) if family == "llama4" else (routers, {}))
    # gpt_oss computes attention in bfloat16 whatever its own type is.
    assert_same_training(stock, run, *((5e-3, 1e-4) if family == "gpt_oss" else (1e-5, 1e-6)))


def selective(model: nn.Module) -> None:
    from torchtitan.distributed import activation_checkpoint

    if CURRENT:
        activation_checkpoint.SelectiveAC(activation_checkpoint.SelectiveAC.Config()).apply(model)
        return
    from torchtitan.config.job_config import ActivationCheckpoint

    settings = ActivationCheckpoint(mode="selective", selective_ac_option="op")
    activation_checkpoint.apply_ac(
        model, settings, model_compile_enabled=False, op_sac_save_list={torch.ops.aten.topk.default}
    )


@pytest.mark.parametrize("ops", [("attention", "router"), ("attention",)])
def test_activation_checkpointing_keeps_the_choice(ops):
    """The forward that runs again must find the same experts: the operator does not run again."""
    steps = []
    for checkpointed in (False, True):
        model, loss = moe_models.made("deepseek_v3")
        routers = sum(isinstance(module, kind()) for module in model.modules())
        with npu_patch.scope(*ops), moe_models.without_bfloat16():
            if checkpointed:
                selective(model)
            with Ran() as ran:
                steps.append(training_step(model, loss))
            chosen = "npu_moe_gating_top_k" if "router" in ops else "topk"
            assert ran[chosen] == routers
    one, other = (list(step.gradients.values()) for step in steps)
    assert steps[0].loss == steps[1].loss
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@current
def test_a_policy_of_ones_own_keeps_the_choice_too():
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    class Mine(SelectiveAC):
        def get_save_ops(self) -> set:
            return super().get_save_ops() - {torch.ops.aten.linear.default}

    original = vars(SelectiveAC)["get_save_ops"]
    with npu_patch.scope("router"):
        assert torch.ops.npu.npu_moe_gating_top_k.default in Mine(Mine.Config()).get_save_ops()
    assert vars(SelectiveAC)["get_save_ops"] is original
    assert torch.ops.npu.npu_moe_gating_top_k.default not in Mine(Mine.Config()).get_save_ops()


@previous
def test_tokens_are_counted_for_every_expert():
    module = router()
    ours, theirs, _ = both(module, tokens(), bias())
    assert ours[2].dtype is theirs[2].dtype
    assert int(ours[2].sum()) == 30 * TOP_K


# ---- DTensors --------------------------------------------------------------------------------------------------------


@current
@pytest.mark.slow
@pytest.mark.xdist_group("trainer")
def test_on_two_ranks_every_rank_routes_its_own_tokens():
    run_on_ranks("router_ranks", 2)
