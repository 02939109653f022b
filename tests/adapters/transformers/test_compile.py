"""torch.compile: no graph break, the patched operators in the graph, and the original after switching off."""

from __future__ import annotations

import inspect
from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import npu_patch

from . import tiny
from .tiny import NORMS, OPS


class Backend:
    """Runs the traced graphs as they are, and counts the npu operators in them."""

    def __init__(self) -> None:
        self.operators: Counter[str] = Counter()
        self.compile = aot_autograd(fw_compiler=self._take, bw_compiler=self._take)

    def _take(self, graph, example_inputs):
        for node in graph.graph.nodes:
            if str(node.target).startswith("npu."):
                self.operators[str(node.target).split(".")[1]] += 1
        return make_boxed_func(graph.forward)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_patched_model_compiles_into_one_graph_of_fused_operators(family):
    built, ids = tiny.model(family, torch.bfloat16), tiny.tokens()
    backend = Backend()
    compiled = torch.compile(built, backend=backend.compile, fullgraph=True)
    stock = tiny.step(compiled, ids)
    assert not backend.operators["npu_rms_norm"]
    with npu_patch.scope(*OPS):
        backend.operators.clear()
        patched = tiny.step(compiled, ids)
        assert backend.operators["npu_rms_norm"] == NORMS[family]
        assert backend.operators["npu_rotary_mul"] == 2 * 2 * 2  # query and key, forward and backward, two layers
        assert backend.operators["npu_fusion_attention_v3"] == 2
        states = {row.op: row.state for row in npu_patch.status() if row.state == "compiled"}
        assert set(states) == set(OPS)
        eager = tiny.step(built, ids)
        assert patched.loss == pytest.approx(eager.loss, rel=1e-6)
    backend.operators.clear()
    after = tiny.step(compiled, ids)
    assert not backend.operators["npu_rms_norm"]
    assert not backend.operators["npu_rotary_mul"]
    assert after.loss == stock.loss


def test_aot_eager_runs_the_patched_model_without_a_graph_break():
    built, ids = tiny.model("llama"), tiny.tokens()
    with npu_patch.scope(*OPS):
        eager = tiny.step(built, ids)
        compiled = tiny.step(torch.compile(built, backend="aot_eager", fullgraph=True), ids)
    assert compiled.loss == pytest.approx(eager.loss, rel=1e-6)
    for name, gradient in eager.gradients.items():
        assert torch.allclose(compiled.gradients[name], gradient, rtol=1e-4, atol=1e-7), name


def test_a_compiled_decoding_step_with_a_static_cache_gives_the_same_tokens():
    built, ids = tiny.model("llama").eval(), tiny.tokens(length=12)

    def decode():
        from transformers import StaticCache

        cache = StaticCache(config=built.config, max_cache_len=24)
        forward = torch.compile(built, backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            logits = built(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1:]
            taken = [logits.argmax(-1)]
            for position in range(12, 16):
                given = {"position_ids": torch.full((2, 1), position, device="npu"), "past_key_values": cache}
                if "cache_position" in inspect.signature(built.forward).parameters:  # as `generate` hands it over
                    given["cache_position"] = torch.tensor([position], device="npu")
                output = forward(input_ids=taken[-1], use_cache=True, **given)
                taken.append(output.logits.argmax(-1))
        return torch.cat(taken, 1)

    stock = decode()
    with npu_patch.scope(*OPS):
        assert torch.equal(decode(), stock)
