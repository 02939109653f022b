"""What trainers, wrappers and users do to a model: weights that come and go, mixed types, gradients used twice."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn

import npu_patch

from ...support.numerics import assert_same_training, relative_error
from . import tiny

OPS = tuple(row.name for row in npu_patch.ops() if row.default)


def hits() -> int:
    status = npu_patch.status()
    return sum(status.hits(op) for op in OPS)


class OnlyDuringACall:
    """The weights of every module are there while the module itself is called, and empty otherwise."""

    def __init__(self, model: nn.Module) -> None:
        self.weights: dict[nn.Parameter, torch.Tensor] = {}
        self.empty = torch.empty(0, device="npu")
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            if not own:
                continue
            for parameter in own:
                self.weights[parameter] = parameter.data
                parameter.data = self.empty.to(parameter.dtype)
            module.register_forward_pre_hook(lambda module, args, own=own: self.gather(own))
            module.register_forward_hook(lambda module, args, output, own=own: self.release(own))

    def gather(self, own: list[nn.Parameter]) -> None:
        for parameter in own:
            parameter.data = self.weights[parameter]

    def release(self, own: list[nn.Parameter]) -> None:
        for parameter in own:
            parameter.data = self.empty.to(parameter.dtype)


@pytest.mark.parametrize("kind", ["llama", "phi3", "gemma3_text"])
def test_weights_that_are_there_only_during_a_modules_own_call_are_read_only_then(kind):
    model, ids = tiny.any_model(kind, tie_word_embeddings=False), tiny.tokens()
    with torch.no_grad():
        stock = model(input_ids=ids, use_cache=False).logits
        OnlyDuringACall(model)
        assert all(parameter.numel() == 0 for parameter in model.parameters())
        with npu_patch.scope(*OPS):
            before = hits()
            ours = model(input_ids=ids, use_cache=False).logits
            assert hits() > before
    assert relative_error(ours, stock) < 1e-5


@pytest.mark.parametrize("shape", [(0,), (64 * 64,)], ids=["empty", "flat"])
def test_a_norm_whose_weight_is_not_there_or_flat_runs_the_original(shape):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm, x = LlamaRMSNorm(64).to("npu"), torch.randn(2, 64, device="npu")
    norm.weight.data = torch.ones(shape, device="npu")

    def outcome() -> Any:
        try:
            return norm(x)
        except RuntimeError as error:
            return type(error)

    stock = outcome()
    with npu_patch.scope("rms_norm"):
        before = npu_patch.status()
        ours = outcome()
        after = npu_patch.status()
    assert ours is stock is RuntimeError
    assert after.hits("rms_norm") == before.hits("rms_norm")
    assert sum(after.fallbacks("rms_norm").values()) == sum(before.fallbacks("rms_norm").values()) + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_over_53248_channels_is_the_norm(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(53248).to("npu", dtype)
    with torch.no_grad():
        norm.weight.normal_(generator=torch.Generator("npu").manual_seed(1))
    x = torch.randn(3, 53248, generator=torch.Generator().manual_seed(2)).to("npu", dtype)
    wide = x.double().cpu()
    exact = wide * (wide.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt() * norm.weight.double().cpu()
    with npu_patch.scope("rms_norm"):
        before = npu_patch.status().hits("rms_norm")
        assert relative_error(norm(x), exact) < (1e-6 if dtype is torch.float32 else 5e-3)
        assert npu_patch.status().hits("rms_norm") == before + 1


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_a_gradient_that_is_used_twice_is_left_as_it_was(kind):
    model, ids = tiny.any_model(kind), tiny.tokens()
    with npu_patch.scope(*OPS):
        before = hits()
        logits = model(input_ids=ids, use_cache=False).logits
        assert hits() > before
        head = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to("npu")
        kept = head.clone()
        parameters = list(model.parameters())
        first = torch.autograd.grad(logits, parameters, head, retain_graph=True)
        second = torch.autograd.grad(logits, parameters, head)
    assert torch.equal(head, kept)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_norms_kept_in_float32_give_the_types_that_they_gave_and_stay_in_float32():
    """As some trainers keep them, beside matrices in bfloat16."""
    model, ids = tiny.model("qwen3", torch.bfloat16), tiny.tokens()
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    for norm in norms:
        norm.float()
    parameters = {name: parameter.dtype for name, parameter in model.named_parameters()}
    seen: dict[str, list[torch.dtype]] = {"stock": [], "ours": []}

    def run(name: str) -> Any:
        handles = [
            norm.register_forward_hook(lambda module, args, output: seen[name].append(output.dtype)) for norm in norms
        ]
        with torch.autocast("npu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        for handle in handles:
            handle.remove()
        gradients = {n: p.grad.dtype for n, p in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        return loss.detach(), gradients

    stock = run("stock")
    with npu_patch.scope(*OPS):
        before = hits()
        ours = run("ours")
        assert hits() > before
    assert seen["ours"] == seen["stock"]
    assert ours[1] == stock[1] == parameters
    assert ours[0].dtype is stock[0].dtype
    assert ours[0].item() == pytest.approx(stock[0].item(), rel=2e-3)


def test_forty_steps_over_packed_sequences_with_heads_of_96_follow_the_unpatched_losses():
    model = tiny.any_model("llama", head_dim=96, num_attention_heads=2, num_key_value_heads=1)
    ids = tiny.tokens(4, 24)
    positions = torch.stack([torch.cat((torch.arange(n), torch.arange(24 - n))) for n in (5, 11, 17, 24)]).to("npu")
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def losses() -> list[float]:
        model.load_state_dict(start)
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False), []
        for _ in range(40):
            loss = model(input_ids=ids, labels=ids, position_ids=positions, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    stock = losses()
    with npu_patch.scope(*OPS):
        before = npu_patch.status().hits("attention")
        ours = losses()
        assert npu_patch.status().hits("attention") == before + 2 * 40
    assert stock[-1] < 0.5 * stock[0]
    assert ours == pytest.approx(stock, rel=1e-4)


# ---- modules that lack what another release gave them ----------------------------------------------------------------


def test_an_attention_without_groups_has_as_many_key_heads_as_query_heads():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    q, k, v = (torch.randn(2, 4, 6, 16, generator=torch.Generator().manual_seed(n)).to("npu") for n in range(3))
    layer = types.SimpleNamespace(is_causal=True)
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"](layer, q, k, v, None)[0]
    with npu_patch.scope("attention"):
        before = npu_patch.status().hits("attention")
        ours = ALL_ATTENTION_FUNCTIONS["sdpa"](layer, q, k, v, None)[0]
        assert npu_patch.status().hits("attention") == before + 1
    assert relative_error(ours, stock) < 2e-6


def test_an_instance_without_an_attribute_fails_as_it_would_and_one_with_more_is_patched():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    whole, less = LlamaRMSNorm(64).to("npu"), LlamaRMSNorm(64).to("npu")
    whole.row_mode, x = True, torch.randn(2, 64, device="npu")
    del less.variance_epsilon
    stock = whole(x)
    with npu_patch.scope("rms_norm"):
        before = npu_patch.status().hits("rms_norm")
        assert relative_error(whole(x), stock) < 2e-6
        assert npu_patch.status().hits("rms_norm") == before + 1
        with pytest.raises(AttributeError, match="variance_epsilon"):
            less(x)


def test_training_with_every_op_is_the_same_where_the_loss_is_summed_over_two_forwards():
    """One module called twice before one backward pass: what a call keeps is its own."""
    model, ids = tiny.model("gemma3"), tiny.tokens()
    other = ids.flip(1)

    def step() -> Any:
        from ...support.numerics import training_step

        return training_step(
            model, lambda: sum(model(input_ids=x, labels=x, use_cache=False).loss for x in (ids, other))
        )

    stock = step()
    with npu_patch.scope(*OPS):
        before = hits()
        patched = step()
        assert hits() > before
    assert_same_training(stock, patched)
