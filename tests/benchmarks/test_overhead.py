"""What npu_patch's own Python costs per patched call: guards, counting and choosing.

The yardstick is one `torch.nn.functional.rms_norm` on a [1, 64] CPU tensor in the same run.  A patched call is held
against a bare function that asks nothing and knows the answers: it runs the same operators with the same arguments on
the same views, casts and copies of the same tensors, which the test checks, and gives the same kind of result.  The
difference is npu_patch's own: every question and look-up, what turns a mask into arguments, and the frames between.
Fused operators and autograd nodes are replaced by functions that do nothing, in both.

Attention is in test_overhead_attention.py.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

import npu_patch
from npu_patch.adapters.torchtitan import rope_rotation
from npu_patch.ops import rope as rope_ops

pytestmark = pytest.mark.xdist_group("time")


# ---- norms -----------------------------------------------------------------------------------------------------------


def test_a_llama_norm(judge, operators, device):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm, x = LlamaRMSNorm(64).to(device), torch.randn(1, 64, device=device)

    def bare(self, hidden_states):
        return torch.ops.npu.npu_rms_norm.default(hidden_states, self.weight, self.variance_epsilon)[0]

    with npu_patch.scope("rms_norm"):
        patched = LlamaRMSNorm.forward
        judge(lambda: patched(norm, x), lambda: bare(norm, x))


def test_a_llama_norm_in_training(judge, operators, device):
    """The node of the result gets a hook, for gradients of gradients."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm, x = LlamaRMSNorm(64).to(device), torch.randn(1, 64, device=device, requires_grad=True).clone()

    def bare(self, hidden_states):
        result = torch.ops.npu.npu_rms_norm.default(hidden_states, self.weight, self.variance_epsilon)[0]
        result.grad_fn.register_hook(bare)
        return result

    with npu_patch.scope("rms_norm"):
        patched = LlamaRMSNorm.forward
        judge(lambda: patched(norm, x), lambda: bare(norm, x))


def test_a_gemma_norm(judge, operators, device, monkeypatch):
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    # 1.0 + weight is an operator too, and one that takes longer than all that is measured here.
    monkeypatch.setattr(torch.Tensor, "__radd__", lambda self, other: self)

    norm, x = GemmaRMSNorm(64).to(device).requires_grad_(False), torch.randn(1, 64, device=device)

    def bare(self, x):
        return torch.ops.npu.npu_rms_norm.default(x, 1.0 + self.weight.float(), self.eps)[0]

    with npu_patch.scope("rms_norm"):
        patched = GemmaRMSNorm.forward
        judge(lambda: patched(norm, x), lambda: bare(norm, x))


@pytest.mark.parametrize("with_scale", [True, False])
def test_a_norm_with_conditions(judge, operators, device, with_scale):
    from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

    norm = Gemma4RMSNorm(64, with_scale=with_scale).to(device).requires_grad_(False)
    x, ones = torch.randn(1, 64, device=device), torch.ones(64, device=device)

    def bare(self, x):
        return torch.ops.npu.npu_rms_norm.default(x, self.weight if with_scale else ones, self.eps)[0]

    with npu_patch.scope("rms_norm"):
        patched = Gemma4RMSNorm.forward
        judge(lambda: patched(norm, x), lambda: bare(norm, x))


def test_a_torchtitan_norm(judge, operators, device):
    from torchtitan.models.common.nn_modules import RMSNorm

    norm, x = RMSNorm(RMSNorm.Config(normalized_shape=64)).to(device), torch.randn(1, 64, device=device)

    def bare(self, x):
        return torch.ops.npu.npu_rms_norm.default(x, self.weight, self.eps)[0]

    with npu_patch.scope("rms_norm"):
        patched = RMSNorm.forward
        judge(lambda: patched(norm, x), lambda: bare(norm, x))


# ---- rope ------------------------------------------------------------------------------------------------------------


def transposed(x, cos, sin, mode):
    x, cos, sin = x.transpose(1, 2), cos.transpose(1, 2), sin.transpose(1, 2)
    return torch.ops.npu.npu_rotary_mul.default(x, cos, sin, mode).transpose(1, 2)


@pytest.mark.parametrize("training", [True, False])
def test_rope_of_query_and_key(judge, operators, node, device, training):
    from transformers.models.llama import modeling_llama

    q, k = (torch.randn(1, 8, n, 16, device=device).transpose(1, 2).requires_grad_(training) for n in (4, 2))
    cos, sin, adjoint = (torch.randn(1, 8, 16, device=device) for _ in range(3))

    def bare(q, k, cos, sin, unsqueeze_dim=1):
        if training:
            back = adjoint.unsqueeze(unsqueeze_dim)
            cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
            return node.apply(q, cos, sin, "half", back, True), node.apply(k, cos, sin, "half", back, True)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return transposed(q, cos, sin, "half"), transposed(k, cos, sin, "half")

    with npu_patch.scope("rope"):
        patched = modeling_llama.apply_rotary_pos_emb
        judge(lambda: patched(q, k, cos, sin), lambda: bare(q, k, cos, sin))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("model", ["phi3", "glm"])
def test_rope_of_a_part_of_each_head(judge, operators, node, device, monkeypatch, model, training):
    """Phi-3's tables go to the operator as they are, GLM's have to be made; joining the parts would only add noise."""
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")

    def cat(tensors, dim):
        if operators.seen is not None:
            operators.add("cat", *tensors, dim)
        return tensors[0]

    def narrow(x, *where):
        if operators.seen is not None:
            operators.add("narrow", x, *where)
        return x

    q, k = (torch.randn(1, 8, n, 16, device=device).transpose(1, 2).requires_grad_(training) for n in (4, 2))
    cos, sin, adjoint = (torch.randn(1, 8, 8, device=device) for _ in range(3))
    mode = "half" if model == "phi3" else "interleave"

    def bare(q, k, cos, sin, unsqueeze_dim=1):
        first, last = q.narrow(-1, 0, 8), k.narrow(-1, 0, 8)
        if training:
            back = adjoint.unsqueeze(unsqueeze_dim)
            cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
            first, last = node.apply(first, cos, sin, mode, back, True), node.apply(last, cos, sin, mode, back, True)
        else:
            cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
            first, last = transposed(first, cos, sin, mode), transposed(last, cos, sin, mode)
        return torch.cat((first, q.narrow(-1, 8, 8)), -1), torch.cat((last, k.narrow(-1, 8, 8)), -1)

    with npu_patch.scope("rope"):
        patched = modeling.apply_rotary_pos_emb
        monkeypatch.setattr(torch, "cat", cat)
        monkeypatch.setattr(torch.Tensor, "narrow", narrow)
        judge(lambda: patched(q, k, cos, sin), lambda: bare(q, k, cos, sin))


def torchtitan_case(name, dtype, training, device):
    """Module, query, key and positions."""
    from torchtitan.models.common import rope

    cls = getattr(rope, name)
    module = cls(cls.Config(dim=16, max_seq_len=32, theta=100.0)).to(device)
    q, k = (torch.randn(2, 8, n, 16, device=device, dtype=dtype, requires_grad=training) for n in (4, 2))
    return module, q, k, torch.arange(8, device=device).repeat(2, 1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["ComplexRoPE", "CosSinRoPE"])
def test_a_torchtitan_rope_in_float32(judge, operators, node, device, name, training):
    module, *inputs = torchtitan_case(name, torch.float32, training, device)
    mode = "interleave" if name == "ComplexRoPE" else "half"
    cos, sin, adjoint = (torch.randn(32, 16, device=device)[:8].unsqueeze(0).unsqueeze(2) for _ in range(3))

    def bare(self, query, key, positions):
        assert self.cache is not None
        if training:
            return (
                node.apply(query, cos, sin, mode, adjoint, False),
                node.apply(key, cos, sin, mode, adjoint, False),
            )
        operator = torch.ops.npu.npu_rotary_mul.default
        return operator(query, cos, sin, mode), operator(key, cos, sin, mode)

    with npu_patch.scope("rope"):
        patched = type(module).forward
        judge(lambda: patched(module, *inputs), lambda: bare(module, *inputs))


def test_a_torchtitan_rope_in_bfloat16_training(judge, operators, device, monkeypatch):
    module, *inputs = torchtitan_case("ComplexRoPE", torch.bfloat16, True, device)
    cos, sin, adjoint = (torch.randn(32, 16, device=device)[:8].unsqueeze(0).unsqueeze(2) for _ in range(3))

    def apply(*args):
        if operators.seen is not None:
            operators.add("node", *args)
        return args[-2:]

    node = SimpleNamespace(apply=apply)
    monkeypatch.setattr(rope_rotation, "_RotateWide", node)

    def bare(self, query, key, positions):
        assert self.cache is not None
        return node.apply(cos, sin, adjoint, "interleave", False, False, query, key)

    with npu_patch.scope("rope"):
        patched = type(module).forward
        judge(lambda: patched(module, *inputs), lambda: bare(module, *inputs))


def test_a_torchtitan_rope_in_bfloat16_inference(judge, operators, device, monkeypatch):
    """The casts and copies of two tensors take so long that what is measured here would be their noise."""
    module, *inputs = torchtitan_case("ComplexRoPE", torch.bfloat16, False, device)
    cos, sin = (torch.randn(32, 16, device=device)[:8].unsqueeze(0).unsqueeze(2) for _ in range(2))

    def turn_pair(query, key, *args):
        if operators.seen is not None:
            operators.add("node", query, key, *args)
        return query, key

    monkeypatch.setattr(rope_rotation, "_turn_pair", turn_pair)
    turn = rope_ops.rotate_by_constants

    def bare(self, query, key, positions):
        assert self.cache is not None
        return turn_pair(query, key, cos, sin, "interleave", turn)

    with npu_patch.scope("rope"):
        patched = type(module).forward
        judge(lambda: patched(module, *inputs), lambda: bare(module, *inputs))
