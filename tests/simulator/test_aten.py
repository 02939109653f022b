"""The device under ordinary PyTorch code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import npu_patch.simulator

from .helpers import assert_same_function, values

pytestmark = pytest.mark.usefixtures("simulated")


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: a @ b,
        lambda a, b: (a + b).relu() * b.sigmoid(),
        lambda a, b: F.layer_norm(a, (4,)) + b.softmax(-1),
        lambda a, b: torch.cat((a, b), 1).cumsum(0),
        lambda a, b: torch.einsum("ij,kj->ik", a, b),
        lambda a, b: F.linear(a, b) - a.t().contiguous(),
        lambda a, b: torch.where(a > 0, a, b).expand(3, 4, 4).sum(0),
        lambda a, b: a[[0, 2]][:, 1:] * b[torch.tensor([3, 1], device=b.device), 1:],
        lambda a, b: torch.logsumexp(a, 0) + b.std(1),
    ],
)
def test_ordinary_operators_and_their_gradients(function: Callable[..., Tensor]) -> None:
    assert_same_function(function, function, [values(4, 4), values(4, 4, seed=1)], tolerance=1e-5)


def test_in_place_and_out_write_the_tensor_itself() -> None:
    x = torch.arange(6.0).npu()
    view = x.view(2, 3)[:, 1]
    view.mul_(10)
    assert x.tolist() == [0, 10, 2, 3, 40, 5]
    out = torch.empty(0, device="npu")
    torch.add(x, 1, out=out)
    assert out.tolist() == [1, 11, 3, 4, 41, 6]
    torch.add(x, 1, out=x)
    assert x.tolist() == out.tolist()
    torch._foreach_mul_([x, out], 2.0)
    assert x.tolist() == out.tolist() == [2, 22, 6, 8, 82, 12]


def test_copies_between_host_and_device_and_between_dtypes_and_strides() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(x.t().npu().cpu(), x.t())
    assert torch.equal(x.npu().t().to(torch.int64).cpu(), x.t().long())
    y = torch.empty(3, 2, device="npu", dtype=torch.bfloat16)
    y.copy_(x.t(), non_blocking=True)
    assert torch.equal(y.float().cpu(), x.t())
    assert torch.equal(x.npu(0).to("npu:1").cpu(), x)


@pytest.mark.parametrize("operation", [torch.add, torch.mm, torch.maximum])
def test_a_cpu_tensor_beside_a_device_tensor_is_refused(operation: Callable[..., Tensor]) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        operation(torch.ones(2, 2).npu(), torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="same device"):
        operation(torch.ones(2, 2).npu(0), torch.ones(2, 2).npu(1))


def test_a_cpu_scalar_tensor_and_cpu_indices_are_accepted() -> None:
    x = torch.arange(3.0).npu()
    assert (x + torch.tensor(1.0)).tolist() == [1, 2, 3]
    assert x[torch.tensor([2, 0])].tolist() == [2, 0]


def test_integer_histc_is_computed_as_on_the_device() -> None:
    assert torch.histc(torch.tensor([0, 1, 1, 3]).npu(), bins=4, min=0, max=4).tolist() == [1, 2, 0, 1]


def test_one_hot_is_one_kernel() -> None:
    labels = torch.tensor([[0, 2], [1, 1]])
    with npu_patch.simulator.trace() as trace:
        ours = F.one_hot(labels.npu(), 3)
    assert torch.equal(ours.cpu(), F.one_hot(labels, 3))
    assert trace.launches_by_op == {"one_hot": 1}
    assert F.one_hot(labels.npu()).shape == (2, 2, 3)
    with pytest.raises(RuntimeError, match="smaller than num_classes"):
        F.one_hot(labels.npu(), 2)


def test_random_numbers_follow_the_seed_and_the_generator_state() -> None:
    torch.npu.manual_seed(5)
    first, second = torch.rand(8, device="npu"), torch.rand(8, device="npu")
    assert not torch.equal(first, second)
    torch.npu.manual_seed(5)
    assert torch.equal(torch.rand(8, device="npu"), first)
    state = torch.npu.get_rng_state()
    third = torch.randn(8, device="npu")
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.randn(8, device="npu"), third)
    assert torch.equal(torch.npu.get_rng_state().view(torch.int64)[:1], torch.tensor([5]))


def test_random_numbers_of_the_device_leave_those_of_the_cpu_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    torch.rand(4, device="npu")
    assert torch.equal(torch.rand(2), expected)


def test_fork_rng_and_a_generator_of_its_own() -> None:
    torch.npu.manual_seed(0)
    with torch.random.fork_rng(devices=[0], device_type="npu"):
        inside = torch.rand(4, device="npu")
    assert torch.equal(torch.rand(4, device="npu"), inside)
    make = lambda: torch.rand(4, device="npu", generator=torch.Generator(device="npu").manual_seed(3))  # noqa: E731
    assert torch.equal(make(), make())


def test_seeds_and_devices_give_unrelated_streams() -> None:
    streams = []
    for seed in (0, 1, 2):
        torch.npu.manual_seed(seed)
        streams += [torch.rand(64, device="npu"), torch.rand(64, device="npu")]
    assert len({tuple(s.tolist()) for s in streams}) == 6
    stacked = torch.stack([s.cpu() for s in streams])
    assert torch.corrcoef(stacked).triu(1).abs().max() < 0.5


def test_rejection_sampling_ends() -> None:
    x = nn.init.trunc_normal_(torch.empty(1000, device="npu"), std=1.0, a=-1.0, b=1.0)
    assert x.abs().max() <= 1
    assert 0.4 < x.std() < 0.7


def test_dropout_keeps_the_asked_share_and_scales() -> None:
    torch.npu.manual_seed(0)
    y = F.dropout(torch.ones(4000, device="npu"), 0.25)
    assert y.unique().tolist() == pytest.approx([0, 4 / 3])
    assert abs((y > 0).float().mean().item() - 0.75) < 0.03


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def train(device: str, optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> list[float]:
    net = model().to(device)
    step = optimizer(net.parameters(), lr=1e-2, **options)
    x = values(6, 8).to(device)
    losses = []
    for _ in range(4):
        loss = net(x).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        step.step()
        step.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_training_equals_the_cpu(options: dict[str, bool]) -> None:
    losses = train("npu", torch.optim.AdamW, **options)
    assert losses == pytest.approx(train("cpu", torch.optim.AdamW), rel=1e-6)
    assert losses[-1] < losses[0]


def test_autocast_casts_on_the_device() -> None:
    net = model().npu()
    x = values(6, 8).npu()
    with torch.autocast("npu", dtype=torch.bfloat16):
        y = net(x)
    assert y.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model()(x.cpu())
    assert torch.allclose(y.cpu().float(), expected.float(), atol=0.05)


def test_compiling_without_a_back_end_gives_the_same_values() -> None:
    def function(x: Tensor, gamma: Tensor) -> Tensor:
        return torch.ops.npu.npu_rms_norm(x, gamma, 1e-6)[0] * 2

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    x, gamma = values(2, 8).npu().requires_grad_(), values(8, seed=1).npu()
    eager = function(x, gamma)
    out = compiled(x, gamma)
    assert torch.equal(out, eager)
    (expected,) = torch.autograd.grad(eager.sum(), x)
    (found,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(found, expected)
    torch.compiler.reset()


def test_checkpointing_recomputes_the_same() -> None:
    from torch.utils.checkpoint import checkpoint

    x = values(2, 8).npu().requires_grad_()
    checkpoint(lambda t: torch.ops.npu.npu_swiglu(F.dropout(t, 0.5)).pow(2).sum(), x, use_reentrant=False).backward()
    kept = x.grad != 0
    assert kept.any()
    assert x.grad.isfinite().all()


def test_deepcopy_pickle_and_files_keep_device_and_values(tmp_path: Path) -> None:
    net = model().npu()
    assert torch.equal(copy.deepcopy(net)[0].weight, net[0].weight)
    torch.save(net.state_dict(), tmp_path / "weights.pt")
    loaded = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert loaded["0.weight"].device.type == "npu"
    assert torch.equal(loaded["0.weight"], net[0].weight)
    mapped = torch.load(tmp_path / "weights.pt", map_location="cpu", weights_only=True)
    assert mapped["0.weight"].device.type == "cpu"


def test_streams_events_and_pinned_memory() -> None:
    stream = torch.npu.Stream()
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    start.record()
    with torch.npu.stream(stream):
        x = torch.ones(4).pin_memory().to("npu", non_blocking=True) + 1
    torch.npu.current_stream().wait_stream(stream)
    end.record()
    torch.npu.synchronize()
    assert x.tolist() == [2, 2, 2, 2]
    assert start.elapsed_time(end) >= 0


def test_device_contexts_and_the_accelerator_interface() -> None:
    with torch.device("npu"):
        assert torch.zeros(2).device.type == "npu"
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.accelerator.device_count() == torch.npu.device_count()
    with torch.npu.device(1):
        assert torch.zeros(1, device="npu").device.index == 1


#: The allocator adds 32 bytes and rounds up to this.
BLOCK = 512


def test_memory_is_counted_and_runs_out() -> None:
    before = torch.npu.memory_allocated()
    x = torch.empty(1 << 20, device="npu")
    assert 0 <= torch.npu.memory_allocated() - before - x.numel() * 4 <= BLOCK
    del x
    assert torch.npu.memory_allocated() == before
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(100 << 30, dtype=torch.uint8, device="npu")
    assert (torch.ones(2, device="npu") + 1).tolist() == [2, 2]


def test_data_loader_workers_feed_the_device() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8.0).view(8, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1)
    total = sum(batch.npu().sum().item() for (batch,) in loader)
    assert total == 28
