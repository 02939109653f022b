"""A process with a report and no torch: `report(...)` stands for importing and using a patched model library."""

from __future__ import annotations

import os

folder = os.environ.pop("NPU_PATCH_REPORT", None)  # so that the package itself reports nothing

from npu_patch import process  # noqa: E402
from npu_patch.report import Row, Status  # noqa: E402

if folder is not None:
    os.environ["NPU_PATCH_REPORT"] = folder


class StubPatcher:
    """What `process` asks of a Patcher."""

    def __init__(self, named: frozenset[str]) -> None:
        self.named = named
        self.hits = 0
        self.fallbacks: dict[str, int] = {}
        self.imported = True
        self.no_npu = False

    def status(self) -> Status:
        return Status([Row("rms_norm", "lib", "lib.m:Norm.forward", "active", "llama", self.hits, self.fallbacks)])

    def touched(self) -> bool:
        return self.imported

    def enabled(self, op: str) -> bool:
        return True

    def reached(self, op: str) -> bool:
        return op == "rms_norm" and bool(self.hits or self.fallbacks)

    def hopeless(self) -> bool:
        return self.no_npu

    def after_fork(self) -> None:
        self.hits = 0
        self.fallbacks.clear()


def report(hits: int = 0, named: str = "", fallbacks: dict[str, int] | None = None) -> StubPatcher:
    patcher = StubPatcher(frozenset(named.split()))
    patcher.hits = hits
    patcher.fallbacks = fallbacks or {}
    process._reporter = None  # the package's own, which has nothing to say
    process.start(patcher, folder)  # type: ignore[arg-type]
    return patcher
