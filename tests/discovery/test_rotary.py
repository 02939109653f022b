"""Rope functions are recognised by what they compute."""

from __future__ import annotations

import pytest
import torch

from npu_patch.discovery import NotRecognised, recognise_rotary


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotate_neighbours(x):
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def half(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def half_with_positions(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    return half(q, k, cos, sin, unsqueeze_dim)


def half_partial(q, k, cos, sin, unsqueeze_dim=1):
    width = cos.shape[-1]
    a, b = half(q[..., :width], k[..., :width], cos, sin, unsqueeze_dim)
    return torch.cat((a, q[..., width:]), -1), torch.cat((b, k[..., width:]), -1)


def half_in_float32(q, k, cos, sin, unsqueeze_dim=1):
    a, b = half(q.float(), k.float(), cos.float(), sin.float(), unsqueeze_dim)
    return a.to(q.dtype), b.to(k.dtype)


def interleaved(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_neighbours(q) * sin, k * cos + rotate_neighbours(k) * sin


def interleaved_from_half_tables(q, k, cos, sin, unsqueeze_dim=1):
    width = cos.shape[-1] // 2
    cos, sin = (t[..., :width].repeat_interleave(2, -1) for t in (cos, sin))
    return interleaved(q, k, cos, sin, unsqueeze_dim)


def interleaved_in_half_out(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = (t[..., : t.shape[-1] // 2].unsqueeze(unsqueeze_dim) for t in (cos, sin))

    def turn(x):
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    return turn(q), turn(k)


def half_width_tables(q, k, cos, sin, unsqueeze_dim=1):
    return half(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1), unsqueeze_dim)


def tokens_first(q, k, cos, sin):
    return half(q, k, cos, sin, -2)


def single(x, cos, sin, unsqueeze_dim=1):
    return half(x, x, cos, sin, unsqueeze_dim)[0]


@pytest.mark.parametrize(
    ("function", "mode", "table", "partial", "tensors"),
    [
        (half, "half", "given", False, 2),
        (half_with_positions, "half", "given", False, 2),
        (half_partial, "half", "given", True, 2),
        (half_in_float32, "half", "given", False, 2),
        (interleaved, "interleave", "given", False, 2),
        (interleaved_from_half_tables, "interleave", "first half repeated", False, 2),
        (interleaved_in_half_out, "deinterleave", "first half twice", False, 2),
        (half_width_tables, "half", "twice", False, 2),
        (tokens_first, "half", "given", False, 2),
        (single, "half", "given", False, 1),
    ],
)
def test_a_rotation_is_recognised(function, mode, table, partial, tensors):
    meaning = recognise_rotary(function)
    assert (meaning.mode, meaning.table, meaning.partial, meaning.tensors) == (mode, table, partial, tensors)


def test_the_dtype_of_the_result_is_the_functions_own():
    mixed = torch.bfloat16, torch.float32
    assert recognise_rotary(half).results[mixed] is torch.float32
    assert recognise_rotary(half_in_float32).results[mixed] is torch.bfloat16


def last_rows_for_the_query(q, k, cos, sin, unsqueeze_dim=1):
    return half(q, k, cos.flip(-2), sin.flip(-2), unsqueeze_dim)[0], half(q, k, cos, sin, unsqueeze_dim)[1]


def first_sample_for_all(q, k, cos, sin, unsqueeze_dim=1):
    return half(q, k, cos[:1], sin[:1], unsqueeze_dim)


def second_half_of_the_table(q, k, cos, sin, unsqueeze_dim=1):
    return half(q, k, cos.roll(6, -1), sin, unsqueeze_dim)


def key_only(q, k, cos, sin, unsqueeze_dim=1):
    return q * 1.0, half(q, k, cos, sin, unsqueeze_dim)[1]


def no_gradient(q, k, cos, sin, unsqueeze_dim=1):
    return half(q.detach(), k, cos, sin, unsqueeze_dim)


def in_place(q, k, cos, sin, unsqueeze_dim=1):
    cos.add_(0.0)
    return half(q, k, cos, sin, unsqueeze_dim)


def scaled(q, k, cos, sin, unsqueeze_dim=1):
    a, b = half(q, k, cos, sin, unsqueeze_dim)
    return a * 0.5, b


def other_result(q, k, cos, sin, unsqueeze_dim=1):
    return [*half(q, k, cos, sin, unsqueeze_dim)]


def three(q, k, v, cos, sin, position_ids):
    return q, k, v


def collects(q, k, *tables):
    return half(q, k, *tables)


def collects_keywords(q, k, cos, sin, **kwargs):
    return half(q, k, cos, sin)


@pytest.mark.parametrize(
    "function",
    [
        last_rows_for_the_query,
        first_sample_for_all,
        second_half_of_the_table,
        key_only,
        no_gradient,
        in_place,
        scaled,
        other_result,
        three,
        collects,
        collects_keywords,
        torch.nn.Identity(),
    ],
)
def test_what_computes_something_else_is_refused_with_a_reason(function):
    with pytest.raises(NotRecognised) as error:
        recognise_rotary(function)
    assert str(error.value)
    assert recognise_rotary(half).mode == "half"


def test_recognising_works_on_the_meta_device_and_without_gradient():
    with torch.device("meta"), torch.inference_mode():
        assert recognise_rotary(half).mode == "half"
