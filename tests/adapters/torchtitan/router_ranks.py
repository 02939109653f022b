"""One rank of two: a router on DTensors, fused and as it is. Run by torchrun."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import npu_patch
from tests.adapters.torchtitan.models import Counts
from tests.adapters.torchtitan.test_routers import bias, ordered, router, tokens
from tests.support.numerics import relative_error


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def step(module: nn.Module, x: Tensor, of_choice: Tensor) -> list[Tensor]:
    """Results, then gradients of tokens and gate, as whole tensors."""
    results = ordered(tuple(whole(one) for one in module(x, of_choice)))
    loss = torch.zeros((), device="npu")
    for one in results:
        if one.requires_grad:
            loss = loss + (one * torch.linspace(-1, 1, one.numel()).view(one.shape).npu()).sum()
    found = torch.autograd.grad(loss, [x, *module.parameters()])
    return [whole(one).detach() for one in (*results, *found)]


def _check_that_a_bias_that_is_no_dtensor_is_left_alone(module: nn.Module, x: Tensor) -> None:
    with npu_patch.scope("router"):
        counts = Counts()
        with pytest.raises(RuntimeError, match="mixed"):  # from the original
            module(x, bias())
        assert counts.take("router") == (0, {"DTensor beside a plain tensor": 1})


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("hccl")
    mesh = init_device_mesh("npu", (2,))
    for score in ("sigmoid", "softmax"):
        module = router(score_func=score, num_expert_groups=4, num_limited_groups=2)
        whole_weight = module.gate.weight
        spread_weight = nn.Parameter(distribute_tensor(whole_weight.detach(), mesh, [Replicate()]))
        for placement in (Replicate(), Shard(1), Shard(0)):
            x = tokens().detach()
            x = torch.cat((x, x[:1])) if placement == Shard(0) else x  # as many on every rank
            module.gate.weight = whole_weight
            alone = step(module, x.clone().requires_grad_(), bias())
            module.gate.weight = spread_weight
            spread = distribute_tensor(x, mesh, [placement]).requires_grad_()
            of_choice = distribute_tensor(bias(), mesh, [Replicate()])
            kinds = [one.placements for one in module(spread, of_choice)]
            with npu_patch.scope("router"):
                counts = Counts()
                assert [one.placements for one in module(spread, of_choice)] == kinds
                found = step(module, spread, of_choice)
                assert counts.take("router") == (2, {}), placement
            assert torch.equal(found[1], alone[1]), placement
            for one, other in zip(found, alone, strict=True):
                assert one.dtype is other.dtype
                assert relative_error(one, other) <= 1e-5, (score, placement)
        _check_that_a_bias_that_is_no_dtensor_is_left_alone(module, spread)
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank} is done", flush=True)


if __name__ == "__main__":
    main()
