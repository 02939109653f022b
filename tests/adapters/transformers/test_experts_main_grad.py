"""The option `main_grad` of `gmm`: gradients of the experts' matrices that are summed in float32."""

from __future__ import annotations

import pytest
import torch
import transformers

import npu_patch
import npu_patch.simulator

from ...support.numerics import relative_error
from . import tiny

pytestmark = pytest.mark.skipif(transformers.__version__ < "5", reason="the experts are no stacked parameters")

ADD = "npu.npu_grouped_matmul_add_"


@pytest.fixture
def model():
    built = tiny.any_model("mixtral", torch.bfloat16, num_local_experts=4)
    for name, parameter in built.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    yield built
    npu_patch.configure("gmm", main_grad=False)


def backward(built: torch.nn.Module, seed: int) -> int:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, tiny.VOCABULARY, (2, 20), generator=generator).to("npu")
    with npu_patch.simulator.trace() as trace:
        built(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return int(trace.launches_by_op.get(ADD, 0))


def test_the_gradients_of_several_steps_are_summed_unrounded(model):
    summed = [one for one in model.parameters() if hasattr(one, "main_grad")]
    assert len(summed) == 4
    wide = {one: torch.zeros_like(one, dtype=torch.float32) for one in summed}
    with npu_patch.scope("gmm"):
        for seed in range(3):
            assert backward(model, seed) == 0
            for one in summed:
                wide[one] += one.grad.float()
            model.zero_grad()
        assert all(one.main_grad.count_nonzero() == 0 for one in summed)
        npu_patch.configure("gmm", main_grad=True)
        for seed in range(3):
            assert backward(model, seed) == len(summed)
    for one in summed:
        assert one.grad is None
        assert relative_error(one.main_grad, wide[one]) < 4e-3  # each of the others was rounded to bfloat16
        assert (one.main_grad != one.main_grad.bfloat16().float()).float().mean() > 0.9
    others = [one for one in model.parameters() if not hasattr(one, "main_grad")]
    assert all(one.grad is not None for one in others)
