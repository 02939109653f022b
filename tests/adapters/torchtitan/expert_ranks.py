"""One rank of several: torchtitan's dispatcher between ranks, for routings of every kind. Run by torchrun.

Every rank draws the tokens of all of them, and computes what its own should become, and the gradients of its own
tokens, scores and experts, by a formula in float64 that exchanges nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import npu_patch  # with which the simulated device comes, before torch

import torch  # isort: skip
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.adapters.torchtitan.models import Counts

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LOCAL, TOP_K, SIZE = 2, 2, 6  # experts of a rank, of a token, and the width
EXPERTS = LOCAL * RANKS


class Rank(NamedTuple):
    """What a rank has."""

    tokens: Tensor
    scores: Tensor
    ids: Tensor
    head: Tensor  # the incoming gradient


def draw(routing: Callable[[int, torch.Generator], Tensor], rank: int, dtype: torch.dtype) -> Rank:
    generator = torch.Generator().manual_seed(rank)
    ids = routing(rank, generator)
    count = ids.shape[0]
    tokens, head = (torch.randn(count, SIZE, generator=generator).to(dtype) for _ in range(2))
    return Rank(tokens, torch.rand(count, TOP_K, generator=generator), ids, head)


def anywhere(rank: int, generator: torch.Generator) -> Tensor:
    return torch.randint(EXPERTS, (5 + rank, TOP_K), generator=generator)


def on_ranks(*targets: int) -> Callable[[int, torch.Generator], Tensor]:
    """The tokens of rank r go to experts of targets[r % len(targets)]."""

    def routing(rank: int, generator: torch.Generator) -> Tensor:
        target = targets[rank % len(targets)] % RANKS
        return target * LOCAL + torch.randint(LOCAL, (4 + rank, TOP_K), generator=generator)

    return routing


def with_counts(*counts: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda rank, generator: anywhere(rank, generator)[: counts[rank % len(counts)]]


ROUTINGS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "anywhere": anywhere,
    "each rank keeps its own": on_ranks(*range(RANKS)),
    "each rank to the next": on_ranks(*range(1, RANKS + 1)),
    "all to the first rank": on_ranks(0),
    "all to the last rank": on_ranks(RANKS - 1),
    "all to one expert": lambda rank, _: torch.full((3, TOP_K), EXPERTS - 1),
    "one token each": with_counts(1),
    "none of its own on odd ranks": with_counts(4, 0),
    "one token in all": lambda rank, generator: anywhere(rank, generator)[: int(rank == 0)] * 0,
}


def experts(rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return torch.tanh(rows * weights[ids])


def exchanged(dispatcher, rank: Rank, weights: Tensor) -> list[Tensor]:
    """Through the dispatcher: the result, and the gradients of tokens, scores and this rank's experts."""
    tokens, scores = (x.npu().requires_grad_() for x in (rank.tokens, rank.scores))
    local = weights[RANK * LOCAL : (RANK + 1) * LOCAL].to(tokens.dtype).npu().requires_grad_()
    ids = rank.ids.npu()
    counts = torch.bincount(rank.ids.flatten(), minlength=EXPERTS).npu()
    rows, of_experts, metadata = dispatcher.dispatch(tokens, scores, ids, counts)
    sorted_ids = torch.arange(LOCAL, device="npu").repeat_interleave(of_experts, output_size=rows.shape[0])
    out = dispatcher.combine(experts(rows, sorted_ids, local), metadata, tokens)
    assert (out.shape, out.dtype) == (tokens.shape, tokens.dtype)
    gradients = torch.autograd.grad(out, (tokens, scores, local), rank.head.npu())
    return [x.detach().cpu().double() for x in (out, *gradients)]


def by_formula(ranks: list[Rank], weights: Tensor) -> list[Tensor]:
    weights = weights.double().requires_grad_()
    own: list[Tensor] = []
    loss = weights.sum() * 0
    for number, rank in enumerate(ranks):
        tokens, scores = (x.double().requires_grad_() for x in (rank.tokens, rank.scores))
        out = (experts(tokens.unsqueeze(1), rank.ids, weights) * scores.unsqueeze(-1)).sum(1)
        loss = loss + (out * rank.head.double()).sum()
        if number == RANK:
            own = [out, tokens, scores]
    gradients = torch.autograd.grad(loss, (*own[1:], weights))
    return [own[0].detach(), *gradients[:2], gradients[2][RANK * LOCAL : (RANK + 1) * LOCAL]]


def check(name: str, dtype: torch.dtype) -> None:
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    dispatcher = AllToAllTokenDispatcher(AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K))
    dispatcher.wire_meshes(ep_mesh=MESH)
    ranks = [draw(ROUTINGS[name], rank, dtype) for rank in range(RANKS)]
    weights = torch.randn(EXPERTS, SIZE, generator=torch.Generator().manual_seed(99))
    weights = weights.to(dtype).float()
    stock = exchanged(dispatcher, ranks[RANK], weights)
    with npu_patch.scope("permute"):
        counts = Counts()
        fused = exchanged(dispatcher, ranks[RANK], weights)
        assert counts.take("permute") == (4, {}), f"{name}: {counts.take('permute')}"
    most = 1e-5 if dtype == torch.float32 else 3e-2
    exact = by_formula(ranks, weights)
    for what, ours, theirs, truth in zip(("out", "tokens", "scores", "experts"), fused, stock, exact, strict=True):
        for other, reference in (("the formula", truth), ("the original", theirs)):
            gap = float((ours - reference).norm() / reference.norm().clamp_min(1e-9))
            assert gap <= most, f"rank {RANK}, {name}, {dtype}: {what} is {gap:.1e} from {other}"


def main() -> None:
    global MESH
    from torchtitan.distributed.utils import set_spmd_backend

    torch.npu.set_device(RANK)
    dist.init_process_group("hccl")
    set_spmd_backend("partial_dtensor")
    MESH = init_device_mesh("npu", (RANKS,), mesh_dim_names=("ep",))
    for name in ROUTINGS:
        for dtype in (torch.float32, torch.bfloat16):
            check(name, dtype)
    dist.barrier()
    print(f"rank {RANK} is done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
