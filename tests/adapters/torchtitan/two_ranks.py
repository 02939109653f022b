"""One rank of two: norms, rotary embeddings and feed-forwards on DTensors, fused and as they are. Run by torchrun.

Every case is run on DTensors with and without the fused operator, and fused on whole plain tensors; results and
gradients are compared as whole tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import npu_patch
from tests.adapters.torchtitan.generation import CURRENT
from tests.adapters.torchtitan.models import Counts

RANK = int(os.environ["RANK"])
EVERYWHERE = Replicate()
Placements = Any


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("npu", dtype)


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def step(call: Callable[..., Any], inputs: Sequence[Any], parameters: Sequence[Any]) -> list[Tensor]:
    """Results, then gradients of inputs and parameters, as whole tensors."""
    results = call(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum((whole(r).double() * draw(90 + i, *r.shape).double()).sum() for i, r in enumerate(results))
    gradients = torch.autograd.grad(loss, (*inputs, *parameters))
    return [whole(t).detach() for t in (*results, *gradients)]


def check(
    what: str,
    op: str,
    build: Callable[[], tuple[Callable[..., Any], list[nn.Parameter]]],
    inputs: Sequence[Tensor],
    placements: Sequence[Placements],
    reason: str | None = None,
) -> None:
    """One case.

    Args:
        build: gives a callable and its parameters, which are DTensors where `distributed` is.
        inputs: whole tensors.
        placements: of each of them, on a mesh of two ranks.
        reason: why the original has to run.
    """
    tolerance = {torch.float32: 3e-6, torch.bfloat16: 2e-2}[inputs[0].dtype]
    spread = [distribute_tensor(x, MESH, [p]).requires_grad_() for x, p in zip(inputs, placements, strict=True)]
    plain = [x.clone().requires_grad_() for x in inputs]
    call, parameters = build(True)  # type: ignore[call-arg]
    results = call(*spread)
    kinds = [r.placements for r in (results if isinstance(results, tuple) else (results,))]
    stock = step(call, spread, parameters)
    with npu_patch.scope(op):
        counts = Counts()
        with Seen() as seen:
            results = call(*spread)
        assert [r.placements for r in (results if isinstance(results, tuple) else (results,))] == kinds, what
        fused = step(call, spread, parameters)
        hits, reasons = counts.take(op)
        alone = step(*one(build(False), plain))  # type: ignore[call-arg]
    assert (hits, reasons) == ((2, {}) if reason is None else (0, {reason: 2})), f"{what}: {hits} hits, {reasons}"
    if reason is None:
        assert OPERATORS[op] in seen.operators, what
    for name, reference in (("the original", stock), ("one device", alone)):
        assert len(fused) == len(reference)
        for i, (ours, theirs) in enumerate(zip(fused, reference, strict=True)):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), what
            gap = float((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-9))
            assert gap <= tolerance, f"{what}: tensor {i} is {gap:.1e} from {name}"


def one(built: tuple[Callable[..., Any], Sequence[Any]], inputs: Sequence[Tensor]) -> tuple[Any, Any, Any]:
    call, parameters = built
    return call, inputs, parameters


NAMES = {"rms_norm": "rms_norm", "rope": "rotary_mul", "swiglu": "swiglu", "attention": "fusion_attention"}
OPERATORS = {op: f"npu.npu_{name}.default" for op, name in NAMES.items()}


class Seen(TorchDispatchMode):
    """The operators that Python calls; `simulator.trace` knows nothing of tensors that a collective still writes."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.add(str(function))
        return function(*args, **(kwargs or {}))


# ---- norms -----------------------------------------------------------------------------------------------------------


def norm_of(size: int, dtype: torch.dtype, eps: float | None = 1e-5, affine: bool = True) -> Callable[[bool], Any]:
    def build(distributed: bool) -> tuple[nn.Module, list[nn.Parameter]]:
        if CURRENT:
            from torchtitan.models.common.nn_modules import RMSNorm

            module = RMSNorm(RMSNorm.Config(normalized_shape=size, eps=eps, elementwise_affine=affine))
        else:
            import torchtitan.models.llama3.model.model  # noqa: F401

            module = nn.RMSNorm(size, eps=eps, elementwise_affine=affine)
        module = module.to("npu", dtype)
        if not affine:
            return module, []
        weight = draw(3, size, dtype=dtype)
        module.weight = nn.Parameter(distribute_tensor(weight, MESH, [EVERYWHERE]) if distributed else weight)
        return module, [module.weight]

    return build


def norms() -> None:
    x, heads = draw(1, 2, 6, 16), draw(2, 2, 6, 4, 16)
    for dtype in (torch.float32, torch.bfloat16):
        build = norm_of(16, dtype)
        check("tokens are spread", "rms_norm", build, [x.to(dtype)], [Shard(1)])
        check("samples are spread", "rms_norm", build, [x.to(dtype)], [Shard(0)])
        check("heads are spread", "rms_norm", build, [heads.to(dtype)], [Shard(2)])
        check("nothing is spread", "rms_norm", build, [x.to(dtype)], [EVERYWHERE])
    check("rows of different number", "rms_norm", norm_of(16, torch.float32), [draw(1, 2, 7, 16)], [Shard(1)])
    check("no epsilon", "rms_norm", norm_of(16, torch.float32, eps=None), [x], [Shard(1)])
    check("no weight", "rms_norm", norm_of(16, torch.float32, affine=False), [x], [Shard(1)])


def partial_sums() -> None:
    """Summands on every rank: the original adds them up first."""
    module, _ = norm_of(16, torch.float32)(True)
    x = DTensor.from_local(draw(5 + RANK, 2, 6, 16), MESH, [Partial()])
    expected = module(x).full_tensor()
    with npu_patch.scope("rms_norm"):
        counts = Counts()
        result = module(x).full_tensor()
        assert counts.take("rms_norm") == (0, {"a DTensor that is Partial": 1})
    torch.testing.assert_close(result, expected)


def gathered_just_now() -> None:
    """What a collective will have written is waited for."""
    module, parameters = norm_of(16, torch.float32)(True)
    x = distribute_tensor(draw(1, 2, 6, 16), MESH, [Shard(1)]).requires_grad_()

    def call(x: Any) -> Any:
        return module(x.redistribute(placements=[EVERYWHERE], async_op=True))

    expected = step(call, [x], parameters)
    with npu_patch.scope("rms_norm"):
        counts = Counts()
        result = step(call, [x], parameters)
        assert counts.take("rms_norm") == (1, {})
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def what_the_original_refuses() -> None:
    """Channels or weights in parts, and a DTensor beside a plain weight: the original runs, and says what it says."""
    parts = norm_of(16, torch.float32)(True)[0]
    parts.weight = nn.Parameter(distribute_tensor(draw(3, 16), MESH, [Shard(0)]))
    cases = {
        "a parameter or table that is spread": (parts, Shard(1)),
        "a DTensor whose rows are spread": (norm_of(16, torch.float32)(True)[0], Shard(2)),
        "DTensor beside a plain tensor": (norm_of(16, torch.float32)(False)[0], Shard(1)),
    }
    for reason, (module, placement) in cases.items():
        x = distribute_tensor(draw(1, 2, 6, 16), MESH, [placement])
        outcomes = []
        for op in ("rope", "rms_norm"):
            with npu_patch.scope(op):
                counts = Counts()
                try:
                    outcomes.append(str(module(x).full_tensor().sum()))
                except RuntimeError as error:
                    outcomes.append(str(error))
        assert counts.take("rms_norm") == (0, {reason: 1})
        assert outcomes[0] == outcomes[1]


# ---- rotary embeddings -----------------------------------------------------------------------------------------------


def rotations() -> None:
    from torchtitan.models.common import rope

    positions = torch.stack((torch.arange(6), torch.tensor([0, 1, 0, 1, 2, 3]))).npu()

    def build_of(cls: Any, where: Tensor | None, direct: bool = False) -> Callable[[bool], Any]:
        def build(distributed: bool) -> tuple[Callable[..., Any], list[Any]]:
            module = cls(cls.Config(dim=16, max_seq_len=24, theta=50.0)).npu()
            if distributed:
                module.cache = distribute_tensor(module.cache, MESH, [EVERYWHERE])
            if direct:
                index = torch.arange(6).npu()
                table = module.cache.to_local() if distributed else module.cache
                table = table[index][None, :, None]
                table = distribute_tensor(table, MESH, [EVERYWHERE]) if distributed else table
                return lambda q, k: cls.apply_rotary_emb(q, k, table), []
            return (lambda q, k: module(q, k, where)), []

        return build

    spread = "a DTensor whose rows are spread"
    for cls in (rope.ComplexRoPE, rope.CosSinRoPE):
        for dtype in (torch.float32, torch.bfloat16):
            q, k, latent = (draw(i, 2, 6, n, 16, dtype=dtype) for i, n in ((1, 4), (2, 2), (3, 1)))
            what = f"{cls.__name__}, {dtype}"
            for name, where in (("per sample", positions), ("one row", positions[1:]), ("none", None)):
                check(f"{what}: positions {name}", "rope", build_of(cls, where), [q, k], [Shard(2), Shard(2)])
            check(f"{what}: one key for all", "rope", build_of(cls, positions), [q, latent], [Shard(2), EVERYWHERE])
            check(f"{what}: a table", "rope", build_of(cls, None, True), [q, k], [Shard(2), Shard(2)])
        q, k = draw(1, 2, 6, 4, 16), draw(2, 2, 6, 2, 16)
        check(f"{cls.__name__}: tokens", "rope", build_of(cls, None, True), [q, k], [Shard(1), Shard(1)], spread)


def rotary_functions() -> None:
    for family, count in (("llama3", 2), ("qwen3", 2), ("deepseek_v3", 1)):
        module = __import__(f"torchtitan.models.{family}.model.model", fromlist=["_"])

        def build(
            distributed: bool, module: Any = module, family: str = family
        ) -> tuple[Callable[..., Any], list[Any]]:
            if family == "qwen3":
                cache = module.precompute_rope_cache(16, 24).npu()
            else:
                angles = torch.outer(torch.arange(24.0), torch.arange(8.0).add(1).reciprocal())
                cache = torch.polar(torch.ones_like(angles), angles).npu()
            cache = distribute_tensor(cache, MESH, [EVERYWHERE]) if distributed else cache
            return (lambda *x: module.apply_rotary_emb(*x, cache)), []

        for dtype in (torch.float32, torch.bfloat16):
            inputs = [draw(i, 2, 6, n, 16, dtype=dtype) for i, n in ((1, 4), (2, 2))][:count]
            check(f"{family}, {dtype}", "rope", build, inputs, [Shard(2)] * count)


# ---- attention -------------------------------------------------------------------------------------------------------


def attentions() -> None:
    """Of `scaled_dot_product_attention`, in the layout of each generation, with other heads for keys and values."""
    if CURRENT:
        from torchtitan.models.common.attention import ScaledDotProductAttention

        module, heads = ScaledDotProductAttention(ScaledDotProductAttention.Config()), 2
    else:
        from torchtitan.models.attention import ScaledDotProductAttentionWrapper

        module, heads = ScaledDotProductAttentionWrapper(), 1

    def draw_in(seed: int, number: int, size: int, dtype: torch.dtype) -> Tensor:
        x = draw(seed, 2, 6, number, size, dtype=dtype)
        return x if heads == 2 else x.transpose(1, 2).contiguous()

    def build_of(**options: Any) -> Callable[[bool], Any]:
        return lambda distributed: ((lambda q, k, v: module(q, k, v, **options)), [])

    shared, split = {"enable_gqa": True}, [Shard(heads)] * 3
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [draw_in(i, n, 16, dtype) for i, n in ((1, 4), (2, 2), (3, 2))]
        check(f"causal, {dtype}", "attention", build_of(**shared), inputs, split)
        check(f"full, scaled, {dtype}", "attention", build_of(**shared, is_causal=False, scale=0.3), inputs, split)
        check(f"whole, {dtype}", "attention", build_of(**shared), inputs, [EVERYWHERE] * 3)
    inputs = [draw_in(i, 4, 16, torch.float32) for i in (1, 2, 3)]
    reason = "a DTensor whose rows are spread"
    check("samples", "attention", build_of(), inputs, [Shard(0)] * 3, reason)
    inputs = [draw_in(i, 3, 16, torch.float32) for i in (1, 2, 3)]
    check("three heads", "attention", build_of(), inputs, split, "ranks with different numbers of heads")


# ---- feed-forwards ---------------------------------------------------------------------------------------------------


def feed_forwards() -> None:
    npu_patch.configure("swiglu", separate=True)
    for dtype in (torch.float32, torch.bfloat16):

        def build(distributed: bool, dtype: torch.dtype = dtype) -> tuple[nn.Module, list[nn.Parameter]]:
            if CURRENT:
                from torchtitan.models.common.feed_forward import FeedForward
                from torchtitan.models.common.linear import Linear

                def linear(a: int, b: int) -> Any:
                    return Linear.Config(in_features=a, out_features=b)

                config = FeedForward.Config(w1=linear(16, 32), w2=linear(32, 16), w3=linear(16, 32))
                module = FeedForward(config)
            else:
                from torchtitan.models.moe.moe import FeedForward

                module = FeedForward(16, 32)
            module = module.to("npu", dtype)
            with torch.no_grad():
                for i, parameter in enumerate(module.parameters()):
                    parameter.copy_(draw(20 + i, *parameter.shape) * 0.3)
            if distributed:
                columns = {"use_local_output": False, "input_layouts": EVERYWHERE}
                plan = {
                    "w1": ColwiseParallel(**columns),
                    "w3": ColwiseParallel(**columns),
                    "w2": RowwiseParallel(input_layouts=Shard(-1), output_layouts=EVERYWHERE, use_local_output=False),
                }
                parallelize_module(module, MESH, plan)
            return module, list(module.parameters())

        check(f"columns and rows, {dtype}", "swiglu", build, [draw(1, 2, 6, 16, dtype=dtype)], [EVERYWHERE])


def main() -> None:
    global MESH
    torch.npu.set_device(RANK)
    dist.init_process_group("hccl")
    MESH = init_device_mesh("npu", (2,), mesh_dim_names=("tp",))
    norms()
    partial_sums()
    gathered_just_now()
    what_the_original_refuses()
    rotations() if CURRENT else rotary_functions()
    attentions()
    feed_forwards()
    dist.barrier()
    print(f"rank {RANK} is done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
