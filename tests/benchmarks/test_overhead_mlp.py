"""What npu_patch's own Python costs per patched call of an MLP; test_overhead.py says how it is judged.

The projections are identities: a product of matrices takes so long that what is measured here would be its noise.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import npu_patch

pytestmark = pytest.mark.xdist_group("time")


@pytest.mark.parametrize("training", [True, False])
def test_a_packed_mlp(judge, operators, device, training):
    """In training the node of the result gets a hook, for gradients of gradients."""
    from transformers.models.phi3.modeling_phi3 import Phi3MLP

    mlp = Phi3MLP(SimpleNamespace(hidden_size=8, intermediate_size=8, hidden_act="silu"))
    mlp.gate_up_proj, mlp.down_proj = nn.Identity(), nn.Identity()
    x = torch.randn(1, 2, 16, device=device, requires_grad=training).clone()

    def bare(self, hidden_states):
        result = torch.ops.npu.npu_swiglu.default(self.gate_up_proj(hidden_states), -1)
        if training:
            result.grad_fn.register_hook(bare)
        return self.down_proj(result)

    with npu_patch.scope("swiglu"):
        patched = Phi3MLP.forward
        judge(lambda: patched(mlp, x), lambda: bare(mlp, x))
