"""`import npu_patch`, and what holds for every way in: no NPU, waiting, strictness, the simulator alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packaging.environments import ROOT, Environment, Libraries

MODELING = "transformers.models.tiny.modeling_tiny"


def test_importing_the_package_imports_neither_torch_nor_a_model_library(installed: Environment) -> None:
    code = """
    import sys, npu_patch
    heavy = {"torch", "torch_npu", "transformers", "torchtitan", "numpy", "rich"}
    print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}), npu_patch.__version__)
    """
    for value in ("default", "none"):
        assert installed.code(code, NPU_PATCH_OPS=value).stdout.startswith("[] ")


def test_import_activates_the_default_ops_without_a_variable(installed: Environment, libraries: Libraries) -> None:
    code = """
    import npu_patch, transformers
    print(all(row.enabled == row.default for row in npu_patch.ops()))
    print({(row.state, row.reason) for row in npu_patch.status() if row.library == "torchtitan"})
    """
    result = installed.code(code, PYTHONPATH=libraries.path)
    assert result.stdout == "True\n{('waiting', 'not imported')}\n"
    # also without `site`, where no start-up file is read, and from a checkout that is not installed
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(Path(__import__('wrapt').__file__).parents[1])!r}]; " + (
        "import npu_patch, transformers; print(npu_patch.strategy()['rope']['enabled'])"
    )
    assert installed.code(code, "-S", PYTHONPATH=libraries.path).stdout == "True\n"


def test_the_enable_table_can_be_read_before_and_after_something_is_patched(
    installed: Environment, libraries: Libraries
) -> None:
    code = f"""
    import npu_patch
    before = [row.name for row in npu_patch.ops()]
    import {MODELING}
    import npu_patch.ops.rms_norm as deep
    from npu_patch import ops
    print(before == [row.name for row in npu_patch.ops()] == [row.name for row in ops()], len(before) > 2)
    print(npu_patch.status().hits("rms_norm"), callable(deep.unsupported))
    """
    result = installed.code(code, NPU_PATCH_SIMULATE="1", PYTHONPATH=libraries.path)
    assert result.stdout.splitlines()[-2:] == ["True True", "0 True"], result.stderr


def test_import_after_the_library_patches_what_is_loaded(installed: Environment, libraries: Libraries) -> None:
    code = f"""
    import {MODELING} as m
    original = m.TinyRMSNorm.forward
    import npu_patch
    print(m.TinyRMSNorm.forward is original)
    npu_patch.disable()
    print(m.TinyRMSNorm.forward is original)
    """
    result = installed.code(code, NPU_PATCH_SIMULATE="1", PYTHONPATH=libraries.path)
    assert result.stdout.splitlines()[-2:] == ["False", "True"], result.stderr


def test_import_with_a_misspelt_variable_raises_at_the_library(installed: Environment, libraries: Libraries) -> None:
    result = installed.code(
        "import npu_patch; print('ran'); import transformers", NPU_PATCH_OPS="rms_nrom", PYTHONPATH=libraries.path
    )
    assert (result.returncode, result.stdout) == (1, "ran\n")
    assert "did you mean 'rms_norm'" in result.stderr.splitlines()[-1]


def test_simulator_alone_patches_nothing_and_a_later_import_still_activates(
    installed: Environment, libraries: Libraries
) -> None:
    code = f"""
    import sys, torch
    print((torch.ones(3, device="npu") + 1).sum().item(), torch.npu.device_count())
    import {MODELING} as m
    print("npu_patch" in sys.modules)
    original = m.TinyRMSNorm.forward
    import npu_patch
    print(m.TinyRMSNorm.forward is original, npu_patch.strategy()["rms_norm"]["enabled"])
    m.TinyRMSNorm(64).to("npu")(torch.randn(2, 64, device="npu"))
    print(npu_patch.status().hits("rms_norm"))
    """
    result = installed.code(code, NPU_PATCH_SIMULATE="3", PYTHONPATH=libraries.path)
    assert result.stdout.splitlines()[-4:] == ["6.0 3", "False", "False True", "1"], result.stderr


@pytest.fixture
def fake_npu(tmp_path: Path) -> str:
    """A torch_npu that sees no device, as on a login node; gives a folder for PYTHONPATH."""
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text(
        "import sys, types, torch\n"
        "torch.npu = types.SimpleNamespace(device_count=lambda: 0, is_available=lambda: False, "
        "is_initialized=lambda: False)\n"
        "def _autoload(): pass\n"
    )
    return str(tmp_path)


def test_without_a_visible_npu_everything_stays_with_one_warning(
    installed: Environment, libraries: Libraries, fake_npu: str
) -> None:
    code = f"""
    import {MODELING} as m
    import npu_patch
    code = m.TinyRMSNorm.forward.__code__.co_filename
    print("modeling_tiny" in code, npu_patch.status().notes)
    """
    result = installed.code(code, NPU_PATCH_OPS="rms_norm", PYTHONPATH=f"{fake_npu}:{libraries.path}")
    assert result.stdout.startswith("True ('nothing is patched: no NPU is visible")
    (warning,) = [line for line in result.stderr.splitlines() if "npu_patch" in line]
    assert "nothing is patched: no NPU is visible" in warning


def test_without_torch_npu_everything_stays_with_one_warning(installed: Environment, libraries: Libraries) -> None:
    code = f"""
    import sys
    sys.modules["torch_npu"] = None  # as if it were not installed
    import {MODELING} as m
    print("modeling_tiny" in m.TinyRMSNorm.forward.__code__.co_filename)
    """
    result = installed.code(
        code, NPU_PATCH_OPS="rms_norm", PYTHONPATH=libraries.path, TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    assert result.stdout == "True\n"
    (warning,) = result.stderr.splitlines()
    assert "torch_npu is not installed" in warning


def test_with_autoload_off_npu_patch_waits_for_torch_npu(installed: Environment, libraries: Libraries) -> None:
    code = f"""
    import sys
    import {MODELING} as m
    import npu_patch
    print("torch_npu" in sys.modules, {{row.state for row in npu_patch.status()}}, npu_patch.status().notes)
    original = m.TinyRMSNorm.forward
    import torch_npu
    print(m.TinyRMSNorm.forward is original)
    """
    result = installed.code(
        code,
        NPU_PATCH_OPS="rms_norm",
        NPU_PATCH_SIMULATE="1",
        PYTHONPATH=libraries.path,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    first, *_, last = result.stdout.splitlines()
    assert first.startswith("False {'waiting'} (")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in first
    assert last == "False", result.stderr


def test_strict_raises_at_the_call_that_falls_back(installed: Environment, libraries: Libraries) -> None:
    code = f"""
    import torch, npu_patch
    from {MODELING} import TinyRMSNorm
    try:
        TinyRMSNorm(64)(torch.randn(2, 64))
    except npu_patch.StrictError as error:
        print("raised:", error)
    """
    result = installed.code(
        code, NPU_PATCH_OPS="rms_norm", NPU_PATCH_STRICT="1", NPU_PATCH_SIMULATE="1", PYTHONPATH=libraries.path
    )
    assert "raised: " + MODELING in result.stdout, result.stderr


def test_table_and_unreached_named_op_at_exit(installed: Environment, libraries: Libraries) -> None:
    code = f"""
    import torch
    from {MODELING} import TinyRMSNorm
    norm = TinyRMSNorm(64)
    norm(torch.randn(2, 64))
    norm.to("npu")(torch.randn(2, 64, device="npu"))
    """
    changes = {"NPU_PATCH_OPS": "rms_norm,rope", "NPU_PATCH_REPORT": "1", "NPU_PATCH_SIMULATE": "1"}
    result = installed.code(code, PYTHONPATH=libraries.path, **changes)
    (row,) = [line.split("|") for line in result.stderr.splitlines() if f"{MODELING}:" in line]
    assert row[5].strip() == "1"
    assert row[6].strip().startswith("1 x ")
    (warning,) = [line for line in result.stderr.splitlines() if "never reached" in line]
    assert warning.startswith("npu_patch: rope ")
    # other programs of the same shell are left in peace
    assert installed.code("print()", **changes).stderr == ""
