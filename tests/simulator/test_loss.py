from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .helpers import assert_near, assert_same_function, values

pytestmark = pytest.mark.usefixtures("simulated")

TARGET = torch.tensor([0, 3, 6, 3, 1])


def formula(x: Tensor, reduction: str, kept: Tensor | None = None) -> Tensor:
    rows = x.exp().sum(-1).log() - x.gather(1, TARGET[:, None])[:, 0]
    kept = torch.ones(5, dtype=torch.bool) if kept is None else kept
    rows = torch.where(kept, rows, 0.0)
    return {"none": rows, "sum": rows.sum().reshape(1), "mean": (rows.sum() / kept.sum()).reshape(1)}[reduction]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_and_its_gradient(dtype: torch.dtype, reduction: str) -> None:
    target = TARGET.npu()
    assert_same_function(
        lambda x: torch.ops.npu.npu_cross_entropy_loss(x, target, None, reduction)[0],
        lambda x: formula(x, reduction),
        [values(5, 7, dtype=dtype)],
        3e-6 if dtype == torch.float32 else 2**-6,
    )


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_class_that_is_ignored_counts_nothing_and_has_no_gradient(reduction: str) -> None:
    assert_same_function(
        lambda x: torch.ops.npu.npu_cross_entropy_loss(x, TARGET.npu(), None, reduction, 3)[0],
        lambda x: formula(x, reduction, TARGET != 3),
        [values(5, 7)],
    )


def test_the_mean_is_over_what_is_not_ignored() -> None:
    x = values(5, 7)
    loss = torch.ops.npu.npu_cross_entropy_loss(x.npu(), TARGET.npu(), None, "mean", 3)[0]
    assert_near(loss, formula(x.double(), "mean", TARGET != 3), 3e-6)


def test_weights_of_classes() -> None:
    x, weight = values(5, 7), torch.linspace(0.1, 1, 7)
    for reduction in ("mean", "sum", "none"):
        loss = torch.ops.npu.npu_cross_entropy_loss(x.npu(), TARGET.npu(), weight.npu(), reduction)[0]
        expected = torch.nn.functional.cross_entropy(x.double(), TARGET, weight.double(), reduction=reduction)
        assert_near(loss, expected.reshape(-1), 3e-6)


def test_log_probabilities_are_saved_and_the_other_results_are_empty() -> None:
    x = values(5, 7)
    _, log_prob, zloss, lse = torch.ops.npu.npu_cross_entropy_loss(x.npu(), TARGET.npu())
    assert_near(log_prob, x.double().log_softmax(-1), 3e-6)
    assert zloss.numel() == lse.numel() == 0


def test_backward_uses_the_saved_log_probabilities() -> None:
    log_prob, target, grad = values(5, 7).log_softmax(-1).npu(), TARGET.npu(), torch.ones(5).npu()
    right = torch.ops.npu.npu_cross_entropy_loss_backward(grad, log_prob, target, reduction="none")
    wrong = torch.ops.npu.npu_cross_entropy_loss_backward(grad, log_prob - 1, target, reduction="none")
    assert not torch.allclose(right, wrong)


@pytest.mark.parametrize(
    ("x", "target", "arguments", "named"),
    [
        (values(5, 7).double(), TARGET, {}, "input.*dtype"),
        (values(5, 7), TARGET.int(), {}, "target.*dtype"),
        (values(5, 7), TARGET[:4], {}, "target.*shape"),
        (values(5, 7), TARGET.masked_fill(TARGET == 3, -100), {}, "target.*negative ignore_index"),
        (values(5, 7), TARGET + 1, {}, "target"),
        (values(5, 7), TARGET, {"ignore_index": 7}, "ignore_index"),
        (values(5, 7), TARGET, {"reduction": "median"}, "reduction"),
        (values(0, 7), TARGET[:0], {}, "input.*rows"),
        (torch.zeros(200000, 1), torch.zeros(200000, dtype=torch.int64), {}, "input.*rows"),
        (values(5, 7), TARGET, {"label_smoothing": 0.1}, "label_smoothing.*not simulated"),
        (values(5, 7), TARGET, {"return_zloss": True}, "return_zloss.*not simulated"),
        (values(5, 7), TARGET, {"weight": torch.ones(7).half()}, "weight.*dtype"),
    ],
)
def test_what_the_documents_forbid_is_refused(x: Tensor, target: Tensor, arguments: dict, named: str) -> None:
    moved = {name: value.npu() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    with pytest.raises(RuntimeError, match=f"npu_cross_entropy_loss.*{named}"):
        torch.ops.npu.npu_cross_entropy_loss(x.npu(), target.npu(), **moved)


@pytest.mark.parametrize("arguments", [{"ignore_index": 3}, {"weight": torch.ones(7)}])
def test_a_mean_with_more_than_its_defaults_has_no_gradient(arguments: dict) -> None:
    moved = {name: value.npu() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    with pytest.raises(RuntimeError, match="has no gradient"):
        torch.ops.npu.npu_cross_entropy_loss(values(5, 7).npu().requires_grad_(), TARGET.npu(), **moved)


def test_cross_entropy_is_not_documented_for_ascend950(as_soc) -> None:
    as_soc("Ascend950")
    with pytest.raises(RuntimeError, match="not documented"):
        torch.ops.npu.npu_cross_entropy_loss(values(5, 7).npu(), TARGET.npu())
