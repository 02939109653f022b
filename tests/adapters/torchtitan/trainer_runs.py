"""Starting `trainer_process`: torchtitan's stock trainer, several runs in one set of processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from examples import pretrain_torchtitan as example
from tests.conftest import REAL_NPU

from .generation import PREVIOUS

ROOT = Path(__file__).parents[3]


@dataclass
class Run:
    """One run of the trainer. `ops` None is torchtitan without patches, made to run without a compiler."""

    name: str
    flags: list[str]
    ops: str | None = None
    trace: bool = False
    keep: bool = False


@dataclass
class Result:
    """What one rank saw."""

    losses: list[float]
    steps: list[int]
    grad_norms: list[float]
    hits: dict[str, int]
    fallbacks: dict[str, int]
    launches: dict[str, int]
    copies: list[int]  # from the device to the host, after each step of a run with `trace`
    tensors: dict[str, Any] = field(default_factory=dict)


def model_flags(family: str, flavor: str) -> list[str]:
    """The flags of a model; `flavor` is the name of the configuration in 0.3.0, of the flavor in 0.2.2."""
    return ["--model.name", family, "--model.flavor", flavor] if PREVIOUS else ["--module", family, "--config", flavor]


def train(folder: Path, ranks: int, runs: list[Run], process: str = "trainer_process") -> dict[str, list[Result]]:
    """Name of the run → result per rank. `process` names the module that is run, beside this one."""
    folder.mkdir(exist_ok=True)
    example.make_files(folder)
    described = [describe(run, folder) for run in runs]
    (folder / "runs.json").write_text(json.dumps(described))
    command = [
        sys.executable,
        "-m",
        f"tests.adapters.torchtitan.{process}",
        str(folder / "runs.json"),
        str(folder),
    ]
    outputs = [folder / f"output.{rank}" for rank in range(ranks)]
    processes = [start(command, rank, ranks, output) for rank, output in enumerate(outputs)]
    try:
        for process in processes:
            process.wait(timeout=840)
    finally:
        for process in processes:
            process.kill()
    failed = [
        output.read_text()[-3000:] for process, output in zip(processes, outputs, strict=True) if process.returncode
    ]
    assert not failed, "\n\n".join(failed)
    files = [json.loads((folder / f"results.{rank}.json").read_text()) for rank in range(ranks)]
    return {
        run.name: [Result(**file[run.name], tensors=tensors(run, folder, rank)) for rank, file in enumerate(files)]
        for run in runs
    }


def describe(run: Run, folder: Path) -> dict[str, Any]:
    flags = example.with_defaults(run.flags, folder, recent=not PREVIOUS)
    keep = str(folder / f"{run.name}.{{rank}}.pt") if run.keep else ""
    return {**vars(run), "flags": flags, "flux": "flux" in run.flags, "keep": keep, "port": free_port()}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(command: list[str], rank: int, ranks: int, output: Path) -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NPU_PATCH_")}
    environment |= {"NPU_PATCH_OPS": "none", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    environment |= {
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "HF_DATASETS_CACHE": str(output.parent / "cache"),
    }
    if not REAL_NPU:
        environment["NPU_PATCH_SIMULATE"] = str(ranks)
    with output.open("w") as file:  # not a pipe: while one rank is waited for, another could fill its own
        return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)


def tensors(run: Run, folder: Path, rank: int) -> dict[str, Any]:
    return torch.load(folder / f"{run.name}.{rank}.pt") if run.keep else {}
