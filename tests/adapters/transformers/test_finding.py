"""Which modules are looked at, and what is found in them."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import transformers

from npu_patch.adapters.transformers import attention, modules, norms, rope
from npu_patch.registry import Target, Unrecognised


def modeling(family: str):
    """The modeling file; skips where this version of transformers has no such model."""
    name = f"transformers.models.{family}.modeling_{family}"
    if importlib.util.find_spec(f"transformers.models.{family}") is None:
        pytest.skip(f"no {family}")
    return importlib.import_module(name)


# The fifth generation computes with half of a table, the fourth with all of it.
DEINTERLEAVED = "interleaved in, half out" + ("" if transformers.__version__ < "5" else ", table first half twice")


def meanings(finder, module):
    return {target.path: getattr(target, "meaning", None) for target in finder(module)}


def test_modules_are_listed_without_importing_torch_or_transformers():
    code = (
        "import os, sys; os.environ['NPU_PATCH_OPS'] = 'none'\n"
        "from npu_patch.adapters.transformers import modules\n"
        "names = modules()\n"
        "assert 'transformers.models.llama.modeling_llama' in names\n"
        "assert 'transformers.modeling_utils' in names\n"
        "assert len(names) == len(set(names)) > 300\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_listed_module_exists():
    for name in (modules()[0], modules()[1], modules()[-1]):
        assert importlib.util.find_spec(name) is not None


@pytest.mark.parametrize(
    ("family", "norm", "rotary"),
    [
        ("llama", {"LlamaRMSNorm.forward": "llama"}, {"apply_rotary_pos_emb": "half"}),
        ("gemma3", {"Gemma3RMSNorm.forward": "gemma"}, {"apply_rotary_pos_emb": "half"}),
        ("gpt_oss", {"GptOssRMSNorm.forward": "fp32"}, {"apply_rotary_pos_emb": "half, table twice"}),
        ("glm4_moe", {"Glm4MoeRMSNorm.forward": "llama"}, {"apply_rotary_pos_emb": "half, partial"}),
        ("cohere", {}, {"apply_rotary_pos_emb": "interleaved"}),
        (
            "deepseek_v3",
            {"DeepseekV3RMSNorm.forward": "llama"},
            {"apply_rotary_pos_emb_interleave": DEINTERLEAVED},
        ),
    ],
)
def test_targets_of_a_model_by_what_they_compute(family, norm, rotary):
    module = modeling(family)
    assert {path: m for path, m in meanings(norms.find, module).items() if m} == norm
    found = meanings(rope.find, module)
    assert rotary.items() <= found.items()


def test_a_class_that_has_its_name_only_is_not_a_target():
    found = {target.path: target for target in norms.find(modeling("muse_spark"))}
    scaled = found["MuseSparkTextInputScaledRMSNorm.forward"]  # before it normalises
    assert isinstance(scaled, Unrecognised)
    assert scaled.reason == "computes no known norm"


def test_a_class_is_named_by_what_it_computes():
    found = {target.path: target for target in norms.find(modeling("qwen3_next"))}
    assert found["Qwen3NextRMSNormGated.forward"].meaning.startswith("llama, silu gate")
    assert found["Qwen3NextRMSNorm.forward"].meaning == "gemma"  # 1 + weight, whatever the name suggests


def test_two_meanings_of_one_class():
    (target,) = (t for t in norms.find(modeling("gemma4")) if t.path == "Gemma4RMSNorm.forward")
    assert "fp32 if with_scale is True" in target.meaning
    assert "none if with_scale is False" in target.meaning


def test_a_rope_function_that_is_not_known_is_left_with_a_reason():
    (target,) = rope.find(modeling("clvp"))
    assert isinstance(target, Unrecognised)
    assert target.reason


def test_the_attention_registry_is_found_where_it_is_defined_and_nowhere_else():
    registry = {one.path: one for one in attention.find(importlib.import_module("transformers.modeling_utils"))}
    assert isinstance(registry["ALL_ATTENTION_FUNCTIONS[sdpa]"], Target)
    assert not [one for one in attention.find(modeling("llama")) if one.path.endswith("]")]


def test_an_entry_that_somebody_replaced_is_judged_by_what_it_computes():
    from transformers.modeling_utils import AttentionInterface

    stock = AttentionInterface._global_mapping["sdpa"]

    def bidirectional(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **kwargs):
        return stock(module, query, key, value, attention_mask, dropout, scaling, False)

    AttentionInterface.register("sdpa", bidirectional)
    try:
        entries = list(attention.find(importlib.import_module("transformers.modeling_utils")))
    finally:
        AttentionInterface.register("sdpa", stock)
    (found,) = (one for one in entries if one.path.endswith("[sdpa]"))
    assert isinstance(found, Unrecognised)
