"""Rope functions that take other arguments than two tensors and tables of (B, S, D)."""

from __future__ import annotations

import torch

from .test_rotary import half, interleaved, rotate_half, rotate_neighbours


def rows(q, k, cos, sin):
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def last_tokens(q, k, cos, sin, **kwargs):
    before = q.shape[-2] - sin.shape[-2]
    rotated = rows(q[..., before:, :], k[..., before:, :], cos, sin)
    return tuple(torch.cat((x[..., :before, :], y), -2) for x, y in zip((q, k), rotated, strict=True))


def by_position(q, k, cos, sin, position_ids, unsqueeze_dim=1):
    return half(q, k, cos[position_ids], sin[position_ids], unsqueeze_dim)


def in_sections(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    pieces = ([part[i % 3] for i, part in enumerate(t.split(mrope_section * 2, -1))] for t in (cos, sin))
    return half(q, k, *(torch.cat(piece, -1) for piece in pieces), unsqueeze_dim)


def _turn(x, table):
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * table
    return torch.view_as_real(turned).flatten(3).type_as(x)


def complex_heads_first(q, k, freqs_cis):
    table = freqs_cis.unsqueeze(1)
    return _turn(q, table), _turn(k, table)


def complex_tokens_first(q, k, freqs_cis):
    table = freqs_cis[:, :, None, :]
    return _turn(q, table), _turn(k, table)


def complex_rows(q, k, freqs_ci):
    table = freqs_ci.view(1, q.shape[1], 1, q.shape[-1] // 2)
    return _turn(q, table), _turn(k, table)


def ready_tables(x, cos, sin):
    return x * cos[:, :, : x.shape[-2]] + rotate_half(x) * sin[:, :, : x.shape[-2]]


def ready_half_tables(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def sine_first(x, sin, cos):
    cos, sin = (t[:, :, None, :].repeat_interleave(2, -1) for t in (cos, sin))
    return x * cos + rotate_neighbours(x) * sin


def single_heads_first(x, cos, sin):
    return half(x, x, cos, sin)[0]


def single_with_positions(x, cos, sin, position_ids=None, unsqueeze_dim=1):
    return half(x, x, cos, sin, unsqueeze_dim)[0]


def of_angles(x, freqs):
    cos, sin = (t.unsqueeze(1).repeat(1, 1, 2).unsqueeze(0).float() for t in (freqs.cos(), freqs.sin()))
    return (x.float() * cos + rotate_half(x.float()) * sin).to(x.dtype)


def query_alone(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
    return half(q, q if k is None else k, cos, sin, unsqueeze_dim)[: 1 if k is None else 2]


def backwards(q, k, cos, sin, unsqueeze_dim=1):
    return half(q, k, cos, -sin, unsqueeze_dim)


def last_channels(x, cos, sin, unsqueeze_dim=1):
    cos, sin = (t.repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for t in (cos, sin))
    rest, turned = x[..., : x.shape[-1] - cos.shape[-1]], x[..., x.shape[-1] - cos.shape[-1] :]
    rotated = (turned.float() * cos + rotate_neighbours(turned).float() * sin).to(x.dtype)
    return torch.cat((rest, rotated), -1)


# ---- and what looks like one of them ---------------------------------------------------------------------------------


def in_float64(q, k, cos, sin, unsqueeze_dim=1):
    wide = half(q.double(), k.double(), cos.double(), sin.double(), unsqueeze_dim)
    return tuple(y.to(x.dtype) for y, x in zip(wide, (q, k), strict=True))


def sections_in_another_order(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    return in_sections(q, k, cos.flip(0), sin.flip(0), mrope_section, unsqueeze_dim)


def conjugated(q, k, freqs_cis):
    return complex_heads_first(q, k, freqs_cis.conj().abs())


def first_tokens(q, k, cos, sin, **kwargs):
    length = sin.shape[-2]
    rotated = rows(q[..., :length, :], k[..., :length, :], cos, sin)
    return tuple(torch.cat((y, x[..., length:, :]), -2) for x, y in zip((q, k), rotated, strict=True))


def positions_from_one(q, k, cos, sin, position_ids, unsqueeze_dim=1):
    return by_position(q, k, cos, sin, (position_ids + 1) % cos.shape[0], unsqueeze_dim)


def twice_the_angle(x, freqs):
    return of_angles(x, freqs * 2)


def interleaved_key(q, k, cos, sin, unsqueeze_dim=1):
    return half(q, k, cos, sin, unsqueeze_dim)[0], interleaved(q, k, cos, sin, unsqueeze_dim)[1]


IMPOSTORS = (
    in_float64,
    sections_in_another_order,
    conjugated,
    first_tokens,
    positions_from_one,
    twice_the_angle,
    interleaved_key,
)
