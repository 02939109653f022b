"""Blocks of experts are recognised by what they compute: a block that differs in one thing is not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from npu_patch.discovery import NotRecognised
from npu_patch.discovery.moe_blocks import Choice, Routed, looks_like_a_loop, recognise_block


def loop(self, hidden_states, ids, weights):
    total = torch.zeros_like(hidden_states, dtype=weights.dtype)
    mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 0, 1)
    for index in range(len(self.experts)):
        tokens, slots = torch.where(mask[index])
        if tokens.numel() > 0:
            out = self.experts[index](hidden_states[tokens]) * weights[tokens, slots].unsqueeze(-1)
            total.index_add_(0, tokens, out)
    return total.type(hidden_states.dtype)


def block(self, hidden_states):
    batch, length, size = hidden_states.shape
    tokens = hidden_states.view(-1, size)
    logits = self.gate(tokens)
    weights = F.softmax(logits, dim=1, dtype=torch.float)
    weights, ids = torch.topk(weights, self.top_k, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return loop(self, tokens, ids, weights.to(tokens.dtype)).reshape(batch, length, size), logits


def variant(source, **changes):
    """The function with a text of it replaced."""
    import inspect

    text = inspect.getsource(source)
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new)
    scope = dict(globals())
    exec(text, scope)
    return scope[source.__name__]


def test_the_plain_forms_are_recognised():
    assert looks_like_a_loop(loop)
    assert isinstance(recognise_block(loop), Choice)
    found = recognise_block(block)
    assert isinstance(found, Routed)
    assert (found.normalised, found.shared) == (True, False)
    assert {"experts", "gate", "top_k"} <= found.reads


def test_whether_weights_are_normalised_is_found():
    never = variant(block, a=("    weights /= weights.sum(dim=-1, keepdim=True)\n", ""))
    assert recognise_block(never).normalised is False
    asked = variant(block, a=("    weights /=", "    if self.norm_topk_prob:\n        weights /="))
    assert recognise_block(asked).normalised is None
    unlike = variant(block, a=("    weights /=", "    if not self.norm_topk_prob:\n        weights /="))
    with pytest.raises(NotRecognised, match="normalises its weights in an unknown way"):
        recognise_block(unlike)


LOOPS = {
    "weights twice": (" * weights[tokens, slots].unsqueeze(-1)", " * weights[tokens, slots].unsqueeze(-1) ** 2"),
    "weights before the expert": (
        "self.experts[index](hidden_states[tokens]) * weights[tokens, slots].unsqueeze(-1)",
        "self.experts[index](hidden_states[tokens] * weights[tokens, slots].unsqueeze(-1))",
    ),
    "no weights": (" * weights[tokens, slots].unsqueeze(-1)", ""),
    "another expert": ("self.experts[index](", "self.experts[index - 1]("),
    "the last expert left out": ("range(len(self.experts))", "range(len(self.experts) - 1)"),
    "a residual": ("return total", "return hidden_states + total"),
    "weights without a gradient": ("weights[tokens, slots].unsqueeze", "weights[tokens, slots].detach().unsqueeze"),
    "tokens without a gradient": ("hidden_states[tokens])", "hidden_states[tokens].detach())"),
    "the type of the weights": ("return total.type(hidden_states.dtype)", "return total"),
    "noise": ("    total =", "    hidden_states = hidden_states + torch.rand(1)\n    total ="),
    "another attribute": ("    total =", "    weights = weights * self.scaling\n    total ="),
    "a capacity": ("if tokens.numel() > 0:", "if 0 < tokens.numel() < 4:"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_does_something_else_is_not_recognised(name):
    with pytest.raises(NotRecognised):
        recognise_block(variant(loop, a=LOOPS[name]))


BLOCKS = {
    "sigmoid": ("F.softmax(logits, dim=1, dtype=torch.float)", "torch.sigmoid(logits.float())"),
    "softmax over tokens": ("dim=1, dtype=torch.float", "dim=0, dtype=torch.float"),
    "a scale": ("weights /= weights.sum(dim=-1, keepdim=True)", "weights *= 2.5"),
    "one expert more": ("self.top_k,", "self.top_k + 1,"),
    "logits are weights": ("size), logits", "size), weights"),
    "no logits": ("size), logits", "size)"),
    "three results": ("size), logits", "size), logits, ids"),
    "softmax of the best": (
        "weights /= weights.sum(dim=-1, keepdim=True)",
        "weights = torch.softmax(weights, dim=-1)",
    ),
    "scaled in training": ("    logits = self.gate(tokens)", "    logits = self.gate(tokens) * (1 + self.training)"),
    "another bias": ("    logits = self.gate(tokens)", "    logits = self.gate(tokens) + self.bias"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_that_does_something_else_is_not_recognised(name):
    with pytest.raises(NotRecognised):
        recognise_block(variant(block, a=BLOCKS[name]))


def test_other_arguments_and_wrappers_are_not_recognised():
    for function in (lambda self, a, b: a, lambda self, *a: a, lambda self, a, *, b=1: a, nn.Linear(1, 1)):
        with pytest.raises(NotRecognised):
            recognise_block(function)


def test_nothing_is_drawn_from_the_global_generator():
    state = torch.random.get_rng_state()
    recognise_block(loop)
    recognise_block(block)
    assert torch.equal(state, torch.random.get_rng_state())
