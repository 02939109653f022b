"""torch.compile of each block, as torchtitan does it, on a back end without a code generator."""

from __future__ import annotations

import pytest
import torch

import npu_patch
from tests.support.numerics import relative_error, training_step

from .generation import current
from .models import BATCH, LENGTH, OPS, build, loss_of, packed_positions, plain_positions
from .test_mask_meaning import dilated

pytestmark = current


def compiled(family, dtype=torch.float32):
    torch._dynamo.reset()
    model, graphs = build(family, dtype), []

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.backends.registry.lookup_backend("aot_eager")(graph, inputs)

    for block in model.layers.values():
        block.compile(backend=count, fullgraph=True)
    return model, graphs


def operators(graphs):
    return {str(node.target) for graph in graphs for node in graph.graph.nodes}


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_model_computes_what_the_eager_one_does(family, dtype):
    eager = build(family, dtype)
    with npu_patch.scope(*OPS):
        for positions in (plain_positions(), packed_positions((20, 28), (48,))):
            expected = training_step(eager, loss_of(eager, positions))
            model, graphs = compiled(family, dtype)
            result = training_step(model, loss_of(model, positions))
            assert {"npu.npu_rms_norm.default", "npu.npu_fusion_attention_v3.default"} <= operators(graphs)
            loss, gradients = (1e-6, 1e-5) if dtype is torch.float32 else (1e-4, 5e-2)
            assert result.loss == pytest.approx(expected.loss, rel=loss)
            for name, gradient in expected.gradients.items():
                assert relative_error(result.gradients[name], gradient) <= gradients


def test_new_packings_do_not_compile_again_and_again():
    eager, (model, graphs) = build("llama3"), compiled("llama3")
    with npu_patch.scope(*OPS):
        for step in range(12):  # beyond torch.compile's limit of versions
            positions = packed_positions((3 + step, LENGTH - 3 - step), (LENGTH,))
            expected, result = (training_step(m, loss_of(m, positions)) for m in (eager, model))
            assert result.loss == pytest.approx(expected.loss, rel=1e-6)
            if step == 3:
                made = len(graphs)
    assert len(graphs) == made


def test_a_mask_that_is_written_out():
    eager, (model, graphs) = build("llama3"), compiled("llama3")
    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH).to("npu")

    def loss_with(subject):
        from torchtitan.models import common

        masks = common.create_attention_mask(dilated, BATCH, None, LENGTH, LENGTH, device="npu")
        return subject(tokens, positions=plain_positions(), attention_masks=masks).square().mean()

    with npu_patch.scope(*OPS):
        expected, result = (training_step(m, lambda m=m: loss_with(m)) for m in (eager, model))
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    assert "npu.npu_fusion_attention_v3.default" in operators(graphs)


def test_status_says_that_it_was_compiled():
    model, _ = compiled("llama3")
    with npu_patch.scope(*OPS):
        training_step(model, loss_of(model, plain_positions()))
        rows = {row.target: row.state for row in npu_patch.status()}
    for target in (
        "attention:FlexAttention.forward",
        "rope:ComplexRoPE.apply_rotary_emb",
        "nn_modules:RMSNorm.forward",
    ):
        assert rows[f"torchtitan.models.common.{target}"] == "compiled"
