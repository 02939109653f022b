"""What a mask shows, read from a written-out one."""

from __future__ import annotations

import pytest
import torch

from npu_patch.ops import mask_meaning
from npu_patch.ops.mask_meaning import Look, Meaning, read, shows


def looking_at(mask: torch.Tensor) -> Look:
    """Of (B, L, L), or (B, H, L, L) where the heads differ."""

    def look(b: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, head: torch.Tensor | int = 0) -> torch.Tensor:
        if mask.dim() == 3:
            sample, query, key, _ = torch.broadcast_tensors(b, q, kv, torch.as_tensor(head))
            return mask[sample, query, key]
        return mask[b, head, q, kv]

    return look


def causal(length: int, batch: int = 1) -> torch.Tensor:
    return torch.ones(batch, length, length, dtype=torch.bool).tril()


def changed(mask: torch.Tensor, query: int, key: int) -> torch.Tensor:
    mask = mask.clone()
    mask[0, query, key] ^= True
    return mask


def blocks(*lengths: int) -> torch.Tensor:
    return torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool().unsqueeze(0)


FORMS = {
    "causal": (causal(8), "causal"),
    "full": (torch.ones(1, 8, 8, dtype=torch.bool), "full"),
    "a window": (causal(8).triu(-2), "band"),
    "a window of one": (torch.eye(8, dtype=torch.bool).unsqueeze(0), "band"),
    "documents": (blocks(3, 5), "documents"),
    "causal documents": (blocks(3, 5).tril(), "documents"),
    "one token": (causal(1), "causal"),
    "samples that differ": (torch.cat((blocks(3, 5).tril(), causal(8))), "documents"),
}


@pytest.mark.parametrize("pairs", [1 << 22, 0])
@pytest.mark.parametrize("name", FORMS)
def test_what_has_a_form_is_read(name: str, pairs: int) -> None:
    mask, kind = FORMS[name]
    meaning = read(looking_at(mask), len(mask), mask.shape[-1], pairs=pairs)
    assert meaning is not None
    assert meaning.compact().kind == kind
    keys = torch.arange(mask.shape[-1])
    assert torch.equal((keys >= meaning.lower[..., None]) & (keys <= meaning.upper[..., None]), mask)


OTHERS = {
    "a token that does not see itself": changed(causal(8), 4, 4),
    "one later key": changed(causal(8), 4, 5),
    "one earlier key": changed(blocks(3, 5), 5, 4),
    "a hole": changed(causal(8), 7, 3),
    "a hole in a window": changed(causal(8).triu(-4), 7, 5),
    "a hole in another row": changed(causal(8), 5, 2),
    "a longer window in one row": changed(causal(8).triu(-2), 5, 2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_has_none_is_not(name: str) -> None:
    assert read(looking_at(OTHERS[name]), 1, 8) is None


def test_heads_that_differ_have_no_form() -> None:
    heads = torch.stack((causal(8), causal(8).triu(-2)), 1)
    assert read(looking_at(heads), 1, 8, heads=2) is None
    assert read(looking_at(heads), 1, 8, heads=1) is not None


def test_of_long_masks_every_edge_and_some_whole_rows_and_columns_are_looked_at() -> None:
    length = 64
    mask = causal(length)
    meaning = read(looking_at(mask), 1, length)
    assert isinstance(meaning, Meaning)
    lines = mask_meaning._sample(meaning.starts, 8).tolist()
    query, key = next((q, k) for q in range(40, 60) for k in range(5, 20) if not {q, q + 1, k} & set(lines))
    assert shows(looking_at(mask), meaning, pairs=0)
    assert not shows(looking_at(changed(mask, query, query + 1)), meaning, pairs=0)  # an edge
    assert not shows(looking_at(changed(mask, length - 1, key)), meaning, pairs=0)  # a row
    assert not shows(looking_at(changed(mask, query, 1)), meaning, pairs=0)  # a column
    hole = looking_at(changed(mask, query, key))
    assert shows(hole, meaning, pairs=0)
    assert not shows(hole, meaning, pairs=length * length)
