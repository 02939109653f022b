"""What is remembered of the masks that transformers builds, and what is not."""

from __future__ import annotations

import gc
import types
from typing import Any

import pytest
import torch

import npu_patch
import npu_patch.simulator
from npu_patch.adapters.transformers import masks

WINDOW = 4


@pytest.fixture(autouse=True)
def builders():
    import transformers.modeling_utils  # noqa: F401
    from transformers import masking_utils

    with npu_patch.scope("attention"):
        yield masking_utils


def config(implementation: str = "sdpa", **changes: Any) -> Any:
    return types.SimpleNamespace(
        _attn_implementation=implementation, sliding_window=WINDOW, attention_chunk_size=3, is_causal=True, **changes
    )


def embeddings(length: int = 8, batch: int = 2) -> torch.Tensor:
    return torch.empty(batch, length, 4, device="npu")


def meaning(mask: torch.Tensor) -> Any:
    batch, _, q_len, kv_len = mask.shape
    return masks.known(
        mask, torch.empty(batch, 2, q_len, 4, device="npu"), torch.empty(batch, 2, kv_len, 4, device="npu")
    )


def packed(*rows: list[int]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows]).to("npu")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_window_without_padding_is_a_band(builders, implementation):
    mask = builders.create_sliding_window_causal_mask(config(implementation), embeddings(), None, None)
    assert (meaning(mask).kind, meaning(mask).window) == ("band", WINDOW)
    assert masks.is_hard(mask)


def test_an_eager_causal_mask_is_causal(builders):
    mask = builders.create_causal_mask(config("eager"), embeddings(), None, None)
    assert (meaning(mask).kind, meaning(mask).alignment) == ("causal", "lower_right")


@pytest.mark.parametrize("windowed", [False, True])
def test_packed_positions_are_documents_of_every_sample(builders, windowed):
    build = builders.create_sliding_window_causal_mask if windowed else builders.create_causal_mask
    mask = build(config(), embeddings(), None, None, packed([3, 5], [8]))
    found = meaning(mask)
    assert (found.kind, found.q_ends, found.window) == ("documents", (3, 8, 16), WINDOW if windowed else None)


def test_positions_shared_by_the_batch_are_read_once_for_all_masks(builders):
    positions = packed([3, 5])
    with npu_patch.simulator.trace() as trace:
        full = builders.create_causal_mask(config(), embeddings(), None, None, positions)
        window = builders.create_sliding_window_causal_mask(config(), embeddings(), None, None, positions)
    assert trace.host_syncs == 1
    assert meaning(full).q_ends == meaning(window).q_ends == (3, 8, 11, 16)


def test_positions_that_change_in_place_are_read_again(builders):
    positions = packed([3, 5], [3, 5])
    before = builders.create_causal_mask(config(), embeddings(), None, None, positions)
    positions.copy_(packed([2, 6], [6, 2]))
    after = builders.create_causal_mask(config(), embeddings(), None, None, positions)
    assert meaning(before).q_ends == (3, 8, 11, 16)
    assert meaning(after).q_ends == (2, 8, 14, 16)


@pytest.mark.parametrize("hidden", [0, 7])
def test_padding_has_no_compact_form(builders, hidden):
    padding = torch.ones(2, 8, dtype=torch.long)
    padding[1, hidden] = 0
    padding = padding.to("npu")
    full = builders.create_causal_mask(config(), embeddings(), padding, None)
    window = builders.create_sliding_window_causal_mask(config(), embeddings(), padding, None)
    assert meaning(full) is None
    assert meaning(window) is None


def test_padding_that_was_seen_to_hide_nothing_leaves_the_band(builders):
    padding = torch.ones(2, 8, dtype=torch.long, device="npu")
    unknown = builders.create_sliding_window_causal_mask(config(), embeddings(), padding, None)
    assert builders.create_causal_mask(config(), embeddings(), padding, None) is None  # transformers looked
    with npu_patch.simulator.trace() as trace:
        known = builders.create_sliding_window_causal_mask(config(), embeddings(), padding, None)
    assert trace.host_syncs == 0
    assert meaning(unknown) is None
    assert meaning(known).kind == "band"
    padding[1, 0] = 0
    assert meaning(builders.create_sliding_window_causal_mask(config(), embeddings(), padding, None)) is None


def test_chunks_custom_functions_and_blocks_are_not_taken_for_something_else(builders):
    chunked = builders.create_chunked_causal_mask(config(), embeddings(), None, None)
    both = builders.create_causal_mask(
        config(), embeddings(), None, None, or_mask_function=lambda b, h, q, kv: (q < 2) & (kv < 2)
    )
    blocks = torch.tensor([[-1, 0, 0, 0, -1, -1, -1, -1]] * 2).to("npu")
    images = builders.create_causal_mask(config(), embeddings(), None, None, block_sequence_ids=blocks)
    assert [meaning(mask) for mask in (chunked, both, images)] == [None] * 3


def test_a_mask_that_is_written_to_or_cut_means_nothing(builders):
    mask = builders.create_sliding_window_causal_mask(config("eager"), embeddings(), None, None)
    assert meaning(mask[:, :, :, :6]) is None
    assert meaning(mask.clone()) is None
    assert masks.known(mask, embeddings(8, 3).unsqueeze(1), embeddings(8, 3).unsqueeze(1)) is None
    mask[0, 0, 0, 0] = -1.0
    assert meaning(mask) is None
    assert not masks.is_hard(mask)


@pytest.mark.parametrize(("seen", "kind"), [(3, "full"), (20, "full")])
def test_one_query_over_a_cache(builders, seen, kind):
    cache = types.SimpleNamespace(
        get_query_offset=lambda layer: seen, get_mask_sizes=lambda q_len, layer: (seen + 1, 0), is_compileable=False
    )
    mask = builders.create_causal_mask(config("eager"), embeddings(1), None, cache)
    assert meaning(mask).kind == kind
    window = builders.create_sliding_window_causal_mask(config("eager"), embeddings(1), None, cache)
    assert (meaning(window).kind, meaning(window).window) == (("band", WINDOW) if seen >= WINDOW else (kind, None))


def test_a_static_caches_tensor_offset_is_left_alone(builders):
    cache = types.SimpleNamespace(
        get_query_offset=lambda layer: torch.tensor(3, device="npu"),
        get_mask_sizes=lambda q_len, layer: (12, 0),
        is_compileable=True,
    )
    with npu_patch.simulator.trace() as trace:
        mask = builders.create_causal_mask(config("eager"), embeddings(2), None, cache)
    assert trace.host_syncs == 0
    assert meaning(mask) is None


def test_nothing_is_remembered_of_tensors_that_are_gone(builders):
    for length in range(4, 40):
        builders.create_causal_mask(config(), embeddings(length), None, None, packed([2, length - 2]))
    gc.collect()
    stores = (masks._built, masks._on_host, masks._packed, masks._all_seen)
    assert sum(len(store) for store in stores) == 0


def test_on_the_cpu_everything_is_the_originals(builders):
    positions = packed([3, 5], [8]).cpu()
    mask = builders.create_sliding_window_causal_mask(config(), torch.empty(2, 8, 4), None, None, positions)
    ours = mask.clone()
    npu_patch.disable()
    theirs = builders.create_sliding_window_causal_mask(config(), torch.empty(2, 8, 4), None, None, positions)
    assert torch.equal(ours, theirs)
    assert not masks.is_hard(mask)


def test_every_name_is_the_original_again_after_the_scope():
    from transformers import masking_utils
    from transformers.models.llama import modeling_llama

    inside = masking_utils.create_causal_mask
    assert modeling_llama.create_causal_mask is inside
    npu_patch.disable("attention")
    with npu_patch.scope(attention=False):
        assert masking_utils.create_causal_mask is not inside
        assert modeling_llama.create_causal_mask is masking_utils.create_causal_mask
        assert type(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping["sdpa"] is masking_utils.sdpa_mask
