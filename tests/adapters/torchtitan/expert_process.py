"""`trainer_process` for experts on several ranks; what keeps torchtitan as it is from training them on NPUs is mended.

Beside tensor parallelism the router of 0.3.0 gathers scores from a DTensor whose tokens are spread. In the backward of
torch_npu 2.13.0 every rank makes a gradient of the size of the whole tensor, on simulated and on real NPUs. And 0.2.2
finds the places of tokens by a kernel of Triton's, for which its own reference on the CPU stands in here.
"""

from __future__ import annotations

from typing import Any

from . import trainer_process
from .generation import CURRENT  # with which the simulated device comes, before torch


def gather_backward_of_a_rank(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On the parts of one rank, whose size is that of its part of the index but for the dimension gathered from."""
    from torch.distributed.tensor import DTensor

    grad, size, dim, index, sparse = args
    parts = list(index.to_local().shape)
    parts[dim] = size[dim]
    result = operator(grad.to_local(), parts, dim, index.to_local(), sparse)
    return DTensor.from_local(result, grad.device_mesh, grad.placements, run_check=False)


def repair_gathers() -> None:
    import torch
    from torch.distributed.tensor import DTensor

    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.npu.npu_gather_backward.default] = gather_backward_of_a_rank


def find_places_on_the_cpu() -> None:
    from torchtitan.models.moe import kernels

    def fill(counts: Any, *args: Any) -> Any:
        return kernels.fill_indices_cpu(counts, *args).to(counts.device)

    kernels.fill_indices_wrapper = fill


def keep_little() -> None:
    """Of what `keep` keeps only the gradients of the first step: there are many runs, on many ranks."""
    local = trainer_process.local
    trainer_process.local_parameters = lambda parts: {}
    trainer_process.local = lambda tensor: None if trainer_process.WATCHED["gradients"] else local(tensor)


if __name__ == "__main__":
    keep_little()
    repair_gathers() if CURRENT else find_places_on_the_cpu()
    trainer_process.main()
