"""Every tiny model in float32, with every default op: training, padded and packed batches, greedy decoding.

Each test knows how often each op is reached, and why it is not where it is not.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

import npu_patch

from ...support import tiny_models
from ...support.numerics import Run, assert_same_training, relative_error, training_step

OPS = tuple(row.name for row in npu_patch.ops() if row.default)
NEW_TOKENS = 32
SOFT_CAP = {"gemma2": {"attention": "keyword softcap"}}
_SHARED_TABLES = {"rope": "interleave needs tables shared by the batch and the heads"}
PER_ROW = {"deepseek_v2": _SHARED_TABLES, "glm4": _SHARED_TABLES, "llama4_text": _SHARED_TABLES}
"""Where the rows of a batch are at different positions."""


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=pytest.mark.xdist_group(f"tiny {n}")) for n in tiny_models.NAMES]
)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name) -> Any:
    return tiny_models.build(name)


class Reached:
    """(hits, fallbacks by reason) of every op since it was made."""

    def __init__(self) -> None:
        self._before = npu_patch.status()

    def __call__(self) -> dict[str, tuple[int, dict[str, int]]]:
        now, since = npu_patch.status(), {}
        for op in OPS:
            before = self._before.fallbacks(op)
            fallbacks = {reason: count - before.get(reason, 0) for reason, count in now.fallbacks(op).items()}
            hits = now.hits(op) - self._before.hits(op)
            since[op] = (hits, {reason: count for reason, count in fallbacks.items() if count})
        return since


def expected(name: str, losses: int = 1, passes: int = 1, **instead: str) -> dict[str, tuple[int, dict[str, int]]]:
    """What `passes` of the language model and one of the vision tower reach.

    Args:
        instead: op → why every call of the language model runs the original.
    """
    instead = {**SOFT_CAP.get(name, {}), **instead}
    language, tower = asdict(tiny_models.calls(name)), asdict(tiny_models.tower_calls(name))
    counts: dict[str, tuple[int, dict[str, int]]] = {"cross_entropy": (losses, {})}
    layers, gates = language.pop("experts"), language.pop("gates")
    if tiny_models.FIFTH:
        language["swiglu"] += gates
        counts["permute"] = (layers * passes, {})
        # Decoding, transformers switches to an entry that becomes the other one, of two products.
        counts["gmm"] = (layers * (2 * passes + (passes - 1)), {})
    else:  # one call for a block
        counts["permute"], counts["gmm"] = (0, {}), (layers * passes, {})
    for op, calls in language.items():
        if op in instead:
            counts[op] = (tower[op], {instead[op]: calls * passes})
        else:
            counts[op] = (tower[op] + calls * passes, {})
    return counts


def step(model: Any, name: str, **given: Any) -> Run:
    arguments = {**tiny_models.inputs(name), "use_cache": False, **given}
    labels = arguments.pop("labels", arguments["input_ids"])
    return training_step(model, lambda: model(**arguments, labels=labels).loss)


def same_training(model: Any, name: str, instead: dict[str, str] | None = None, **given: Any) -> Run:
    stock = step(model, name, **given)
    with npu_patch.scope(*OPS):
        reached = Reached()
        patched = step(model, name, **given)
        assert reached() == expected(name, **(instead or {}))
    if not tiny_models.FIFTH:
        stock = with_idle_experts(stock, patched)
    assert_same_training(stock, patched)
    return stock


def with_idle_experts(stock: Run, patched: Run) -> Run:
    """transformers 4 does not call experts without tokens: no gradient there, and zero in a product of all experts."""
    idle = {
        n: torch.zeros_like(g) for n, g in patched.gradients.items() if ".experts." in n and n not in stock.gradients
    }
    assert not any(patched.gradients[n].any() for n in idle)
    return Run(stock.loss, {**stock.gradients, **idle})


def test_training_is_the_same(model, name):
    stock = same_training(model, name)
    unused = {n for n, _ in model.named_parameters()} - stock.gradients.keys()
    assert all(".indexer." in n for n in unused)  # which only chooses


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_train_the_same(model, name, side):
    ids = tiny_models.inputs(name)["input_ids"]
    mask = torch.ones_like(ids)
    if side == "left":
        mask[0, :5] = 0
    else:
        mask[1, -7:] = 0
    same_training(model, name, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))


def test_packed_batches_train_the_same(model, name):
    positions = tiny_models.packed_positions(name, [[8, 12], [5, 15]])
    packed = same_training(model, name, PER_ROW.get(name), position_ids=positions)
    plain = step(model, name)
    assert abs(packed.loss - plain.loss) > 1e-4 * plain.loss  # the positions do matter


def test_greedy_tokens_are_identical(model, name):
    given = tiny_models.inputs(name, length=12)
    mask = torch.ones_like(given["input_ids"])
    mask[0, :4] = 0
    settings = {
        "attention_mask": mask,
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "eos_token_id": None,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    model.eval()
    stock = model.generate(**given, **settings)
    with npu_patch.scope(*OPS):
        reached = Reached()
        patched = model.generate(**given, **settings)
        assert reached() == expected(name, losses=0, passes=NEW_TOKENS, **PER_ROW.get(name, {}))
    model.train()
    logits = torch.stack(stock.logits)
    first, second = logits.topk(2).values.unbind(-1)
    assert (first - second).min() > 1e-5  # no choice is a tie
    assert stock.sequences.shape == (2, 12 + NEW_TOKENS)
    assert torch.equal(stock.sequences, patched.sequences)
    assert relative_error(torch.stack(patched.logits), logits) <= 1e-5  # some models repeat themselves
