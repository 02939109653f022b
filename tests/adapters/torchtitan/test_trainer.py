"""torchtitan's stock trainer on one and two NPUs, patched and as it is; its checkpoints, saved and of activations.

One set of processes per number of ranks runs the trainer several times (`trainer_runs`); the tests look at what came
out. Without a compiler torchtitan's own flex attention runs here only uncompiled, and its varlen attention not at all:
torch has no kernel for it but CUDA's.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.conftest import REAL_NPU

from .generation import PREVIOUS
from .trainer_runs import Run, model_flags, train

pytestmark = pytest.mark.slow
#: The tests stay with one test worker, which starts one set of processes after the other: all want too much memory.
ALONE = PAIR = PAIR_ANNOTATED = pytest.mark.xdist_group("trainer")

STEPS = 5
OPS = "rms_norm,rope,attention,swiglu,cross_entropy"
FEWER_STEPS = {"flux": 2}  # 258 million parameters
FLAGS = ["--debug.seed", "0", "--training.seq_len", "64"]
#: With the rate of its debug models the losses of 0.2.2 jump, and from there on rounding errors grow to any size.
FLAGS += ["--optimizer.lr", "1e-4"] if PREVIOUS else []
LAYERS = 6  # of llama3's debug model
CHUNKS = 1 if PREVIOUS else 8  # of its loss

#: Model → its flags, and the calls of each op in one step (forward, loss, backward) without activation checkpointing.
#: 0.3.0 computes the loss in eight chunks.
CURRENT_MODELS = {
    "llama3": ("llama3 llama3_debugmodel", (13, 6, 6, 6, 8)),
    "llama3 varlen": ("llama3 llama3_debugmodel_varlen_attn", (13, 6, 6, 6, 8)),
    "qwen3": ("qwen3 qwen3_debugmodel", (33, 8, 8, 8, 8)),
    "muse_glimmer": ("muse_glimmer muse_glimmer_debugmodel", (50, 6, 8, 8, 8)),
    "muse_glimmer_mm": ("muse_glimmer muse_glimmer_debugmodel_mm", (51, 9, 11, 8, 8)),
    "flux": ("flux flux_debugmodel", (12, 4, 4, 0, 0)),
}
PREVIOUS_MODELS = {
    "llama3": ("llama3 debugmodel", (13, 6, 6, 6, 1)),
    "llama3 flex": ("llama3 debugmodel_flex_attn", (13, 6, 6, 6, 1)),
    "llama3 varlen": ("llama3 debugmodel_varlen_attn", (13, 6, 6, 6, 1)),
    "qwen3": ("qwen3 debugmodel", (33, 8, 8, 8, 1)),
    "flux": ("flux flux-debug", (12, 4, 4, 0, 0)),
}
MODELS = PREVIOUS_MODELS if PREVIOUS else CURRENT_MODELS
#: What cannot run without patches, and the model whose losses are the same.
STAND_INS = {"llama3 varlen": "llama3 flex" if PREVIOUS else "llama3"}
PARTIAL = () if PREVIOUS else ("--parallelism.spmd_backend", "partial_dtensor")
REPLICATED = ("--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "1")
#: What two ranks train with data split between them: name → model and flags. The FSDP2 of torch 2.13 refuses the tied
#: weights of qwen3 in 0.2.2 ("Parameter 'None' is shared with a parameter already managed by another FSDP group"): they
#: are trained untied, and tied on replicas.
SHARDED: dict[str, tuple[str, tuple[str, ...]]] = (
    {
        **{model: (model, ()) for model in ("llama3", "llama3 flex", "llama3 varlen")},
        "qwen3 untied": ("qwen3 untied", ()),
        "qwen3 replicated": ("qwen3", REPLICATED),
    }
    if PREVIOUS
    else {model: (model, PARTIAL) for model in ("llama3", "llama3 varlen", "qwen3")}
)
#: With the back end `spmd_types`, which 0.3.0 takes without a flag and which is the only one that muse_glimmer knows.
#: `trainer_process` makes it run with torch 2.13, whose `fully_shard` says "When dp_mesh_dims is provided, all
#: parameters must be DTensors on the full SPMD mesh". qwen3_5 takes many minutes per step without its kernels.
ANNOTATED = () if PREVIOUS else ("llama3", "muse_glimmer", "muse_glimmer_mm")
UNTIED = {"qwen3 untied": ("qwen3 debugmodel_untied", (33, 8, 8, 8, 1))}  # for two ranks only


def steps_of(model):
    return FEWER_STEPS.get(model, STEPS)


def flags(model, checkpointing="none", more=(), steps=None):
    family, flavor = (MODELS | UNTIED)[model][0].split()
    every = [*model_flags(family, flavor), *FLAGS, "--training.steps", str(steps or steps_of(model)), *more]
    if PREVIOUS:
        option = {"selective": ["--activation_checkpoint.selective_ac_option", "op"]}.get(checkpointing, [])
        return [*every, "--activation_checkpoint.mode", checkpointing, *option]
    return [*every, f"activation_checkpoint:{checkpointing}"]


def saving(folder):
    """Saves everything after the last step; loads what is there before the first."""
    dump = "--job.dump_folder" if PREVIOUS else "--dump_folder"
    options = "--checkpoint.enable --checkpoint.interval 1000 --checkpoint.no-last-save-model-only"
    return [*options.split(), dump, str(folder)]


def both(model, name, more=()):
    """The two runs of a model, stock (unless it cannot run) and patched."""
    stock = [] if model in STAND_INS else [Run(f"{name} stock", flags(model, more=more))]
    return [*stock, Run(f"{name} patched", flags(model, more=more), OPS)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One rank: every model, and llama3 with activation checkpointing and with saved checkpoints."""
    folder = tmp_path_factory.mktemp("alone")
    runs = [run for model in MODELS if model != "llama3" for run in both(model, model)]
    for name, ops, other in (("stock", None, OPS), ("patched", OPS, None)):
        saved = saving(folder / name)
        runs.append(Run(f"llama3 {name}", flags("llama3", more=saved), ops, trace=ops is not None, keep=True))
        runs.append(Run(f"{name}, resumed", flags("llama3", more=saved, steps=STEPS + 1), other, keep=True))
    for mode in ("selective", "full"):
        runs.append(Run(mode, flags("llama3", mode), OPS, trace=True, keep=True))
    return {name: result for name, (result,) in train(folder / "files", 1, runs).items()}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two ranks: parameters sharded by FSDP2, and tensor parallelism with sequence parallelism."""
    if REAL_NPU and torch.npu.device_count() < 2:
        pytest.skip("needs two NPUs")
    split = [*PARTIAL, "--parallelism.tensor_parallel_degree", "2"]
    runs = [run for name, (model, more) in SHARDED.items() for run in both(model, f"{name} sharded", more)]
    runs += [run for model in ("llama3", "qwen3") for run in both(model, f"{model} split", split)]
    return train(tmp_path_factory.mktemp("pair"), 2, runs)


@pytest.fixture(scope="module")
def annotated(tmp_path_factory):
    """Two ranks: parameters sharded by FSDP2, plain tensors with annotations everywhere."""
    if REAL_NPU and torch.npu.device_count() < 2:
        pytest.skip("needs two NPUs")
    runs = [run for model in ANNOTATED for run in both(model, model)]
    return train(tmp_path_factory.mktemp("annotated"), 2, runs)


def assert_same_course(model, stock, patched, left_alone=()):
    """The same losses; every call ran the fused operator, but for the ops `left_alone`, each with its reason."""
    calls = (MODELS | UNTIED)[model][1]
    per_step, steps = dict(zip(OPS.split(","), calls, strict=True)), steps_of(model)
    assert patched.steps == stock.steps == list(range(1, steps + 1))
    assert patched.losses[0] == pytest.approx(stock.losses[0], rel=1e-4)
    assert patched.grad_norms[0] == pytest.approx(stock.grad_norms[0], rel=1e-2)
    assert patched.losses == pytest.approx(stock.losses, rel=1e-3)
    assert (stock.hits, stock.fallbacks) == ({}, {})
    fallbacks = {f"{op}: {reason}": steps * per_step.pop(op) for op, reason in left_alone}
    assert patched.hits == {op: steps * number for op, number in per_step.items() if number}
    assert patched.fallbacks == fallbacks


@ALONE
@pytest.mark.parametrize("model", MODELS)
def test_one_rank_trains_as_without_patches(alone, model):
    assert_same_course(model, alone[f"{STAND_INS.get(model, model)} stock"], alone[f"{model} patched"])


@PAIR
@pytest.mark.parametrize("name", SHARDED)
def test_sharded_parameters_train_as_without_patches(pair, name):
    reference, patched = pair[f"{STAND_INS.get(name, name)} sharded stock"], pair[f"{name} sharded patched"]
    for stock, ours in zip(reference, patched, strict=True):
        assert_same_course(SHARDED[name][0], stock, ours)


@pytest.mark.long  # ten gigabytes
@PAIR
def test_sharded_parameters_of_flux_train_as_without_patches(tmp_path):
    if REAL_NPU and torch.npu.device_count() < 2:
        pytest.skip("needs two NPUs")
    found = train(tmp_path / "flux", 2, both("flux", "flux", () if PREVIOUS else PARTIAL))
    for stock, patched in zip(found["flux stock"], found["flux patched"], strict=True):
        assert_same_course("flux", stock, patched)


@pytest.mark.long
@PAIR_ANNOTATED
@pytest.mark.parametrize("model", ANNOTATED)
def test_sharded_parameters_with_annotations_train_as_without_patches(annotated, model):
    for stock, patched in zip(annotated[f"{model} stock"], annotated[f"{model} patched"], strict=True):
        assert_same_course(model, stock, patched)


@PAIR
@pytest.mark.parametrize("model", ["llama3", "qwen3"])
def test_tensor_parallel_ranks_compute_dtensors_by_fused_operators(pair, model):
    left_alone = [("cross_entropy", "the vocabulary is spread over ranks")]
    for stock, patched in zip(pair[f"{model} split stock"], pair[f"{model} split patched"], strict=True):
        assert_same_course(model, stock, patched, left_alone)


@ALONE
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_activation_checkpointing_gives_identical_gradients(alone, mode):
    plain, checkpointed = alone["llama3 patched"], alone[mode]
    assert checkpointed.losses == plain.losses
    expected, found = plain.tensors["gradients"], checkpointed.tensors["gradients"]
    assert len(expected) == len(found) == STEPS
    for step in range(STEPS):
        assert all(torch.equal(a, b) for a, b in zip(expected[step], found[step], strict=True))


@ALONE
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_each_fused_operator_runs_as_often_as_the_checkpointing_policy_says(alone, mode):
    """Whole blocks run again in the backward pass; selective checkpointing keeps what attention computed."""
    result = alone["llama3 patched" if mode == "none" else mode]
    again = 0 if mode == "none" else 1
    kept = mode == "selective"
    per_step = {
        "npu.npu_rms_norm": 2 * LAYERS * (1 + again) + 1,
        "npu.npu_rms_norm_backward": 2 * LAYERS + 1,
        "npu.npu_rotary_mul": LAYERS * (2 + again),  # the backward pass is the same operator
        "npu.npu_fusion_attention": LAYERS * (1 if kept else 1 + again),
        "npu.npu_fusion_attention_grad": LAYERS,
        "npu.npu_swiglu": LAYERS * (1 + again),
        "npu.npu_swiglu_backward": LAYERS,
        "npu.npu_cross_entropy_loss": CHUNKS,
        "npu.npu_cross_entropy_loss_backward": CHUNKS,
    }
    assert result.launches == {op: STEPS * number for op, number in per_step.items()}
    blocks = {"rms_norm": 2 * LAYERS, "rope": LAYERS, "attention": LAYERS, "swiglu": LAYERS}
    calls = {op: number * (1 + again) for op, number in blocks.items()}
    calls |= {"rms_norm": calls["rms_norm"] + 1, "cross_entropy": CHUNKS}
    assert result.hits == {op: STEPS * number for op, number in calls.items()}


@ALONE
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_no_step_copies_anything_to_the_host(alone, mode):
    """What a step needs to know of its positions or tokens was on the host before; the copies are this test's own."""
    result = alone["llama3 patched" if mode == "none" else mode]
    watched = len(result.tensors["gradients"][0])
    assert [after - before for before, after in pairwise(result.copies)] == [watched] * (STEPS - 1)


@ALONE
@pytest.mark.parametrize("writer", ["stock", "patched"])
def test_a_checkpoint_loads_on_the_other_side_with_identical_parameters(alone, writer):
    saved, resumed = alone[f"llama3 {writer}"].tensors["parameters"], alone[f"{writer}, resumed"]
    loaded = resumed.tensors["loaded"]
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert resumed.steps == [STEPS + 1]
    assert bool(resumed.hits) is (writer == "stock")


@ALONE
def test_training_goes_on_alike_from_the_checkpoint_of_either(alone):
    assert alone["patched, resumed"].losses == pytest.approx(alone["stock, resumed"].losses, rel=1e-3)
