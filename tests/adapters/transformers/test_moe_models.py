"""Models with experts: every combination of the switches, auxiliary losses, counts, LoRA, checkpointing, compiling."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import npu_patch
from npu_patch.simulator import trace

from ...support import tiny_models
from ...support.numerics import Run, assert_same_training, relative_error, training_step

pytest.importorskip("transformers.integrations.moe")
SWITCHES = ("router", "permute", "gmm", "swiglu")
COMBINATIONS = [ops for n in range(1, 5) for ops in itertools.combinations(SWITCHES, n)]


def step(model: Any, name: str, **given: Any) -> Run:
    arguments = {**tiny_models.inputs(name), "use_cache": False, **given}
    return training_step(model, lambda: model(**arguments, labels=arguments["input_ids"]).loss)


def hits(*ops: str) -> dict[str, int]:
    status = npu_patch.status()
    return {op: status.hits(op) for op in ops}


def since(before: dict[str, int]) -> dict[str, int]:
    return {op: n - before[op] for op, n in hits(*before).items()}


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=pytest.mark.xdist_group(f"pair {n}")) for n in ("qwen3_moe", "glm4_moe")],
)
def pair(request) -> tuple[str, Any, Run]:
    model = tiny_models.build(request.param)
    return request.param, model, step(model, request.param)


@pytest.mark.parametrize("ops", COMBINATIONS, ids="+".join)
def test_every_combination_of_the_switches_trains_the_same(pair, ops):
    name, model, stock = pair
    layers = tiny_models.calls(name).experts
    expected = {"router": layers, "permute": layers, "gmm": 2 * layers, "swiglu": layers}
    with npu_patch.scope(*ops):
        before = hits(*SWITCHES)
        assert_same_training(stock, step(model, name))
        assert since(before) == {op: expected[op] if op in ops else 0 for op in SWITCHES}


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen2_moe", "olmoe"])
def test_router_logits_and_the_auxiliary_loss_are_the_same(name):
    model, given = tiny_models.build(name), tiny_models.inputs(name)
    given |= {"labels": given["input_ids"], "output_router_logits": True, "use_cache": False}
    stock, wanted = model(**given), step(model, name, output_router_logits=True)
    with npu_patch.scope(*SWITCHES):
        before = hits(*SWITCHES)
        patched = model(**given)
        assert all(since(before).values())
        assert_same_training(wanted, step(model, name, output_router_logits=True))
    assert relative_error(patched.aux_loss, stock.aux_loss) <= 1e-6
    for ours, theirs in zip(patched.router_logits, stock.router_logits, strict=True):
        assert relative_error(ours, theirs) <= 1e-5


def launches(experts: int, whole: bool, *ops: str) -> tuple[int, int, int]:
    """Launches, host syncs and saved bytes of one layer forward and backward."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=16, num_experts=experts, num_experts_per_tok=2, norm_topk_prob=True
    )
    config._experts_implementation = "grouped_mm"
    block = Qwen3MoeSparseMoeBlock(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        parameter.data.normal_(generator=generator)
    block = block.npu()
    x = torch.randn(1, 64, 32, generator=generator).npu().requires_grad_()
    ids = torch.rand(64, experts, generator=generator).topk(2).indices.npu()
    weights = torch.rand(64, 2, generator=generator).npu().requires_grad_()
    grad = torch.randn(1, 64, 32, generator=generator).npu()
    with npu_patch.scope(*ops) if ops else npu_patch.scope(**dict.fromkeys(SWITCHES, False)):
        for _ in range(2):  # the first one fills caches
            with trace(list(block.parameters())) as t:
                if whole:
                    block(x).backward(grad)
                else:
                    block.experts(x[0], ids, weights).backward(grad[0])
    return t.launches, t.host_syncs, t.saved_bytes


@pytest.mark.parametrize("whole", [False, True])
def test_a_layer_launches_a_third_and_no_more_for_more_experts_and_waits_for_nothing(whole):
    ops = SWITCHES if whole else SWITCHES[1:]
    stock, patched = launches(8, whole), launches(8, whole, *ops)
    assert stock[1] > 0
    assert patched[1] == 0
    assert patched[0] <= stock[0] / 3
    assert launches(32, whole, *ops)[:2] == (patched[0], 0)
    assert launches(32, whole)[0] > 1.5 * stock[0]


@pytest.mark.parametrize("ops", [SWITCHES[1:], *[(op,) for op in SWITCHES[1:]]], ids="+".join)
def test_no_more_is_saved_for_the_backward_pass(ops):
    group_list = 8 * (8 + 1)  # int64, and one bool, for each expert
    assert launches(8, False, *ops)[2] <= launches(8, False)[2] + (group_list if ops == ("gmm",) else 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_trains_the_same(reentrant):
    model = tiny_models.build("qwen3_moe").train()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    stock = step(model, "qwen3_moe")
    with npu_patch.scope(*SWITCHES):
        before = hits("gmm", "permute")
        assert_same_training(stock, step(model, "qwen3_moe"))
        assert since(before) == {"gmm": 8, "permute": 4}  # forward, and forward again


def test_lora_on_experts_and_gates_trains_the_same():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
        init_lora_weights=False,
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_models.build("qwen3_moe"), config).npu()
    stock = step(model, "qwen3_moe")
    assert sum("experts" in name and "lora" in name for name in stock.gradients) == 8
    with npu_patch.scope(*SWITCHES):
        before = hits("gmm", "permute", "swiglu")
        assert_same_training(stock, step(model, "qwen3_moe"))
        assert since(before) == {"gmm": 4, "permute": 2, "swiglu": 2}


def test_parameters_keep_their_names_and_layouts():
    model = tiny_models.build("gpt_oss")
    before = {name: (p.shape, p.stride(), p.data_ptr()) for name, p in model.named_parameters()}
    with npu_patch.scope(*SWITCHES):
        step(model, "gpt_oss")
        assert {name: (p.shape, p.stride(), p.data_ptr()) for name, p in model.named_parameters()} == before


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_compiled_model_is_one_graph_of_fused_operators(name):
    operators: Counter[str] = Counter()

    def take(graph: Any, example_inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if str(node.target).startswith("npu."):
                operators[str(node.target).split(".")[1]] += 1
        return make_boxed_func(graph.forward)

    model, ops = tiny_models.build(name, torch.bfloat16), SWITCHES[1:]
    given = {**tiny_models.inputs(name), "use_cache": False}
    given["labels"] = given["input_ids"]
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=take, bw_compiler=take), fullgraph=True)
    training_step(model, lambda: compiled(**given).loss)
    assert not operators["npu_grouped_matmul"]
    with npu_patch.scope(*ops):
        eager = step(model, name)
        run = training_step(model, lambda: compiled(**given).loss)
        assert run.loss == pytest.approx(eager.loss, rel=1e-2)
        assert run.gradients.keys() == eager.gradients.keys()
        assert operators["npu_grouped_matmul"] == 2 * 2 * 3  # two layers of two products, and two gradients of each
        assert operators["npu_moe_token_permute"] == 2
