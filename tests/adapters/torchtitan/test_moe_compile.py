"""Experts under torch.compile: what the operators can be traced in, and the same result."""

from __future__ import annotations

import torch
import torch._dynamo

import npu_patch
from tests.support.numerics import relative_error

from .generation import current, previous

SIZE, HIDDEN, EXPERTS = 16, 24, 4


def compiled(function, graphs):
    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.backends.registry.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


def operators(graphs):
    """Also those inside of autograd functions, which are graphs of their own."""
    parts = [part for graph in graphs for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    return {str(node.target) for part in parts for node in part.graph.nodes}


def inputs(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, SIZE, generator=generator).to("npu", dtype).requires_grad_()
    scores = torch.rand(12, 2, generator=generator).npu().requires_grad_()
    ids = torch.rand(12, EXPERTS, generator=generator).topk(2).indices.npu()
    counts = torch.bincount(ids.flatten().cpu(), minlength=EXPERTS).npu()
    return x, scores, ids, counts


@current
def test_a_layer_of_experts_is_compiled_whole():
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher as Dispatcher

    experts = GroupedExperts(GroupedExperts.Config(dim=SIZE, hidden_dim=HIDDEN, num_experts=EXPERTS))
    with torch.no_grad():
        for i, parameter in enumerate(experts.parameters()):
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)))
    experts = experts.to("npu", torch.bfloat16)
    dispatcher = Dispatcher(Dispatcher.Config(num_experts=EXPERTS, top_k=2))
    x, scores, ids, counts = inputs()

    def layer(x, scores):
        routed, per_expert, metadata = dispatcher.dispatch(x, scores, ids, counts)
        return dispatcher.combine(experts(routed, per_expert), metadata, x)

    with npu_patch.scope("gmm", "permute", "swiglu"):
        eager = layer(x, scores)
        expected = torch.autograd.grad(eager.float().square().sum(), [x, scores, *experts.parameters()])
        graphs = []
        out = compiled(layer, graphs)(x, scores)
        found = torch.autograd.grad(out.float().square().sum(), [x, scores, *experts.parameters()])
    assert {"npu.npu_grouped_matmul.default", "npu.npu_moe_token_permute.default"} <= operators(graphs)
    for one, other in zip((out, *found), (eager, *expected), strict=True):
        assert relative_error(one, other) < 2e-2
    torch._dynamo.reset()


@previous
def test_the_function_that_torchtitan_compiles():
    from torchtitan.models.moe import moe

    generator = torch.Generator().manual_seed(1)
    shapes = ((EXPERTS, HIDDEN, SIZE), (EXPERTS, SIZE, HIDDEN), (EXPERTS, HIDDEN, SIZE))
    matrices = [(0.4 * torch.randn(shape, generator=generator)).to("npu", torch.bfloat16) for shape in shapes]
    x = torch.randn(16, SIZE, generator=generator).to("npu", torch.bfloat16).requires_grad_()
    counts = torch.tensor([5, 0, 9, 2]).npu()
    with npu_patch.scope("gmm"):
        expected = moe._run_experts_grouped_mm(*matrices, x, counts)
        graphs = []
        out = compiled(moe._run_experts_grouped_mm, graphs)(*matrices, x, counts)
        assert "npu.npu_grouped_matmul.default" in operators(graphs)
        gradients = [torch.autograd.grad(y.float().square().sum(), x)[0] for y in (out, expected)]
    assert relative_error(out, expected) < 1e-2
    assert relative_error(*gradients) < 1e-2
    torch._dynamo.reset()
