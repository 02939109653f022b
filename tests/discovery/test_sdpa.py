"""The attention entry is recognised by what it computes."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from npu_patch.discovery import NotRecognised
from npu_patch.discovery.sdpa import recognise_sdpa


def sdpa(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **kwargs):
    groups = module.num_key_value_groups
    causal = (module.is_causal if is_causal is None else is_causal) and attention_mask is None and query.shape[2] > 1
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key.repeat_interleave(groups, 1),
        value.repeat_interleave(groups, 1),
        attention_mask,
        scale=scaling,
        is_causal=causal,
    )
    return output.transpose(1, 2).contiguous(), None


def never_causal(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **kwargs):
    return sdpa(module, query, key, value, attention_mask, dropout, scaling, False)


def mask_inverted(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **kwargs):
    attention_mask = None if attention_mask is None else ~attention_mask
    return sdpa(module, query, key, value, attention_mask, dropout, scaling, is_causal)


def own_scale(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **kwargs):
    return sdpa(module, query, key, value, attention_mask, dropout, None, is_causal)


def test_the_stock_function_is_recognised():
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    recognise_sdpa(sdpa)
    recognise_sdpa(sdpa_attention_forward)


@pytest.mark.parametrize("function", [never_causal, mask_inverted, own_scale, len])
def test_what_computes_something_else_is_refused(function):
    with pytest.raises(NotRecognised):
        recognise_sdpa(function)


@pytest.mark.parametrize(
    "surroundings",
    [
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu", torch.bfloat16),
        torch.inference_mode,
        FakeTensorMode,
    ],
)
def test_recognising_works_wherever_an_import_may_happen(surroundings):
    with surroundings():
        recognise_sdpa(sdpa)
