"""What is recognised is the function, whatever it is called, was copied from or is called with."""

from __future__ import annotations

import inspect
import math
import sys
import textwrap
import types

import pytest
import torch
import transformers
from torch import nn

import npu_patch
from npu_patch.adapters.transformers import attention, norms, rope
from npu_patch.registry import Unrecognised

from ...support.numerics import Run, assert_same_training, relative_error
from . import tiny
from .call import found, patched
from .test_attention_calls import ORIGINAL, causal, formula, layer, outcome, qkv, same
from .test_attention_calls import patched as patched_sdpa
from .test_rope_calls import compare, tables, values
from .tiny import OPS, Counting

# ---- norms -----------------------------------------------------------------------------------------------------------


def copy_of_gemmas_norm(name: str, edit=lambda source: source) -> type:
    """The class of the library's file under another name in another file, as forks carry them."""
    from transformers.models.gemma3 import modeling_gemma3

    source = edit(textwrap.dedent(inspect.getsource(modeling_gemma3.Gemma3RMSNorm)))
    module = types.ModuleType("transformers.models.fork.modeling_fork")
    module.__dict__.update(torch=torch, nn=nn)
    exec(source.replace("Gemma3RMSNorm", name), module.__dict__)
    return module.__dict__[name]


@pytest.mark.parametrize(("offset", "meaning", "value"), [(True, "gemma", 1.0), (False, "fp32", 0.0)])
def test_a_copy_of_gemmas_norm_is_judged_by_its_offset_and_not_by_its_name(offset, meaning, value):
    """With weights of zero the two differ by everything; a copy that lost the offset is another function."""
    name = "LlamaRMSNorm" if offset else "Gemma3RMSNorm"
    cls = copy_of_gemmas_norm(name, (lambda s: s) if offset else (lambda s: s.replace("(1.0 + ", "(")))
    (target,) = found(norms.find, **{name: cls}).values()
    assert target.meaning == meaning
    forward, site, original = patched(norms.find, name, cls)
    module, x = cls(8).to("npu"), torch.full((3, 8), 5.0, device="npu")
    nn.init.zeros_(module.weight)
    assert torch.allclose(forward(module, x).cpu(), torch.full((3, 8), value), atol=1e-5)
    assert torch.allclose(forward(module, x), original(module, x))
    nn.init.normal_(module.weight)
    assert relative_error(forward(module, x), original(module, x)) < 2e-6
    assert (site.hits, site.fallbacks) == (3, {})


QWEN35 = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


@pytest.mark.skipif(transformers.__version__ < "5", reason="no such model")
def test_partial_rotation_gated_norm_and_offset_norm_of_one_model():
    """Qwen3.5: a quarter of each head rotates, one norm has a gate, the others compute 1 + weight, from zero on."""
    torch.manual_seed(0)
    built, ids = tiny.any_model("qwen3_5_text", **QWEN35), tiny.tokens()
    for module in built.modules():
        if type(module).__name__ == "Qwen3_5RMSNorm":
            nn.init.zeros_(module.weight)
    stock = tiny.step(built, ids)
    with npu_patch.scope(*OPS):
        counting = Counting()
        run = tiny.step(built, ids)
        assert counting.hits() == {"rms_norm": 8, "rope": 1, "attention": 1}
        assert not counting.fallbacks()
        rows = {row.target.split(":")[1]: row.meaning for row in npu_patch.status() if "qwen3_5." in row.target}
    assert rows["Qwen3_5RMSNorm.forward"] == "gemma"
    assert rows["Qwen3_5RMSNormGated.forward"].startswith("llama, silu gate")
    assert rows["apply_rotary_pos_emb"] == "half, partial"
    assert all(math.isfinite(gradient.norm()) for gradient in run.gradients.values())
    # Of the decays the gradients cancel out: on the CPU the same model's differ by as much from those on the NPU.
    decays = {name for name in stock.gradients if name.endswith(("A_log", "dt_bias"))}
    assert len(decays) == 2
    for most, chosen in ((1e-5, stock.gradients.keys() - decays), (1e-3, decays)):
        of = (Run(one.loss, {name: one.gradients[name] for name in chosen}) for one in (stock, run))
        assert_same_training(*of, gradient=most)


# ---- rotations -------------------------------------------------------------------------------------------------------


def partial(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]

    def turn(x):
        a, b = x[..., :width].chunk(2, -1)
        return torch.cat((x[..., :width] * cos + torch.cat((-b, a), -1) * sin, x[..., width:]), -1)

    return turn(q), turn(k)


@pytest.mark.parametrize("width", [64, 128, 32])
def test_as_much_of_a_head_rotates_as_the_tables_say(width):
    """No size is built in: 64, or 32, of 128 channels, or all of them."""
    tensors = [values(shape, torch.float32, i) for i, shape in enumerate([(2, 4, 6, 128), (2, 2, 6, 128)])]
    site = compare(partial, tensors, *tables(width))
    assert not site.fallbacks


@pytest.mark.parametrize(
    ("shape", "hits", "reason"),
    [
        ((8, 64, 4, 128), 1, None),
        ((2, 3, 5, 72), 1, None),
        ((1, 1000, 2, 8), 0, "batch or heads of 1000 or above"),
        ((2, 2, 3, 896), 0, "head size of 896 or above"),
    ],
)
def test_sizes_at_which_the_bare_operator_fails_are_rotated_or_have_a_reason(shape, hits, reason):
    batch, _, length, head = shape
    forward, site, original = patched(rope.find, "apply_rotary_pos_emb", partial)
    q, k = (values(shape, torch.float32, i) for i in (1, 2))
    cos, sin = tables(head, batch=batch, tokens=length)
    for ours, theirs in zip(forward(q, k, cos, sin), original(q, k, cos, sin), strict=True):
        assert relative_error(ours, theirs) < 1e-6
    assert (site.hits, site.fallbacks) == (hits, {} if reason is None else {reason: 1})


def of_flash_attention(x, cos, sin):
    """Tables (S, D / 2); heads after tokens."""
    cos, sin = (torch.cat((t, t), -1)[None, :, None] for t in (cos, sin))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def test_two_dimensional_tables_of_half_the_width_are_never_given_to_the_operator_as_they_are():
    (target,) = found(rope.find, apply_rotary_emb=of_flash_attention).values()
    x, (cos, sin) = values((2, 6, 4, 16), torch.float32, 1), (t[0] for t in tables(8))
    if isinstance(target, Unrecognised):
        assert target.reason
        return
    forward, site, original = patched(rope.find, "apply_rotary_emb", of_flash_attention)
    assert relative_error(forward(x, cos, sin), original(x, cos, sin)) < 1e-6
    assert site.hits + sum(site.fallbacks.values()) == 1


def test_parameters_of_other_names_make_no_difference_and_stay_what_they_are():
    def turn(states, others, cosine, sine, axis=1):
        return partial(states, others, cosine, sine, axis)

    class RootNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain, self.epsilon = nn.Parameter(torch.ones(16)), 1e-5

        def forward(self, hidden):
            y = hidden.float() * torch.rsqrt(hidden.float().pow(2).mean(-1, keepdim=True) + self.epsilon)
            return self.gain * y.to(hidden.dtype)

    rotate, site, original = patched(rope.find, "apply_rotary_pos_emb", turn)
    q, k = (values((2, 4, 6, 16), torch.float32, i) for i in (1, 2))
    cos, sin = tables(16)
    ours = rotate(others=k, states=q, sine=sin, cosine=cos, axis=1)
    theirs = original(q, k, cos, sin)
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(ours, theirs, strict=True))
    assert site.hits == 1
    forward, site, original = patched(norms.find, "RootNorm", RootNorm)
    module = RootNorm().to("npu")
    assert relative_error(forward(module, hidden=q), original(module, q)) < 2e-6
    assert site.hits == 1


def test_an_attention_entry_whose_parameters_changed_is_left_alone_with_its_parameters_named():
    from transformers.modeling_utils import AttentionInterface

    stock = AttentionInterface._global_mapping["sdpa"]

    def renamed(module, query, key, value, mask, dropout=0.0, scaling=None, is_causal=None, **kwargs):
        return stock(module, query, key, value, mask, dropout, scaling, is_causal)

    AttentionInterface.register("sdpa", renamed)
    try:
        (entry,) = (t for t in attention.find(sys.modules["transformers.modeling_utils"]) if t.path.endswith("[sdpa]"))
    finally:
        AttentionInterface.register("sdpa", stock)
    assert isinstance(entry, Unrecognised)
    assert "mask" in entry.reason


# ---- attention -------------------------------------------------------------------------------------------------------


def test_a_mask_of_one_row_for_each_head_is_expanded():
    query, key, value = qkv()
    seen = torch.rand(2, 4, 1, 6, generator=torch.Generator().manual_seed(8)) > 0.4
    seen[..., 0] = True
    function, site = patched_sdpa()
    output, _ = function(layer(), query, key, value, seen.to("npu"))
    assert relative_error(output, formula(query, key, value, seen, 0.25)) < 2e-6
    assert (site.hits, site.fallbacks) == (1, {})


@pytest.mark.parametrize(("head", "reason"), [(256, None), (768, None), (1024, "head size above 768")])
def test_wide_heads_run_or_have_a_reason_before_the_operator_is_asked(head, reason):
    query, key, value = qkv(head=head)
    function, site = patched_sdpa()
    ours = outcome(function, layer(), query, key, value, None)
    assert (site.hits, site.fallbacks) == ((1, {}) if reason is None else (0, {reason: 1}))
    if reason is None:
        assert relative_error(ours, formula(query, key, value, causal(6, 6), head**-0.5)) < 2e-6
    else:
        assert same(ours, outcome(ORIGINAL, layer(), query, key, value, None))


@pytest.mark.parametrize("said", ["by the layer", "by the caller"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(6, 6), (9, 6)])
def test_causal_without_a_mask_reaches_the_operator_as_causal(said, q_len, kv_len):
    query, key, value = qkv(q_len=q_len, kv_len=kv_len)
    function, site = patched_sdpa()
    by_layer = said == "by the layer"
    arguments = {"scaling": 0.25} if by_layer else {"scaling": 0.25, "is_causal": True}
    before, _ = function(layer(is_causal=by_layer), query, key, value, None, **arguments)
    assert relative_error(before, formula(query, key, value, causal(q_len, kv_len), 0.25)) < 2e-6
    key[:, :, 4:] += 3.0
    value[:, :, 4:] -= 3.0
    after, _ = function(layer(is_causal=by_layer), query, key, value, None, **arguments)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])
    assert (site.hits, site.fallbacks) == (2, {})


# ---- two models in one process ---------------------------------------------------------------------------------------


def test_a_student_is_patched_and_its_teacher_is_not_in_one_step():
    """Each by a scope around its own forward, held open around the student's backward."""
    student, teacher, ids = tiny.model("llama"), tiny.model("llama"), tiny.tokens()
    with torch.no_grad():
        teacher.lm_head.weight.mul_(1.5)
    counting = Counting()

    def step():
        with torch.no_grad(), npu_patch.scope(**dict.fromkeys(OPS, False)):
            before = counting.hits()
            goal = teacher(ids).logits.softmax(-1)
            assert counting.hits() == before
        return nn.functional.cross_entropy(student(ids).logits.flatten(0, 1), goal.flatten(0, 1))

    stock = tiny.training_step(student, step)
    assert not any(counting.hits().values())
    with npu_patch.scope(*OPS):
        run = tiny.training_step(student, step)
        assert counting.hits() == {"rms_norm": tiny.NORMS["llama"], "rope": 2, "attention": 2}
    assert_same_training(stock, run)


def test_one_instance_is_patched_by_a_scope_around_its_forward():
    one, other, ids = tiny.model("llama"), tiny.model("llama"), tiny.tokens()
    one.forward = npu_patch.scope("rms_norm")(one.forward)
    with torch.no_grad():
        counting = Counting()
        expected = other(ids).logits
        assert not any(counting.hits().values())
        assert torch.allclose(one(ids).logits, expected, atol=1e-5)
        assert counting.hits() == {"rms_norm": tiny.NORMS["llama"], "rope": 0, "attention": 0}
        other(ids)
        assert counting.hits()["rms_norm"] == tiny.NORMS["llama"]
