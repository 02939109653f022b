"""Experts spread over two and four ranks, in torchtitan's own trainer, with and without tensor parallelism.

Every run starts from the weights of one checkpoint, so that runs on any number of ranks can be compared. Text that is
repeated once for each rank gives every rank what a single one reads. A checkpoint whose router prefers the first
experts leaves ranks without a token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import REAL_NPU

from .generation import PREVIOUS
from .trainer_runs import Result, Run, model_flags, train

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.xdist_group("experts")]

STEPS, LAYERS, EXPERTS, TOP_K = 2, 5, 8, 3  # layers with experts of deepseek_v3's debug model
OPS = "attention,permute"  # torchtitan's own attention needs a compiler
EVERY = "rms_norm,rope,attention,swiglu,cross_entropy,gmm,permute,router"
FLAGS = ["--debug.seed", "0", "--training.seq_len", "64", "--checkpoint.enable", "--checkpoint.interval", "1000"]
if PREVIOUS:
    FLAGS += ["--activation_checkpoint.mode", "none", "--optimizer.lr", "1e-4"]
    FLAVOR, TEXT, DUMP, LAST, BIAS = "debugmodel", "--training.dataset_path", "--job.dump_folder", [], "expert_bias"
    #: It spreads experts only where data are spread, too; tensor parallel ranks each sort a part of the choice.
    LEAST_DATA, WITH_TENSORS = 2, ("the router's choice is split over ranks",)
    ONE_RANK = 1e-3  # which has float32 parameters and autocast there, several bfloat16 ones
    AT_ONCE = 1  # places of a layer that are patched on one rank; on several there are two more
else:
    FLAGS += ["--parallelism.spmd_backend", "partial_dtensor", "--training.disable_cuda_graphs"]
    FLAVOR, TEXT, DUMP = "deepseek_v3_debugmodel", "--dataloader.dataset_path", "--dump_folder"
    LAST, BIAS, AT_ONCE, LEAST_DATA = ["activation_checkpoint:none"], "expert_bias_E", 2, 1
    WITH_TENSORS, ONE_RANK = (), 1e-4


def run(
    name: str,
    folder: Path,
    start: Path | None,
    ranks: int = 1,
    split: int = 1,
    data: Path | None = None,
    ops: str | None = OPS,
    steps: int = STEPS,
) -> Run:
    """From the checkpoint `start`, with experts on all ranks. `split`: degree of tensor parallelism."""
    flags = [*model_flags("deepseek_v3", FLAVOR), *FLAGS, "--training.steps", str(steps)]
    flags += ["--parallelism.expert_parallel_degree", str(ranks)]
    flags += ["--parallelism.tensor_parallel_degree", str(split), DUMP, str(folder / f"{ranks} {name}")]
    loading = ["--checkpoint.load_only", "--checkpoint.initial_load_path", str(start)]
    flags += loading if start else ["--checkpoint.no-last-save-model-only"]
    flags += [TEXT, str(data)] if data else []
    return Run(name, [*flags, *LAST], ops, keep=True)


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint as torchtitan draws it, one that is skewed, and texts for several ranks that read the same."""
    folder = tmp_path_factory.mktemp("experts")
    train(folder / "files", 1, [run("made", folder, None, steps=1)], "expert_process")
    start = folder / "1 made" / "checkpoint" / "step-1"
    skew(start, folder / "skewed")
    result = {"folder": folder, "start": start, "skewed": folder / "skewed"}
    text = (folder / "files" / "text" / "data.json").read_text(encoding="utf-8")
    for ranks in (1, 2, 4):
        result[f"text {ranks}"] = folder / f"text {ranks}"
        result[f"text {ranks}"].mkdir()
        (result[f"text {ranks}"] / "data.json").write_text(text * ranks, encoding="utf-8")
    return result


def skew(source: Path, target: Path) -> None:
    """The same weights, and a router that chooses the first experts for every token."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

    file = target.with_suffix(".pt")
    dcp_to_torch_save(source, file)
    state = torch.load(file, weights_only=False)
    biases = [value for name, value in state.items() if name.endswith(BIAS)]
    assert len(biases) == LAYERS
    for bias in biases:
        bias[:TOP_K] += 1e3
    torch.save(state, file)
    torch_save_to_dcp(file, target)


def several(places: dict[str, Path], ranks: int) -> dict[str, list[Result]]:
    if REAL_NPU and torch.npu.device_count() < ranks:
        pytest.skip(f"needs {ranks} NPUs")
    start, skewed, same = places["start"], places["skewed"], places[f"text {ranks}"]

    def both(name: str, start: Path, **options: Any) -> list[Run]:
        stock = run(f"{name} stock", places["folder"], start, ranks, ops=None, **options)
        return [stock, run(name, places["folder"], start, ranks, **options)]

    runs = [*both("experts", start), *both("skewed", skewed, data=same)]
    runs += [run("same text", places["folder"], start, ranks, data=same)]
    runs += [run("skewed, every op", places["folder"], skewed, ranks, data=same, ops=EVERY)]
    if ranks // 2 >= LEAST_DATA:
        runs += both("experts and tensors", start, split=2, data=places[f"text {ranks // 2}"])
    return train(places["folder"] / f"runs {ranks}", ranks, runs, "expert_process")


@pytest.fixture(scope="module")
def alone(places):
    folder, start, data = places["folder"], places["start"], places["text 1"]
    runs = [run("one rank", folder, start, data=data), run("one rank stock", folder, start, data=data, ops=None)]
    runs += [run("skewed", folder, places["skewed"], data=data)]
    return train(places["folder"] / "runs 1", 1, runs, "expert_process")


@pytest.fixture(scope="module")
def pair(places):
    return several(places, 2)


@pytest.fixture(scope="module")
def four(places):
    return several(places, 4)


@pytest.fixture(params=[2, 4])
def spread(request):
    return request.getfixturevalue("pair" if request.param == 2 else "four")


def assert_same_course(stock: Result, patched: Result, first: float = 1e-4) -> None:
    assert patched.steps == stock.steps == list(range(1, STEPS + 1))
    assert patched.losses[0] == pytest.approx(stock.losses[0], rel=first)
    assert patched.grad_norms[0] == pytest.approx(stock.grad_norms[0], rel=1e-2)
    assert patched.losses == pytest.approx(stock.losses, rel=1e-3)


def assert_permuted(result: Result, places_per_layer: int, reasons: tuple[str, ...] = ()) -> None:
    """Every sort and every combination ran the fused operator, but for one per layer with each of the reasons."""
    fallbacks = {reason: number for reason, number in result.fallbacks.items() if reason.startswith("permute")}
    assert fallbacks == {f"permute: {reason}": STEPS * LAYERS for reason in reasons}
    assert result.hits["permute"] == STEPS * LAYERS * (places_per_layer - len(reasons))


def assert_same_gradients(stock: Result, patched: Result) -> None:
    """What has none has none, and nothing that has one has lost it or a part of it.

    Of the first step, in bfloat16, where a token that is between two experts may go to either.
    """
    ours, theirs = patched.tensors["gradients"][0], stock.tensors["gradients"][0]
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.isfinite().all()
        assert bool(a.any()) is bool(b.any())
        assert float((a - b).norm()) <= 0.25 * float(b.norm())


def test_one_rank_trains_as_without_patches(alone):
    (stock,), (patched,) = alone["one rank stock"], alone["one rank"]
    assert_same_course(stock, patched)
    assert_permuted(patched, AT_ONCE)
    assert_same_gradients(stock, patched)


@pytest.mark.parametrize("name", ["experts", "skewed"])
def test_experts_of_several_ranks_train_as_without_patches(spread, name):
    for stock, patched in zip(spread[f"{name} stock"], spread[name], strict=True):
        assert_same_course(stock, patched)
        assert_permuted(patched, AT_ONCE + 2)
        assert_same_gradients(stock, patched)


def test_experts_and_tensors_of_several_ranks_train_as_without_patches(spread):
    if "experts and tensors" not in spread:
        pytest.skip("torchtitan 0.2.2 spreads experts where data are spread, too")
    for stock, patched in zip(spread["experts and tensors stock"], spread["experts and tensors"], strict=True):
        assert_same_course(stock, patched)
        assert_permuted(patched, AT_ONCE + 2, WITH_TENSORS)
        assert_same_gradients(stock, patched)


@pytest.mark.parametrize("name", ["experts and tensors", "same text"])
def test_experts_of_several_ranks_train_as_those_of_one(spread, alone, name):
    if name not in spread:
        pytest.skip("torchtitan 0.2.2 spreads experts where data are spread, too")
    (single,) = alone["one rank"]
    for result in spread[name]:
        assert_same_course(single, result, ONE_RANK)


def test_with_a_rank_that_gets_no_token_training_is_that_of_one_rank(spread, alone):
    (single,) = alone["skewed"]
    for result in spread["skewed"]:
        assert_same_course(single, result, ONE_RANK)
    assert single.losses != alone["one rank"][0].losses


def test_with_every_op_and_a_rank_that_gets_no_token_training_is_as_without_patches(spread):
    for stock, patched in zip(spread["skewed stock"], spread["skewed, every op"], strict=True):
        assert_same_course(stock, patched)
        assert_permuted(patched, AT_ONCE + 2)
        assert_same_gradients(stock, patched)
        assert all(patched.hits[op] > 0 for op in EVERY.split(","))


def test_a_rank_that_gets_no_token_keeps_zero_gradients_for_its_experts(spread):
    """Each rank has EXPERTS / ranks of them, and only the first TOP_K get tokens."""
    ranks = spread["skewed"]
    local = EXPERTS // len(ranks)
    for rank, result in enumerate(ranks):
        experts = [g for g in result.tensors["gradients"][0] if g.dim() == 3]
        assert len(experts) == 3 * LAYERS
        for gradient in experts:
            assert gradient.shape[0] == local
            busy = [bool(g.any()) for g in gradient]
            assert busy == [rank * local + e < TOP_K for e in range(local)]
