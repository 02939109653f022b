"""One rank of two: every collective, DDP, DTensor and FSDP2, each against values that are known. Run by torchrun."""

# ruff: noqa: E402  (the device is loaded before torch)
from __future__ import annotations

import copy
import os
from typing import Any

import npu_patch.simulator

npu_patch.simulator.load()

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401  (the launcher switches autoloading off)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("npu", RANK)


def full(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, value, device=DEVICE, dtype=dtype)


def same(found: Tensor, expected: list[Any], what: str) -> None:
    assert found.tolist() == expected, f"{what}: rank {RANK} has {found.tolist()}, expected {expected}"


def reductions() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8):
        x = full(RANK + 1, 4, dtype=dtype)
        dist.all_reduce(x)
        same(x, [3] * 4, f"all_reduce {dtype}")
    for op, expected in (("AVG", 1.5), ("MAX", 2), ("MIN", 1), ("PRODUCT", 2)):
        x = full(RANK + 1.0, 3)
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
        same(x, [expected] * 3, op)
    x = full(RANK + 1.0, 2)
    dist.reduce(x, 0)
    if RANK == 0:
        same(x, [3, 3], "reduce")
    out = full(0, 2)
    dist.reduce_scatter_tensor(out, torch.arange(4.0, device=DEVICE))
    same(out, [[0, 2], [4, 6]][RANK], "reduce_scatter_tensor")


def sixteen_bit_sums_are_rounded_as_torch_rounds() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for scale in (1.0, 1e-6, 3e4):
            a, b = (torch.randn(512, generator=torch.Generator().manual_seed(i)) * scale for i in (0, 1))
            a, b = a.to(dtype), b.to(dtype)
            x = (a, b)[RANK].to(DEVICE)
            dist.all_reduce(x)
            assert torch.equal(x.cpu(), a + b), f"{dtype} at {scale}"


def gathers() -> None:
    out = full(0, 2 * WORLD)
    dist.all_gather_into_tensor(out, full(RANK, 2))
    same(out, [0, 0, 1, 1], "all_gather_into_tensor")
    parts = [full(0, 2) for _ in range(WORLD)]
    dist.all_gather(parts, full(RANK, 2))
    same(torch.cat(parts), [0, 0, 1, 1], "all_gather")
    parts = [full(0, 1), full(0, 3)]
    dist.all_gather(parts, full(RANK, 1 + 2 * RANK))
    same(torch.cat(parts), [0, 1, 1, 1], "all_gather of unequal sizes")
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": RANK})
    assert objects == [{"rank": 0}, {"rank": 1}]


def exchanges() -> None:
    out = full(0, 4)
    dist.all_to_all_single(out, torch.arange(4.0, device=DEVICE) + 100 * RANK)
    same(out, [[0, 1, 100, 101], [2, 3, 102, 103]][RANK], "all_to_all_single")
    sizes = [[1, 3], [3, 1]][RANK]
    dist.all_to_all_single(out, full(RANK, 4), sizes, sizes)
    same(out, [[0, 1, 1, 1], [0, 0, 0, 1]][RANK], "all_to_all_single of unequal sizes")
    x = full(RANK, 3)
    dist.broadcast(x, 1)
    same(x, [1, 1, 1], "broadcast")
    out = full(0, 2)
    dist.scatter(out, [full(5, 2), full(6, 2)] if RANK == 0 else None, 0)
    same(out, [5 + RANK] * 2, "scatter")
    if RANK == 0:
        dist.send(full(7, 3), 1)
    else:
        x = full(0, 3)
        dist.recv(x, 0)
        same(x, [7, 7, 7], "recv")
    mine, theirs = full(RANK, 2), full(0, 2)
    pair = [dist.P2POp(dist.isend, mine, 1 - RANK), dist.P2POp(dist.irecv, theirs, 1 - RANK)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    same(theirs, [1 - RANK] * 2, "batch_isend_irecv")


def large_tensors() -> None:
    """More than one staging slot and more than one mailbox."""
    base = torch.arange(3 << 20, device=DEVICE) % 1000
    total = base + RANK
    dist.all_reduce(total)
    assert torch.equal(total, 2 * base + 1), "large all_reduce"
    out = torch.empty_like(base)
    dist.all_to_all_single(out, base + RANK)
    half = base.numel() // 2
    assert torch.equal(out.view(2, half)[1 - RANK], base.view(2, half)[RANK] + 1 - RANK), "large all_to_all"


def second_group() -> None:
    group = dist.new_group([0, 1])
    x = full(1, 1)
    dist.all_reduce(x, group=group)
    same(x, [2], "second group")


def wrappers() -> None:
    mesh = init_device_mesh("npu", (WORLD,))
    w = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    sharded = distribute_tensor(w, mesh, [Shard(0)])
    product = (sharded @ sharded.redistribute(placements=[Replicate()])).full_tensor()
    assert torch.allclose(product, w @ w, atol=1e-5), "DTensor"
    with npu_patch.simulator.trace() as t:
        leaf = sharded.detach().requires_grad_()
        (leaf * 2).exp().to_local().sum().backward()
    local = 8 * 8 * 4 // WORLD
    assert t.launches_by_op["exp"] == 1, t.launches_by_op
    assert t.ops["exp"].bytes_read == t.ops["exp"].bytes_written == local, "a DTensor counts its local tensor"
    assert t.saved_bytes == local, "the saved result of exp"
    with npu_patch.simulator.trace() as t:
        summed = DTensor.from_local(w, mesh, [Replicate()]) @ DTensor.from_local(w, mesh, [Partial()])
        rows = summed.redistribute(placements=[Shard(1)]).redistribute(placements=[Shard(0)]).to_local()
    assert torch.allclose(rows, (WORLD * w @ w).chunk(WORLD)[RANK], atol=1e-4), "DTensor, results that are waited for"
    assert t.launches_by_op["_c10d_functional.reduce_scatter_tensor"] == 1, t.launches_by_op

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(DEVICE)
    x = torch.randn(WORLD, 4, 16, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    ddp, reference = DistributedDataParallel(copy.deepcopy(plain)), copy.deepcopy(plain)
    ddp(x[RANK]).pow(2).mean().backward()
    reference(x.flatten(0, 1)).pow(2).mean().backward()
    for p, q in zip(ddp.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, atol=1e-6), "DDP"

    sharded_net = fully_shard(copy.deepcopy(plain), mesh=mesh)
    nets = ((sharded_net, x[RANK]), (plain, x.flatten(0, 1)))
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net, _ in nets]
    history = []
    for _ in range(3):
        losses = []
        for (net, inputs), optimizer in zip(nets, optimizers, strict=True):
            loss = net(inputs).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        dist.all_reduce(losses[0], op=dist.ReduceOp.AVG)
        assert torch.allclose(losses[0], losses[1], rtol=1e-5), f"FSDP2: {losses}"
        history.append(losses[0].item())
    assert history[-1] < history[0]


torch.npu.set_device(RANK)
dist.init_process_group("hccl")
reductions()
sixteen_bit_sums_are_rounded_as_torch_rounds()
gathers()
exchanges()
large_tensors()
second_group()
wrappers()
dist.barrier()
dist.destroy_process_group()
print(f"rank {RANK} is done", flush=True)
