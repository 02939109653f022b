"""What npu_patch's own Python costs per patched call: guards and counting, not the operators.

The yardstick is one `torch.nn.functional.rms_norm` on a [1, 64] CPU tensor in the same run.  The operator is
replaced by a function that does nothing, and what a plain function with the same attribute reads would cost is
subtracted.
"""

from __future__ import annotations

import timeit

import pytest
import torch

import npu_patch
from npu_patch.ops import rms_norm as op

ALLOWED = 0.4
pytestmark = pytest.mark.xdist_group("time")


def seconds(call, repeat=25, number=2000):
    """The best of many repeats: what the code costs, not what else the machine was doing."""
    return min(timeit.repeat(call, repeat=repeat, number=number)) / number


def test_a_patched_norm_spends_at_most_0_4_of_a_small_norm_in_python(monkeypatch, benchmark, device):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(64).to(device)
    x = torch.randn(1, 64, device=device)
    monkeypatch.setattr(op, "rms_norm", lambda x, weight, eps: x)

    def plain(self, hidden_states):
        return op.rms_norm(hidden_states, self.weight, self.variance_epsilon)

    on_cpu, weight = torch.randn(1, 64), torch.ones(64)
    with npu_patch.scope("rms_norm"):
        patched = LlamaRMSNorm.forward
        assert patched(norm, x) is x
        ours, bare = seconds(lambda: patched(norm, x)), seconds(lambda: plain(norm, x))
        yardstick = seconds(lambda: torch.nn.functional.rms_norm(on_cpu, (64,), weight))
        benchmark.extra_info["share of a small norm"] = round((ours - bare) / yardstick, 3)
        benchmark.pedantic(patched, args=(norm, x), rounds=20, iterations=100)
    assert ours - bare <= ALLOWED * yardstick
