"""The tests run on device `npu`: real hardware where there is some, else the simulated one, loaded before torch."""

from __future__ import annotations

import gc
import glob
import os
import sys

import pytest

# The test process patches nothing by itself; each test says what it wants on.
os.environ["NPU_PATCH_OPS"] = "none"
for variable in ("NPU_PATCH_REPORT", "NPU_PATCH_STRICT", "NPU_PATCH_LOG"):
    os.environ.pop(variable, None)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The models are tiny: several threads for one operator only wait for each other, and for the other test workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import npu_patch.simulator  # noqa: E402

REAL_NPU = bool(glob.glob("/dev/davinci[0-9]*"))
if not REAL_NPU and "torch" not in sys.modules:
    npu_patch.simulator.load(devices=2)

import npu_patch  # noqa: E402
from tests.support import fla  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    # A missing derivative only warns and leaves gradients None: in a test that is a failure.
    config.addinivalue_line("filterwarnings", "error:.*an autograd kernel was not registered.*:UserWarning")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> object:
    """The same where backward runs in a thread of the device: there the warning is only printed."""
    report = yield
    if report.when == "call" and report.passed and "an autograd kernel was not registered" in report.capstderr:
        report.outcome, report.longrepr = "failed", f"backward lost a gradient:\n{report.capstderr}"
    return report


@pytest.fixture(autouse=True)
def originals() -> object:
    """Every test starts and ends with all originals in place."""
    npu_patch.disable()
    yield None
    npu_patch.disable()
    fla.remove()


@pytest.fixture(scope="module", autouse=True)
def memory(request: pytest.FixtureRequest) -> object:
    """What a module remembers from test to test, whole models among it, goes with the module."""
    yield None
    import torch

    for value in vars(request.module).values():
        if callable(getattr(value, "cache_clear", None)):
            value.cache_clear()
    gc.collect()
    if torch.npu.is_initialized():
        torch.npu.empty_cache()


@pytest.fixture
def device() -> object:
    import torch

    return torch.device("npu")
