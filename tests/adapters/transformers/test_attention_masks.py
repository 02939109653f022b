"""What is remembered of the masks that transformers builds, and what is not."""

from __future__ import annotations

import gc
import inspect
import types
from typing import Any

import pytest
import torch

import npu_patch
import npu_patch.simulator
from npu_patch.adapters.transformers import mask_functions, masks

from . import tiny
from .call import create_mask, takes_positions

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
    mask = create_mask(builders.create_sliding_window_causal_mask, config(implementation), embeddings(), None, None)
    assert (meaning(mask).kind, meaning(mask).window) == ("band", WINDOW)
    assert masks.is_hard(mask)


def test_an_eager_causal_mask_is_causal(builders):
    mask = create_mask(builders.create_causal_mask, config("eager"), embeddings(), None, None)
    assert (meaning(mask).kind, meaning(mask).alignment) == ("causal", "lower_right")


@pytest.mark.parametrize("windowed", [False, True])
def test_packed_positions_are_documents_of_every_sample(builders, windowed):
    build = builders.create_sliding_window_causal_mask if windowed else builders.create_causal_mask
    mask = create_mask(build, config(), embeddings(), None, None, packed([3, 5], [8]))
    found = meaning(mask)
    assert (found.kind, found.q_ends, found.window) == ("documents", (3, 8, 16), WINDOW if windowed else None)


def test_positions_shared_by_the_batch_are_read_once_for_all_masks(builders):
    positions = packed([3, 5])
    with npu_patch.simulator.trace() as trace:
        full = create_mask(builders.create_causal_mask, config(), embeddings(), None, None, positions)
        window = create_mask(builders.create_sliding_window_causal_mask, config(), embeddings(), None, None, positions)
    # `create_mask` makes the indices of the queries anew for each; a model makes them once.
    assert trace.host_syncs == (3 if takes_positions(builders.create_causal_mask) else 1)
    assert meaning(full).q_ends == meaning(window).q_ends == (3, 8, 11, 16)


def test_positions_that_a_model_makes_of_its_indices_are_read_once(builders):
    if not takes_positions(builders.create_causal_mask):
        pytest.skip("the builders of this transformers take no indices")
    indices = torch.arange(8, device="npu")
    with npu_patch.simulator.trace() as trace:
        given = (embeddings(), None, indices, None, indices.unsqueeze(0))
        full = builders.create_causal_mask(config(), *given)
        window = builders.create_sliding_window_causal_mask(config(), *given)
    assert trace.host_syncs == 1
    assert meaning(full).kind == "causal"
    assert (meaning(window).kind, meaning(window).window) == ("band", WINDOW)


@pytest.mark.parametrize("indices", [[0, 1, 2, 4], [3, 2, 1, 0], [1, 2, 3, 4]])
def test_indices_that_are_not_those_of_all_keys_in_order_have_no_compact_form(builders, indices):
    if not takes_positions(builders.create_causal_mask):
        pytest.skip("the builders of this transformers take no indices")
    given = torch.tensor(indices, device="npu")
    mask = builders.create_causal_mask(config("eager"), embeddings(4), None, given, None)
    assert meaning(mask) is None
    assert masks.is_hard(mask)


def test_positions_that_change_in_place_are_read_again(builders):
    positions = packed([3, 5], [3, 5])
    before = create_mask(builders.create_causal_mask, config(), embeddings(), None, None, positions)
    positions.copy_(packed([2, 6], [6, 2]))
    after = create_mask(builders.create_causal_mask, config(), embeddings(), None, None, positions)
    assert meaning(before).q_ends == (3, 8, 11, 16)
    assert meaning(after).q_ends == (2, 8, 14, 16)


@pytest.mark.parametrize("hidden", [0, 7])
def test_padding_has_no_compact_form(builders, hidden):
    padding = torch.ones(2, 8, dtype=torch.long)
    padding[1, hidden] = 0
    padding = padding.to("npu")
    full = create_mask(builders.create_causal_mask, config(), embeddings(), padding, None)
    window = create_mask(builders.create_sliding_window_causal_mask, config(), embeddings(), padding, None)
    assert meaning(full) is None
    assert meaning(window) is None


def test_padding_that_was_seen_to_hide_nothing_leaves_the_band(builders):
    padding = torch.ones(2, 8, dtype=torch.long, device="npu")
    unknown = create_mask(builders.create_sliding_window_causal_mask, config(), embeddings(), padding, None)
    assert (
        create_mask(builders.create_causal_mask, config(), embeddings(), padding, None) is None
    )  # transformers looked
    with npu_patch.simulator.trace() as trace:
        known = create_mask(builders.create_sliding_window_causal_mask, config(), embeddings(), padding, None)
    assert trace.host_syncs == takes_positions(builders.create_causal_mask)  # once a step, for all layers
    assert meaning(unknown) is None
    assert meaning(known).kind == "band"
    padding[1, 0] = 0
    assert (
        meaning(create_mask(builders.create_sliding_window_causal_mask, config(), embeddings(), padding, None)) is None
    )


def test_chunks_custom_functions_and_blocks_are_not_taken_for_something_else(builders):
    chunked = create_mask(builders.create_chunked_causal_mask, config(), embeddings(), None, None)
    both = create_mask(
        builders.create_causal_mask,
        config(),
        embeddings(),
        or_mask_function=lambda b, h, q, kv: (q < 2) & (kv < 2),
    )
    assert meaning(chunked) is None
    assert meaning(both) is None
    if "block_sequence_ids" not in inspect.signature(builders.create_causal_mask).parameters:
        return
    blocks = torch.tensor([[-1, 0, 0, 0, -1, -1, -1, -1]] * 2).to("npu")
    images = create_mask(builders.create_causal_mask, config(), embeddings(), None, None, block_sequence_ids=blocks)
    assert meaning(images) is None


def test_a_function_of_single_indices_is_asked_for_single_indices(builders):
    build = builders.create_causal_mask
    near = create_mask(build, config(), embeddings(), and_mask_function=lambda b, h, q, kv: (q - kv).abs().max() < 3)
    assert (meaning(near).kind, meaning(near).window) == ("band", 3)
    both = create_mask(build, config(), embeddings(), or_mask_function=lambda b, h, q, kv: (q - kv).abs().max() < 2)
    assert meaning(both) is None


def test_a_mask_that_is_written_to_or_cut_means_nothing(builders):
    mask = create_mask(builders.create_sliding_window_causal_mask, config("eager"), embeddings(), None, None)
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
    mask = create_mask(builders.create_causal_mask, config("eager"), embeddings(1), None, cache)
    with npu_patch.simulator.trace() as trace:
        window = create_mask(builders.create_sliding_window_causal_mask, config("eager"), embeddings(1), None, cache)
    assert trace.host_syncs == 0
    if takes_positions(builders.create_causal_mask):  # which position it is would have to be waited for
        assert meaning(mask) is meaning(window) is None
        return
    assert meaning(mask).kind == kind
    assert (meaning(window).kind, meaning(window).window) == (("band", WINDOW) if seen >= WINDOW else (kind, None))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_an_empty_static_cache_is_causal_from_the_first_key(builders, implementation):
    cache = types.SimpleNamespace(
        get_query_offset=lambda layer: 0, get_mask_sizes=lambda q_len, layer: (12, 0), is_compileable=True
    )
    mask = create_mask(builders.create_causal_mask, config(implementation), embeddings(4), None, cache)
    if mask is None:  # left out, which says the same
        assert implementation == "sdpa"
        return
    assert (meaning(mask).kind, meaning(mask).alignment) == ("causal", "upper_left")


def test_several_queries_over_a_cache(builders):
    cache = types.SimpleNamespace(
        get_query_offset=lambda layer: 5, get_mask_sizes=lambda q_len, layer: (8, 0), is_compileable=False
    )
    mask = create_mask(builders.create_causal_mask, config("eager"), embeddings(3), None, cache)
    assert (meaning(mask).kind, meaning(mask).alignment) == ("causal", "lower_right")
    window = create_mask(builders.create_sliding_window_causal_mask, config("eager"), embeddings(3), None, cache)
    assert (meaning(window).kind, meaning(window).window) == ("band", WINDOW)


def test_a_static_caches_tensor_offset_is_left_alone(builders):
    if takes_positions(builders.create_causal_mask):
        pytest.skip("the builders of this transformers take no offset")
    cache = types.SimpleNamespace(
        get_query_offset=lambda layer: torch.tensor(3, device="npu"),
        get_mask_sizes=lambda q_len, layer: (12, 0),
        is_compileable=True,
    )
    with npu_patch.simulator.trace() as trace:
        mask = create_mask(builders.create_causal_mask, config("eager"), embeddings(2), None, cache)
    assert trace.host_syncs == 0
    assert meaning(mask) is None


@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
def test_the_number_of_waits_does_not_depend_on_the_number_of_layers(builders, kind):
    ids, found = tiny.tokens(), []
    for layers in (1, 4):
        model, given = tiny.any_model("llama", num_hidden_layers=layers), {}
        if kind == "padded":
            given["attention_mask"] = (ids != ids[0, 0]).long()
        if kind == "packed":
            given["position_ids"] = packed([8, 12], [20])
        before = npu_patch.status().hits("attention")
        with npu_patch.simulator.trace() as trace:
            model(input_ids=ids, use_cache=False, **given)
        assert npu_patch.status().hits("attention") - before == layers
        found.append(trace.host_syncs)
    assert found[0] == found[1] <= 2


def test_nothing_is_remembered_of_tensors_that_are_gone(builders):
    for length in range(4, 40):
        create_mask(builders.create_causal_mask, config(), embeddings(length), None, None, packed([2, length - 2]))
    gc.collect()
    stores = (masks._built, masks._packed, masks._all_seen, mask_functions.on_host, mask_functions._computed)
    assert sum(len(store) for store in stores) == 0


def test_on_the_cpu_everything_is_the_originals(builders):
    positions = packed([3, 5], [8]).cpu()
    mask = create_mask(
        builders.create_sliding_window_causal_mask, config(), torch.empty(2, 8, 4), None, None, positions
    )
    ours = mask.clone()
    npu_patch.disable()
    theirs = create_mask(
        builders.create_sliding_window_causal_mask, config(), torch.empty(2, 8, 4), None, None, positions
    )
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
