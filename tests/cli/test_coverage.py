"""`npu-patch coverage`: what is recognised, and one line for everything that is not."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest
from torch import nn

from npu_patch import registry
from npu_patch.registry import Library, Target, Unrecognised
from npu_patch.tools import coverage
from tests.packaging.environments import ROOT, clean_environment


def run(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "npu_patch", "coverage", *words]
    environment = clean_environment(PYTHONPATH=str(ROOT), **changes)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize(
    "changes", [{}, {"NPU_PATCH_SIMULATE": "1", "NPU_PATCH_OPS": "all"}], ids=["no NPU", "simulated"]
)
def test_one_model_is_shown_by_name(changes: dict[str, str]) -> None:
    result = run("--library", "transformers", "--model", "llama", "--json", **changes)
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert all(set(row) == {"op", "library", "target", "state", "meaning", "reason"} for row in rows)
    norm = "transformers.models.llama.modeling_llama:LlamaRMSNorm.forward"
    (row,) = [row for row in rows if row["target"] == norm]
    assert (row["op"], row["state"], row["meaning"], row["reason"]) == ("rms_norm", "recognised", "llama", "")
    assert not [row for row in rows if ".models." in row["target"] and ".llama." not in row["target"]]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--library", "tranformers"), "transformers"),
        (("--model", "lama"), "llama"),
        (("--models",), "--models"),
    ],
)
def test_a_bad_name_is_one_line(words: tuple[str, ...], hint: str) -> None:
    result = run(*words)
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert hint in result.stderr


# ---- a library of its own --------------------------------------------------------------------------------------------


def modules() -> list[str]:
    return ["stub_library.models.good.modeling_good", "stub_library.models.bad.modeling_bad"]


def find(module: types.ModuleType) -> Iterator[Target | Unrecognised]:
    print("a library prints")
    yield Target("rms_norm", "stub_library", module.__name__, "Norm.forward", lambda original, site: original, "llama")
    yield Unrecognised("rms_norm", "stub_library", module.__name__, "Odd.forward", "computes no known norm")


def broken(module: types.ModuleType) -> list[Target]:
    raise KeyError("a finder fails")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    good = types.ModuleType("stub_library.models.good.modeling_good")
    good.nn = nn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, good.__name__, good)
    stub = Library(
        "stub_library", f"{__name__}:modules", {"rms_norm": f"{__name__}:find", "rope": f"{__name__}:broken"}
    )
    monkeypatch.setattr(registry, "LIBRARIES", (stub,))
    monkeypatch.setattr(coverage, "_installed", lambda name: True)
    return stub


def test_what_cannot_be_imported_or_examined_is_a_row(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    assert coverage.main(None, None, as_json=True) == 0
    output = capsys.readouterr()
    rows = [(row["op"], row["target"].rpartition(".models.")[2], row["state"]) for row in json.loads(output.out)]
    assert rows == [
        ("rms_norm", "good.modeling_good:Norm.forward", "recognised"),
        ("rms_norm", "good.modeling_good:Odd.forward", "unrecognised"),
        ("rope", "good.modeling_good", "unrecognised"),
        ("-", "bad.modeling_bad", "not imported"),
    ]
    assert "a library prints" in output.err


def test_as_text_there_are_counts_by_meaning_and_reasons(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    coverage.main(None, None, as_json=False)
    text = capsys.readouterr().out
    assert "stub_library rms_norm: 1 of 2 recognised" in text
    for reason in ("computes no known norm", "KeyError: 'a finder fails'", "ModuleNotFoundError"):
        assert reason in text
    coverage.main("stub_library", "good", as_json=False)
    text = capsys.readouterr().out
    assert "Norm.forward" in text
    assert "modeling_bad" not in text


def test_a_library_that_is_not_installed_is_said(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "_installed", lambda name: False)
    with pytest.raises(coverage.UsageError, match="not installed: stub_library"):
        coverage.main(None, None, as_json=False)
