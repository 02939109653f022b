"""torchtitan's stock trainer on one NPU, with experts: as without patches, in both generations."""

from __future__ import annotations

import pytest

from .generation import PREVIOUS
from .moe_models import TRAINED
from .trainer_runs import Run, model_flags, train

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.xdist_group("trainer")]

STEPS = 5
OPS = "rms_norm,rope,attention,swiglu,cross_entropy,gmm,permute"
MODELS = (
    {"qwen3": "debugmodel_moe", "deepseek_v3": "debugmodel"}
    if PREVIOUS
    else {"qwen3": "qwen3_moe_debug", "deepseek_v3": "deepseek_v3_debugmodel"}
)
FLAGS = ["--debug.seed", "0", "--training.seq_len", "64", "--training.steps", str(STEPS)]
FLAGS += ["--optimizer.lr", "1e-4"] if PREVIOUS else []  # as in test_trainer


def run(family, ops, checkpointing="none"):
    flags = [*model_flags(family, MODELS[family]), *FLAGS]
    if PREVIOUS:
        option = ["--activation_checkpoint.selective_ac_option", "op"] if checkpointing == "selective" else []
        flags += ["--activation_checkpoint.mode", checkpointing, *option]
    else:
        flags.append(f"activation_checkpoint:{checkpointing}")
    name = f"{family} {checkpointing} {'patched' if ops else 'stock'}"
    return Run(name, flags, ops, trace=ops is not None, keep=ops is not None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    every = [run(family, ops) for family in MODELS for ops in (None, OPS)]
    every += [run("deepseek_v3", OPS, mode) for mode in ("selective", "full")]
    found = train(tmp_path_factory.mktemp("experts"), 1, every, "moe_process")
    return {name: result for name, (result,) in found.items()}


def layers(family):
    """With experts: the first one of deepseek_v3 has none."""
    return TRAINED - (family == "deepseek_v3")


@pytest.mark.parametrize("family", MODELS)
def test_one_rank_trains_as_without_patches(runs, family):
    stock, patched = runs[f"{family} none stock"], runs[f"{family} none patched"]
    assert patched.steps == stock.steps == list(range(1, STEPS + 1))
    assert patched.losses[0] == pytest.approx(stock.losses[0], rel=1e-4)
    assert patched.grad_norms[0] == pytest.approx(stock.grad_norms[0], rel=1e-2)
    assert patched.losses == pytest.approx(stock.losses, rel=1e-3)
    per_layer = {"gmm": 1, "permute": 1} if PREVIOUS else {"gmm": 3, "permute": 2}
    assert {op: patched.hits[op] for op in per_layer} == {
        op: STEPS * layers(family) * number for op, number in per_layer.items()
    }
    assert patched.fallbacks == {}
    products = STEPS * layers(family) * 9
    assert patched.launches["npu.npu_grouped_matmul"] == products
    assert patched.launches["npu.npu_moe_token_permute"] == STEPS * layers(family)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_activation_checkpointing_gives_identical_gradients(runs, mode):
    plain, checkpointed = runs["deepseek_v3 none patched"], runs[f"deepseek_v3 {mode} patched"]
    assert checkpointed.losses == plain.losses
    again = STEPS * layers("deepseek_v3") * 3  # products are computed once more, as torchtitan's own are
    assert checkpointed.launches["npu.npu_grouped_matmul"] == plain.launches["npu.npu_grouped_matmul"] + again
    for one, other in zip(plain.tensors["gradients"], checkpointed.tensors["gradients"], strict=True):
        assert all((a == b).all() for a, b in zip(one, other, strict=True))
