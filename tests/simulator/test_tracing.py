"""The definitions of the trace, each checked against numbers counted by hand."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import nn

from npu_patch.simulator import trace

from .helpers import values

F32 = 4


def test_launches_bytes_and_saved_bytes_of_a_small_step() -> None:
    x, w = values(4, 8).npu(), nn.Parameter(values(8, 16).npu())
    with trace() as t:
        y = x @ w
        z = torch.nn.functional.silu(y)
        z.sum().backward()
    assert t.launches_by_op == {
        "matmul": 1,
        "silu": 1,
        "sum": 1,
        "ones_like": 1,
        "silu_backward": 1,
        "matmul_backward": 1,  # only the weight needs a gradient
    }
    assert t.launches == 6
    read = {name: op.bytes_read for name, op in t.ops.items()}
    written = {name: op.bytes_written for name, op in t.ops.items()}
    assert read == {
        "matmul": (4 * 8 + 8 * 16) * F32,
        "silu": 4 * 16 * F32,
        "sum": 4 * 16 * F32,
        "ones_like": F32,
        "silu_backward": (1 + 4 * 16) * F32,  # the gradient of a sum is one expanded element
        "matmul_backward": (4 * 16 + 4 * 8) * F32,
    }
    assert written == {
        "matmul": 4 * 16 * F32,
        "silu": 4 * 16 * F32,
        "sum": F32,
        "ones_like": F32,
        "silu_backward": 4 * 16 * F32,
        "matmul_backward": 8 * 16 * F32,
    }
    assert t.bytes_read == sum(read.values())
    assert t.bytes_written == sum(written.values())
    assert t.saved_bytes == (4 * 8 + 4 * 16) * F32  # x and y; w is a parameter
    assert t.host_syncs == 0


def test_matmul_backward_launches_once_per_gradient() -> None:
    x, w = values(4, 8).npu().requires_grad_(), nn.Parameter(values(8, 16).npu())
    with trace() as t:
        (x @ w).sum().backward()
    assert t.launches_by_op["matmul_backward"] == 2


def test_views_allocations_and_copies_that_copy_nothing_are_no_launches() -> None:
    a = values(4, 6).npu()
    with trace() as t:
        a.t()
        a.contiguous()
        a.view(24).unsqueeze(0).expand(3, 24)
        a[1:3]
        a.reshape(6, 4)
        a.detach()
        torch.empty_like(a)
        torch.empty(3, device="npu")
    assert t.launches == 0
    with trace() as t:
        a.t().contiguous()
        a.double()
    assert t.launches == 2


def test_an_expanded_dimension_is_read_once_and_an_input_used_twice_is_read_once() -> None:
    row = values(1, 6).npu()
    with trace() as t:
        row.expand(4, 6) + row.expand(4, 6)
    assert t.bytes_read == 6 * F32
    assert t.bytes_written == 24 * F32


def test_an_in_place_target_is_read_and_written_and_a_filled_one_only_written() -> None:
    a = values(4, 6).npu()
    with trace() as t:
        a.mul_(2)
    assert (t.bytes_read, t.bytes_written) == (24 * F32, 24 * F32)
    with trace() as t:
        a.zero_()
        a.fill_(1.0)
    assert (t.bytes_read, t.bytes_written) == (0, 48 * F32)


def test_an_out_argument_is_only_written_unless_it_is_an_operand_too() -> None:
    a, b, out = values(4, 6).npu(), values(4, 1).npu(), torch.empty(4, 6, device="npu")
    with trace() as t:
        torch.mul(a, b, out=out)
    assert (t.bytes_read, t.bytes_written) == ((24 + 4) * F32, 24 * F32)
    with trace() as t:
        torch.mul(a, b, out=a)
    assert (t.bytes_read, t.bytes_written) == ((24 + 4) * F32, 24 * F32)


def test_an_output_that_is_an_input_is_not_written() -> None:
    rows, order = values(4, 6).npu(), torch.tensor([3, 1, 2, 0], dtype=torch.int32).npu()
    with trace() as t:
        y, same = torch.ops.npu._npu_moe_token_unpermute(rows, order, torch.ones(2, 2).npu())
    assert same.data_ptr() == rows.data_ptr()
    assert t.ops["npu._npu_moe_token_unpermute"].bytes_written == y.numel() * F32


def test_gathers_read_what_they_write_and_the_indices() -> None:
    table, index = values(100, 8).npu(), torch.tensor([3, 5]).npu()
    with trace() as t:
        torch.nn.functional.embedding(index, table)
    assert (t.bytes_read, t.bytes_written) == (2 * 8 * F32 + 2 * 8, 2 * 8 * F32)


def test_host_syncs_by_kind() -> None:
    a = values(4, 6).npu()
    with trace() as t:
        a.sum().item()
        a.cpu()
        a.nonzero()
        (a > 0).tolist()
        a[a > 0]
        bool((a == a).all())
        torch.equal(a, a)
    assert t.host_syncs_by_op == {
        "_local_scalar_dense": 2,
        "copy to host": 2,
        "nonzero": 1,
        "index[bool]": 1,
        "equal": 1,
    }
    assert t.host_syncs == 7
    assert "_local_scalar_dense" not in t.launches_by_op


def test_copies_to_the_device_are_neither_launches_nor_syncs() -> None:
    host = values(4, 6)
    with trace() as t:
        host.npu()
    assert (t.launches, t.host_syncs, t.copies_to_device, t.bytes_to_device) == (0, 0, 1, 24 * F32)


def test_an_operator_composed_of_others_is_counted_as_those() -> None:
    x = values(16, 8, dtype=torch.bfloat16).npu().requires_grad_()
    w = values(2, 8, 8, dtype=torch.bfloat16).npu().requires_grad_()
    ends = torch.tensor([6, 16], dtype=torch.int32).npu()
    with trace() as t:
        out = torch._grouped_mm(x, w, offs=ends)
        (out * out).sum().backward()
    assert "_grouped_mm" not in t.launches_by_op
    assert t.launches_by_op["mm"] == 6  # one per group: forward and both gradients


def test_backward_runs_on_another_thread_and_is_counted() -> None:
    threads = set()
    x = values(4).npu().requires_grad_()
    y = x * 2
    y.register_hook(lambda g: threads.add(threading.get_ident()))
    with trace() as t:
        y.sum().backward()
    assert threads != {threading.get_ident()}
    assert t.launches_by_op["mul"] == 1


def test_fused_operators_are_counted_with_their_namespace() -> None:
    x, gamma = values(2, 8).npu().requires_grad_(), nn.Parameter(torch.ones(8).npu())
    with trace() as t:
        torch.ops.npu.npu_rms_norm(x, gamma)[0].sum().backward()
    assert t.launches_by_op["npu.npu_rms_norm"] == 1
    assert t.launches_by_op["npu.npu_rms_norm_backward"] == 1
    assert t.ops["npu.npu_rms_norm"].bytes_read == (16 + 8) * F32
    assert t.ops["npu.npu_rms_norm"].bytes_written == (16 + 2) * F32
    assert t.saved_bytes == (16 + 2) * F32  # x and rstd


def test_saved_parameters_are_left_out_also_as_views_and_as_plain_leaves_when_named() -> None:
    x, w, plain = values(4, 8).npu(), nn.Parameter(values(16, 8).npu()), values(8, 4).npu().requires_grad_()
    with trace() as t:
        torch.nn.functional.linear(x.requires_grad_(), w)
        x @ w[:2].t()
    assert t.saved_bytes == 32 * F32  # x once; w not
    with trace() as t:
        x @ plain
    assert t.saved_bytes == 64 * F32
    with trace(parameters=[plain]) as t:
        x @ plain
    assert t.saved_bytes == 32 * F32


def test_saved_tensors_are_not_kept_alive_by_the_trace() -> None:
    x = values(1 << 16).npu().requires_grad_()
    before = torch.npu.memory_allocated()
    with trace() as t:
        for _ in range(4):
            (x.exp() * 2).sum()
        assert torch.npu.memory_allocated() == before
    assert t.saved_bytes == 4 * (1 << 16) * F32  # one result of exp per round, although at one address
    assert t.peak_bytes < 4 * (1 << 16) * F32


def test_peak_bytes_is_above_the_start_and_nests() -> None:
    kept = torch.zeros(1 << 20, device="npu")
    size = kept.numel() * F32
    with trace() as outer:
        temporary = torch.zeros(1 << 20, device="npu")
        del temporary
        with trace() as inner:
            small = torch.zeros(1 << 10, device="npu")
            del small
        assert 0 <= inner.peak_bytes - (1 << 10) * F32 <= 512  # the allocator rounds
    assert 0 <= outer.peak_bytes - size <= 512


def test_a_trace_changes_no_result() -> None:
    def step() -> list[torch.Tensor]:
        torch.npu.manual_seed(0)
        x = values(4, 8).npu().requires_grad_()
        y = torch.nn.functional.dropout(torch.ops.npu.npu_swiglu(x), 0.5)
        y.pow(2).sum().backward()
        return [y, x.grad]

    plain = step()
    with trace():
        traced = step()
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))


def test_the_mode_ends_with_the_block_also_after_an_error() -> None:
    a = values(4).npu()
    with contextlib.suppress(ZeroDivisionError), trace() as t:
        _ = a + 1
        raise ZeroDivisionError
    _ = a + 1
    assert t.launches_by_op == {"add": 1}


def test_counts_are_available_as_plain_data() -> None:
    import json

    with trace() as t:
        _ = values(4).npu() + 1
    assert json.loads(json.dumps(t.to_dict()))["launches_by_op"] == {"add": 1}


def test_flex_attention_without_a_gradient_counts_as_what_it_is_composed_of(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import flex_attention as module

    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    query = torch.randn(1, 2, 16, 8, device="npu")
    expected = module.flex_attention(query, query, query)
    with trace() as counted:
        output = module.flex_attention(query, query, query)
    torch.testing.assert_close(output, expected)
    assert counted.launches_by_op["matmul"] == 2
