"""One rank that runs torchtitan's stock trainer several times and writes down what happened.

    python -m tests.adapters.torchtitan.trainer_process RUNS.json FOLDER

RUNS.json is what `trainer_runs.train` writes. The trainer is started as `examples/pretrain_torchtitan.py` starts it,
and what it does is seen by watching `MetricsProcessor.log`, `clip_grad_norm_` and `CheckpointManager.load`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import npu_patch
from examples import pretrain_torchtitan as example
from tests.support import fla
from tests.support.pictures import stand_in_for_torchvision

RANK = int(os.environ["RANK"])
WATCHED: dict[str, Any] = {}


def watch() -> None:
    """Makes the trainer's own functions tell what they are given."""
    import torchtitan.distributed.utils as distributed
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.metrics import MetricsProcessor

    log, clip, load = MetricsProcessor.log, distributed.clip_grad_norm_, CheckpointManager.load

    def watched_log(self, step, global_avg_loss, global_max_loss, grad_norm, *args, **kwargs):
        WATCHED["steps"].append(step)
        WATCHED["losses"].append(float(global_avg_loss))
        WATCHED["grad_norms"].append(float(grad_norm))
        WATCHED["parts"] = self.model_parts
        if WATCHED["trace"] is not None:
            WATCHED["copies"].append(WATCHED["trace"].host_syncs_by_op["copy to host"])
        return log(self, step, global_avg_loss, global_max_loss, grad_norm, *args, **kwargs)

    def watched_clip(parameters, *args, **kwargs):
        parameters = list(parameters)
        WATCHED["gradients"].append([local(parameter.grad) for parameter in parameters])
        return clip(parameters, *args, **kwargs)

    def watched_load(self, *args, **kwargs):
        found = load(self, *args, **kwargs)
        if found:
            WATCHED["loaded"] = local_parameters(self.states["model"].model)
        return found

    MetricsProcessor.log, CheckpointManager.load = watched_log, watched_load
    distributed.clip_grad_norm_ = watched_clip


def local(tensor: Any) -> Any:
    """This rank's part of a DTensor, on the CPU."""
    return getattr(tensor, "to_local", lambda: tensor)().detach().cpu().clone()


def local_parameters(parts: Any) -> dict[str, Any]:
    return {name: local(value) for part in parts for name, value in part.named_parameters()}


@contextlib.contextmanager
def patched(ops: str | None) -> Iterator[None]:
    """With these ops, or as torchtitan is without a compiler: whatever it wants compiled runs as it is written."""
    import torch

    if ops is None:
        torch.compiler.set_stance("force_eager")
        try:
            yield
        finally:
            torch.compiler.set_stance("default")
    else:
        with npu_patch.scope(*ops.split(",")):
            yield


def counts() -> dict[str, Counter]:
    rows = [row for row in npu_patch.status().rows if row.library == "torchtitan"]  # not flux's encoders
    hits: Counter = Counter()
    fallbacks: Counter = Counter()
    for row in rows:
        hits[row.op] += row.hits
        for reason, number in row.fallbacks.items():
            fallbacks[f"{row.op}: {reason}"] += number
    return {"hits": hits, "fallbacks": fallbacks}


def train(run: dict[str, Any], recent: bool) -> None:
    """Starts the stock trainer with the flags of `run`, which the example has filled up already."""
    os.environ["MASTER_PORT"] = str(run["port"])
    sys.argv[1:] = run["flags"]
    if not recent:
        from torchtitan.config import ConfigManager

        ConfigManager.parse_args.__defaults__ = (run["flags"],)  # it takes the arguments of its import
    with contextlib.nullcontext() if run["flux"] else stand_in_for_torchvision():
        example.trainer(recent, flux=run["flux"])()


def carry_out(run: dict[str, Any], recent: bool) -> dict[str, Any]:
    import torch

    from npu_patch.simulator import trace

    WATCHED.clear()
    WATCHED.update(steps=[], losses=[], grad_norms=[], gradients=[], copies=[])
    before = counts()
    launches: dict[str, int] = {}
    with patched(run["ops"]), contextlib.ExitStack() as stack:
        tracing = WATCHED["trace"] = stack.enter_context(trace()) if run["trace"] else None
        train(run, recent)
    if tracing is not None:
        launches = {name: number for name, number in tracing.launches_by_op.items() if name.startswith("npu.")}
    after = counts()
    if run["keep"]:
        kept = {
            "gradients": WATCHED["gradients"],
            "parameters": local_parameters(WATCHED["parts"]),
            "loaded": WATCHED.get("loaded"),
        }
        torch.save(kept, run["keep"].format(rank=RANK))
    result = {name: WATCHED[name] for name in ("steps", "losses", "grad_norms", "copies")}
    result |= {name: dict(after[name] - before[name]) for name in after}
    WATCHED.clear()
    gc.collect()
    return {**result, "launches": launches}


def share_parameters_without_annotations() -> None:
    """Makes the back end `spmd_types` of torchtitan 0.3.0 run on several ranks with a torch before 2.14.

    It annotates plain parameters, and hands `fully_shard` the mesh of all dimensions; earlier ones know no annotations
    and refuse plain parameters on such a mesh.  Where data are all that is split, the mesh of those ranks says as much.
    """
    import torch
    import torchtitan.distributed.full_dtensor as full_dtensor

    if torch.__version__ >= (2, 14):
        return
    resolve = full_dtensor.resolve_fsdp_mesh

    def of_data_alone(parallel_dims: Any) -> Any:
        mesh, dimensions = resolve(parallel_dims)
        only_data = not (parallel_dims.tp_enabled or parallel_dims.cp_enabled or parallel_dims.dp_replicate_enabled)
        if parallel_dims.spmd_backend == "spmd_types" and only_data:
            return parallel_dims.get_mesh("dp_shard"), None
        return mesh, dimensions

    full_dtensor.resolve_fsdp_mesh = of_data_alone


def add_untied_flavor() -> None:
    """The tied weights of qwen3's debug model in torchtitan 0.2.2 are refused by the FSDP2 of torch 2.13."""
    from torchtitan.models.qwen3 import qwen3_args

    qwen3_args["debugmodel_untied"] = dataclasses.replace(qwen3_args["debugmodel"], enable_weight_tying=False)


def main() -> None:
    runs, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    recent = example.is_recent()
    example.add_set_timeout()
    fla.install()  # what qwen3_5 imports
    share_parameters_without_annotations() if recent else None
    sys.argv[1:] = runs[0]["flags"]
    watch()
    None if recent else add_untied_flavor()
    npu_patch.configure("swiglu", separate=True)
    results = {run["name"]: carry_out(run, recent) for run in runs}
    (folder / f"results.{RANK}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
