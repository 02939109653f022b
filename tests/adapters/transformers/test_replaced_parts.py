"""A helper that somebody replaces after patching is no longer what was recognised."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gemma import modeling_gemma as gemma
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from npu_patch.engine import Patcher
from npu_patch.report import Row

ROPE, NORM = f"{qwen3.__name__}:apply_rotary_pos_emb", f"{gemma.__name__}:GemmaRMSNorm.forward"


@pytest.fixture
def patcher() -> Iterator[Patcher]:
    patcher = Patcher()
    patcher.set({"rms_norm": True, "rope": True})
    yield patcher
    patcher.clear()


def row(patcher: Patcher, target: str) -> Row:
    return next(row for row in patcher.status().rows if row.target == target)


def rotated() -> torch.Tensor:
    """The query, rotated by a quarter: its halves change places, and one its sign."""
    x = torch.arange(1.0, 9).view(1, 1, 1, 8).npu()
    cos, sin = torch.zeros(1, 1, 8).npu(), torch.ones(1, 1, 8).npu()
    return qwen3.apply_rotary_pos_emb(x, x, cos, sin)[0].cpu().flatten()


def test_a_replaced_function_that_the_original_calls_is_reported(patcher, monkeypatch):
    assert row(patcher, ROPE).state == "active"

    def rotate_half(x):
        return x * 2

    monkeypatch.setattr(qwen3, "rotate_half", rotate_half)
    found = row(patcher, ROPE)
    assert found.state == "overridden"
    assert found.reason.startswith("rotate_half, which it calls, was replaced by")
    assert "test_replaced_parts" in found.reason


def test_from_the_next_change_on_the_original_runs_until_the_function_is_back(patcher, monkeypatch):
    quarter = torch.tensor([-5.0, -6, -7, -8, 1, 2, 3, 4])
    assert torch.equal(rotated(), quarter)
    hits = row(patcher, ROPE).hits
    monkeypatch.setattr(qwen3, "rotate_half", lambda x: x * 2)
    patcher.set({"attention": False})
    assert torch.equal(rotated(), torch.arange(1.0, 9) * 2)
    assert (row(patcher, ROPE).state, row(patcher, ROPE).hits) == ("overridden", hits)
    monkeypatch.undo()
    patcher.set({"attention": False})
    assert torch.equal(rotated(), quarter)
    assert (row(patcher, ROPE).state, row(patcher, ROPE).hits) == ("active", hits + 1)


def test_a_replaced_method_is_reported(patcher, monkeypatch):
    monkeypatch.setattr(gemma.GemmaRMSNorm, "_norm", lambda self, x: x)
    assert row(patcher, NORM).state == "overridden"
    patcher.set({"attention": False})
    norm = gemma.GemmaRMSNorm(4).npu()
    assert torch.equal(norm(torch.ones(1, 4).npu() * 3).cpu(), torch.full((1, 4), 3.0))
    monkeypatch.undo()
    assert row(patcher, NORM).state in ("active", "waiting")  # until the next change it waits
    patcher.set({"attention": False})
    assert row(patcher, NORM).state == "active"


def test_an_activation_that_is_replaced_in_the_librarys_table_is_reported(patcher, monkeypatch):
    name = "transformers.models.bailing_hybrid.modeling_bailing_hybrid"
    pytest.importorskip(name)
    gated = f"{name}:BailingHybridRMSNormGated.forward"
    patcher.set({"attention": False})
    assert row(patcher, gated).state == "active"
    monkeypatch.setitem(ACT2FN, "my_activation", torch.nn.ReLU)
    assert row(patcher, gated).state == "active"
    monkeypatch.setitem(ACT2FN, "silu", torch.nn.ReLU)
    assert row(patcher, gated).state == "overridden"
