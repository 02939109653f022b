"""What load() does to a process and to its children, each in a process of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
pytestmark = pytest.mark.usefixtures("simulated")

LOAD = "import npu_patch.simulator as simulator; simulator.load(devices=2)\n"


def check(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_the_package_imports_no_torch(run_python: Run) -> None:
    check(
        run_python(
            "import sys, npu_patch.simulator as s\n"
            "assert not s.is_loaded()\n"
            "s.parse_request('2:Ascend950')\n"
            "assert not {'torch', 'torch_npu'} & set(sys.modules), 'imported'\n"
        )
    )


def test_load_imports_no_torch_and_initialises_nothing(run_python: Run) -> None:
    check(
        run_python(
            LOAD + "import sys\n"
            "assert 'torch' not in sys.modules\n"
            "assert simulator.is_loaded()\n"
            "import torch\n"
            "assert 'torch_npu' in sys.modules\n"
            "assert torch.npu.is_available() and torch.npu.device_count() == 2\n"
            "assert torch.accelerator.is_available()\n"
            "assert not torch.npu.is_initialized()\n"
            "assert (torch.ones(2, device='npu:1') + 1).tolist() == [2, 2]\n"
            "assert torch.npu.is_initialized()\n"
            "simulator.load()\n"  # a second call is nothing
            "simulator.check()\n"
        )
    )


def test_nothing_is_printed_to_stdout_and_nothing_about_overridden_kernels(run_python: Run) -> None:
    result = run_python(LOAD + "import torch; torch.ones(2, device='npu') + 1")
    assert check(result) == ""
    assert "overrid" not in result.stderr.lower()


def test_the_environment_gives_devices_and_soc_and_is_passed_on(run_python: Run) -> None:
    out = check(
        run_python(
            "import npu_patch.simulator as s; s.load(); import os, torch\n"
            "print(os.environ['NPU_PATCH_SIMULATE'], torch.npu.device_count(), torch.npu.get_device_name(0))\n",
            NPU_PATCH_SIMULATE="3:ascend910_93",
        )
    )
    assert out.split() == ["3:Ascend910_93", "3", "Ascend910_9391"]


def test_arguments_win_over_the_environment(run_python: Run) -> None:
    out = check(
        run_python(
            LOAD + "import torch; print(torch.npu.device_count(), torch.npu.get_device_name(0))",
            NPU_PATCH_SIMULATE="3:Ascend950",
        )
    )
    assert out.split() == ["2", "Ascend950PR_9589"]


def test_a_bad_request_is_a_value_error_that_names_the_variable(run_python: Run) -> None:
    result = run_python("import npu_patch.simulator as s; s.load()", NPU_PATCH_SIMULATE="0")
    assert result.returncode == 1
    assert (
        "ValueError: NPU_PATCH_SIMULATE=0: cannot simulate 0 devices: expected a number from 1 to 16" in result.stderr
    )


def test_load_after_torch_is_refused_and_says_so(run_python: Run) -> None:
    result = run_python("import torch\n" + LOAD, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode == 1
    assert "SimulatorError: torch is already imported: call npu_patch.simulator.load()" in result.stderr


def test_without_autoload_the_kernels_come_with_torch_npu(run_python: Run) -> None:
    check(
        run_python(
            LOAD + "import sys, torch\n"
            "assert 'torch_npu' not in sys.modules\n"
            "import torch_npu\n"
            "assert (torch.ones(2).npu() + 1).tolist() == [2, 2]\n",
            TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        )
    )


def test_a_seed_set_before_the_first_tensor_counts(run_python: Run) -> None:
    check(
        run_python(
            LOAD + "import torch\n"
            "torch.manual_seed(3)\n"
            "assert not torch.npu.is_initialized()\n"
            "x = torch.rand(4, device='npu')\n"
            "torch.manual_seed(3)\n"
            "assert torch.equal(torch.rand(4, device='npu'), x)\n"
        )
    )


def test_torch_npu_may_be_imported_before_torch(run_python: Run) -> None:
    check(run_python(LOAD + "import torch_npu, torch\nassert (torch.ones(2).npu() + 1).tolist() == [2, 2]\n"))


CHILD = """
import multiprocessing, sys
import torch

def child(queue):
    x = torch.arange(4.0, device="npu").requires_grad_()
    y = torch.ops.npu.npu_swiglu(x * 2)
    y.sum().backward()
    queue.put((y.tolist(), x.grad.tolist()))

if __name__ == "__main__":
    assert not torch.npu.is_initialized()
    context = multiprocessing.get_context(sys.argv[1] if len(sys.argv) > 1 else METHOD)
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    found = queue.get(timeout=60)
    process.join(60)
    assert process.exitcode == 0, process.exitcode
    local = multiprocessing.Queue()
    child(local)
    assert local.get(timeout=60) == found, found
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_compute_on_the_device(run_python: Run, method: str) -> None:
    check(run_python(LOAD + f"METHOD = {method!r}\n" + CHILD))


def test_a_forked_child_computes_after_its_parent_asked_for_the_devices(run_python: Run) -> None:
    check(
        run_python(
            LOAD + "import os, torch\n"
            "assert torch.npu.is_available() and torch.accelerator.device_count() == 2\n"
            "pid = os.fork()\n"
            "if pid == 0:\n"
            "    os._exit(0 if (torch.ones(2, device='npu') + 1).tolist() == [2, 2] else 1)\n"
            "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
        )
    )


def test_v3_raises_on_ascend950_and_other_operators_run(run_python: Run) -> None:
    check(
        run_python(
            "import npu_patch.simulator as s; s.load(soc='Ascend950'); import torch\n"
            "q = torch.randn(1, 2, 4, 8, device='npu')\n"
            "out = torch.ops.npu.npu_fusion_attention(q, q, q, 2, 'BNSD')[0]\n"
            "assert out.isfinite().all()\n"
            "assert torch.ops.npu.npu_rms_norm(q, torch.ones(8, device='npu'))[0].isfinite().all()\n"
            "try:\n"
            "    torch.ops.npu.npu_fusion_attention_v3(q, q, q, 2, 'BNSD')\n"
            "except RuntimeError as error:\n"
            "    assert 'Ascend950 not support' in str(error), error\n"
            "else:\n"
            "    raise SystemExit('v3 ran on Ascend950')\n"
        )
    )


def test_a_process_ends_cleanly_with_tensors_alive(run_python: Run) -> None:
    result = run_python(
        LOAD + "import torch\n"
        "x = torch.randn(64, 64, device='npu', requires_grad=True)\n"
        "stream = torch.npu.Stream(); event = torch.npu.Event(); event.record(stream)\n"
        "(x @ x).sum().backward()\n"
    )
    check(result)
    assert "error" not in result.stderr.lower()
