from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
import types

import pytest
import torch

from npu_patch.ops import availability
from npu_patch.ops.availability import Unavailable, why_unavailable


def test_an_npu_that_can_be_used_has_no_reason() -> None:
    assert why_unavailable() is None


def test_without_torch_npu_the_reason_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch_npu")
    monkeypatch.setattr(availability.importlib.util, "find_spec", lambda name: None)
    assert why_unavailable() == Unavailable("torch_npu is not installed", final=True)


@pytest.mark.parametrize("value", ["0", "no"])
def test_without_autoload_torch_npu_is_not_imported(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.delitem(sys.modules, "torch_npu")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", value)
    reason = f"torch_npu is installed but not imported (TORCH_DEVICE_BACKEND_AUTOLOAD={value})"
    assert why_unavailable() == Unavailable(reason, final=False)
    assert "torch_npu" not in sys.modules


def test_an_imported_torch_npu_counts_without_autoload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert why_unavailable() is None


@pytest.mark.parametrize("name", ["torch", "torch_npu"])
def test_while_torch_is_being_imported_the_answer_is_later(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sys.modules[name].__spec__, "_initializing", True, raising=False)
    assert why_unavailable() == Unavailable("torch_npu is still being imported", final=False)


def test_a_failing_import_is_told_with_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> types.ModuleType:
        if name != "torch_npu":
            return sys.modules[name]
        raise RuntimeError("Failed to load") from ImportError("libascendcl.so: cannot open\nsecond line")

    monkeypatch.delitem(sys.modules, "torch_npu")
    monkeypatch.setattr(availability.importlib, "import_module", fail)
    monkeypatch.setattr(availability.importlib.util, "find_spec", lambda n: importlib.machinery.ModuleSpec(n, None))
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    reason = "torch_npu cannot be imported: libascendcl.so: cannot open"
    assert why_unavailable() == Unavailable(reason, final=True)


def test_no_visible_device_is_a_final_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.npu, "is_available", lambda: False)
    reason = "no NPU can be used: torch.npu.is_available() is False"
    assert why_unavailable() == Unavailable(reason, final=True)
    monkeypatch.setattr(torch.npu, "device_count", lambda: 0)
    assert why_unavailable() == Unavailable("no NPU is visible: torch.npu.device_count() is 0", final=True)

    def broken() -> int:
        raise RuntimeError("driver mismatch\nmore")

    monkeypatch.setattr(torch.npu, "device_count", broken)
    assert why_unavailable() == Unavailable("torch_npu cannot count its devices: driver mismatch", final=True)


def test_asking_does_not_initialise_the_device_and_the_name_is_known_afterwards() -> None:
    code = """
import sys
import npu_patch.simulator
if sys.argv[1] == "simulated":
    npu_patch.simulator.load(devices=1)
import torch
from npu_patch.ops import availability
assert availability.why_unavailable() is None, availability.why_unavailable()
assert availability.soc_name() == "" and not availability.is_ascend950()
assert not torch.npu.is_initialized()
torch.ones(1, device="npu")
assert availability.soc_name().startswith("Ascend"), availability.soc_name()
"""
    from npu_patch import simulator

    kind = "simulated" if simulator.is_loaded() else "real"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "NPU_PATCH_OPS": "none"}
    done = subprocess.run([sys.executable, "-c", code, kind], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_operators_are_known_by_their_schema() -> None:
    assert availability.schema_has("npu_rms_norm")
    assert availability.schema_has("npu_rms_norm", "epsilon")
    assert not availability.schema_has("npu_rms_norm", "sink")
    assert not availability.schema_has("npu_does_not_exist")
    assert not availability.schema_has("npu_does_not_exist", "sink")


def test_a_torch_npu_that_registered_no_device_is_a_final_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "npu")
    reason = "torch_npu is imported but did not register torch.npu"
    assert why_unavailable() == Unavailable(reason, final=True)


@pytest.mark.parametrize("name", ["torch", "torch_npu"])
def test_what_ran_to_its_end_is_imported_although_the_import_system_still_works(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(availability, "_executed", set())
    monkeypatch.setattr(sys.modules[name].__spec__, "_initializing", True, raising=False)
    assert why_unavailable() == Unavailable("torch_npu is still being imported", final=False)
    availability.executed(name)
    assert why_unavailable() is None


def test_an_error_without_a_text_is_told_by_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise RuntimeError

    monkeypatch.setattr(torch.npu, "device_count", broken)
    assert why_unavailable() == Unavailable("torch_npu cannot count its devices: RuntimeError", final=True)


def test_the_chips_name_is_asked_of_an_initialised_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def name() -> str:
        raise RuntimeError("no such device")

    torch.ones(1, device="npu")
    monkeypatch.setattr(availability, "_soc_name", "")
    with monkeypatch.context() as patch:
        patch.setattr(torch.npu, "is_initialized", lambda: False)
        assert availability.soc_name() == ""
    with monkeypatch.context() as patch:
        patch.setattr(torch.npu, "get_device_name", name)
        assert availability.soc_name() == ""
    with monkeypatch.context() as patch:
        patch.delattr(torch, "npu")
        assert availability.soc_name() == ""
    assert availability.soc_name().startswith("Ascend")
