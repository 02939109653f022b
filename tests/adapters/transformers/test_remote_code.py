"""Modeling files that come with a checkpoint are patched like the library's own, and get their originals back."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import dynamic_module_utils
from transformers.models.llama import modeling_llama

import npu_patch

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder of its own for the copies that transformers makes of remote code."""
    folder = str(tmp_path / "modules")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", folder)
    monkeypatch.setattr(sys, "path", [folder, *sys.path])
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]


def source(norm: str = "MyNorm") -> str:
    """Llama's modeling file as a stand-alone one, with another name for its norm."""
    text = inspect.getsource(modeling_llama).replace("from ...", "from transformers.")
    text = text.replace("from .configuration_llama import LlamaConfig", "from transformers import LlamaConfig")
    return text.replace("LlamaRMSNorm", norm)


def checkpoint(folder: Path, text: str) -> Path:
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).save_pretrained(folder)
    rewrite(folder, text)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_mine.LlamaForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rewrite(folder: Path, text: str) -> None:
    (folder / "modeling_mine.py").write_text(text)


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).npu()


def rows(model: Any) -> dict[str, Any]:
    name = type(model).__module__
    assert name.startswith("transformers_modules.")
    return {row.target.rpartition(":")[2]: row for row in npu_patch.status() if row.target.startswith(name + ":")}


IDS = torch.arange(12).view(2, 6)


def loss(model: Any) -> torch.Tensor:
    ids = IDS.npu()
    return model(ids, labels=ids).loss.detach()


def test_a_model_from_a_local_folder_is_patched_like_the_built_in_one(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "mine", source())
    stock = dynamic_module_utils.get_class_in_module
    npu_patch.enable("rms_norm", "rope", "attention")
    model = load(folder)
    module = sys.modules[type(model).__module__]
    before = npu_patch.status().hits("attention")
    patched = loss(model)
    found = rows(model)
    assert (found["MyNorm.forward"].state, found["MyNorm.forward"].meaning) == ("active", "llama")
    assert (found["MyNorm.forward"].hits, found["apply_rotary_pos_emb"].hits) == (3, 1)
    assert npu_patch.status().hits("attention") == before + 1  # through the registry
    npu_patch.disable()
    assert module.MyNorm.forward.__globals__ is vars(module)
    assert module.apply_rotary_pos_emb.__globals__ is vars(module)
    assert dynamic_module_utils.get_class_in_module is stock
    torch.testing.assert_close(patched, loss(model), rtol=1e-5, atol=0.0)
    assert rows(model)["MyNorm.forward"].hits == 3


def test_a_model_that_was_loaded_before_is_patched_too(tmp_path: Path) -> None:
    model = load(checkpoint(tmp_path / "mine", source()))
    with npu_patch.scope("rms_norm"):
        loss(model)
    assert rows(model)["MyNorm.forward"].hits == 3
    assert rows(model)["MyNorm.forward"].state == "off"


def test_functions_that_remote_code_imports_from_the_library_follow(tmp_path: Path) -> None:
    start = source().replace("class MyNorm", "class Unused").replace("def apply_rotary_pos_emb", "def unused")
    names = "from transformers.models.llama.modeling_llama import LlamaRMSNorm as MyNorm, apply_rotary_pos_emb\n"
    folder = checkpoint(tmp_path / "mine", start.replace("import torch\n", "import torch\n" + names, 1))
    npu_patch.enable("rms_norm", "rope")
    model = load(folder)

    def hits() -> Counter[str]:
        return Counter(
            {row.target.rpartition(":")[2]: row.hits for row in npu_patch.status() if ".llama." in row.target}
        )

    before = hits()
    loss(model)
    assert hits() - before == {"LlamaRMSNorm.forward": 3, "apply_rotary_pos_emb": 1}
    npu_patch.disable()
    module = sys.modules[type(model).__module__]
    assert module.apply_rotary_pos_emb is modeling_llama.apply_rotary_pos_emb
    assert module.apply_rotary_pos_emb.__globals__ is vars(modeling_llama)


def test_a_file_that_changed_is_looked_at_again_and_the_earlier_classes_get_their_originals_back(
    tmp_path: Path, cache: str
) -> None:
    folder = checkpoint(tmp_path / "mine", source())
    npu_patch.enable("rms_norm")
    model = load(folder)
    first = type(model.model.norm)
    copy = Path(cache, *type(model).__module__.split(".")).with_suffix(".py")
    module = sys.modules[type(model).__module__]
    text = source("YourRMSNorm").replace("self.weight * hidden_states.to", "2 * self.weight * hidden_states.to")
    copy.write_text(text)
    dynamic_module_utils.get_class_in_module("LlamaForCausalLM", os.path.relpath(copy, cache))
    assert sys.modules[type(model).__module__] is module
    found = rows(model)
    assert found["YourRMSNorm.forward"].state == "unrecognised"
    assert "MyNorm.forward" not in found or found["MyNorm.forward"].state == "active"
    npu_patch.disable()
    assert first.forward.__globals__ is vars(module)


def test_a_file_that_fails_to_load_raises_what_it_did(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "mine", "raise KeyError('mine')\n")
    npu_patch.enable("rms_norm")
    with pytest.raises(KeyError, match="mine"):
        load(folder)


def test_somebody_elses_wrapper_on_the_loader_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npu_patch.enable("rms_norm")
    ours, calls = dynamic_module_utils.get_class_in_module, []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return ours(*args, **kwargs)

    monkeypatch.setattr(dynamic_module_utils, "get_class_in_module", theirs)
    folder = checkpoint(tmp_path / "mine", source())
    assert rows(load(folder))["MyNorm.forward"].state == "active"
    npu_patch.disable()
    assert dynamic_module_utils.get_class_in_module is theirs
    load(folder)
    assert len(calls) >= 2
    npu_patch.enable("rms_norm")
    assert rows(load(folder))["MyNorm.forward"].state == "active"
