"""Block masks that know what they mean to the fused operator."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from ...ops.attention import Mask
from .aside import aside
from .mask_meaning import HEAD, SAMPLE, MaskMod, Meaning, describe, one_for_all, reads, recognise

_BUILT = frozenset(BlockMask.__annotations__) - {"seq_lengths", "BLOCK_SIZE", "mask_mod"}


class DenseMaskError(ValueError):
    """A mask without a compact form is longer than the option `dense_mask_limit` of the op `attention` allows."""


@dataclass(eq=False)
class Source:
    """What a mask is made from.

    Args:
        mod: the mask_mod.
        batch, heads: as create_block_mask takes them; None and 1 are shared by all.
        lengths: (query length, key length).
        device: where written-out masks and block tensors go.
        options: the other arguments of create_block_mask.
        meaning: None where the mask has no compact form.
        blocks: block lists that hide and show too, for a mask that was not made from its mask_mod alone.
    """

    mod: MaskMod
    batch: int | None
    heads: int | None
    lengths: tuple[int, int]
    device: torch.device
    options: Mapping[str, Any] = field(default_factory=dict)
    meaning: Meaning | None = None
    blocks: Blocks | None = None

    def __post_init__(self) -> None:
        self.compact = self.meaning.compact() if self.meaning is not None else None
        self.bounds: tuple[Tensor, Tensor] | None = None
        self.answers: dict[Any, tuple[Any, ...]] = {}  # the adapter's, by shapes, types and devices
        self._dense: dict[tuple[int | None, int | None], Mask] = {}
        self._per_head: bool | None = None if self.meaning is None else False
        self._reads_sample: bool | None = None
        self._shared: dict[int, bool] = {}

    def prepare(self, limit: int) -> None:
        """Make now what would otherwise be made at the first attention, which torch.compile could not do.

        Raises:
            DenseMaskError: the mask has no compact form and is longer than the limit.
        """
        if self.batch in (None, 1):
            self._reads_sample = reads(self.mod, SAMPLE, self.device)
        if self.meaning is None:
            self.check_length(limit)
            if not self.per_head():
                self.dense(self.batch or 1, 1, limit)
        elif _Tracing.seen and self.compact is not None and self.compact.kind == "documents":
            lower, upper = (bound.int().to(self.device) for bound in (self.meaning.lower, self.meaning.upper))
            self.bounds = (lower, upper)

    def check_length(self, limit: int) -> None:
        """
        Raises:
            DenseMaskError: written out, the mask would be longer than the limit.
        """
        if max(self.lengths) > limit:
            raise DenseMaskError(
                f"the mask {describe(self.mod)} has no compact form, and written out for {max(self.lengths)} tokens "
                f"it is above dense_mask_limit={limit}; raise it with NPU_PATCH_OPS=attention:dense_mask_limit=... "
                f'or npu_patch.configure("attention", dense_mask_limit=...), or switch the op attention off'
            )

    def dense(self, batch: int, heads: int, limit: int) -> Mask | None:
        """The mask written out, once; None where torch.compile traces and it was not written out before.

        Args:
            batch: number of samples, for a mask_mod that tells samples apart although the mask has one.
            heads: number of query heads, for a mask_mod that tells heads apart although the mask has one head.
            limit: greatest length.

        Raises:
            DenseMaskError: the mask is longer than the limit.
        """
        self.check_length(limit)
        own_heads = self.heads
        if own_heads in (None, 1):
            own_heads = heads if self.per_head() else None
        own_batch = self.batch if self.shared(batch) else batch
        known = self._dense.get((own_batch, own_heads))
        if known is None and not is_compiling():
            with aside():
                seen = create_mask(self.mod, own_batch, own_heads, *self.lengths, device=self.device)
                if self.blocks is not None:
                    listed, full = self.blocks.pairs(self.lengths)
                    seen = (seen & listed) | full
                # What has a meaning lets every query see itself.
                may_hide_rows = self.meaning is None or own_batch != self.batch
                known = self._dense[own_batch, own_heads] = Mask.dense(~seen, may_hide_rows=may_hide_rows)
        return known

    def per_head(self) -> bool:
        """Whether the mod reads the head; flex attention evaluates it per head even for a mask of one head."""
        if self._per_head is None:
            self._per_head = reads(self.mod, HEAD, self.device)
        return self._per_head

    def shared(self, batch: int) -> bool:
        """Whether the mask holds for this many samples; flex attention evaluates the mod per sample even for one.

        Found out once per batch, on the host; while torch.compile traces only by whether the mod reads the sample.
        """
        if batch == (self.batch or 1):
            return True
        if is_compiling():
            return self._reads_sample is False
        known = self._shared.get(batch)
        if known is None:
            known = one_for_all(self.mod, self.meaning, batch, self.lengths, self.device)
            self._shared[batch] = known
        return known

    def traced(self) -> Mask | None:
        """Documents as tensor operators for a graph; None before the first mask that was made for graphs.

        Their ends as Python numbers would make torch.compile start anew at every step.
        """
        _note_tracing()
        if self.bounds is None:
            return None
        lower, upper = (bound.unsqueeze(1).unsqueeze(3) for bound in self.bounds)
        keys = torch.arange(self.lengths[1], device=lower.device, dtype=lower.dtype)
        return Mask.dense((keys < lower) | (keys > upper), may_hide_rows=False)


class _Tracing:
    """Whether torch.compile has ever traced an attention over documents."""

    seen = False


def _note_tracing() -> None:
    _Tracing.seen = True


# What torch.compiler.assume_constant_result sets, without importing torch._dynamo: torch.compile runs the function
# once, while it traces.
_note_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Blocks(NamedTuple):
    """The block lists of a block mask."""

    size: tuple[int, int]
    counts: Tensor
    columns: Tensor
    full_counts: Tensor | None
    full_columns: Tensor | None

    @classmethod
    def of(cls, mask: BlockMask) -> Blocks:
        return cls(mask.BLOCK_SIZE, mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)

    def pairs(self, lengths: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Which pairs lie in a listed block, and which in one where the mask_mod is not asked; (B, H, Q, KV) bool."""
        partial = _matrix(self.counts, self.columns)
        full = torch.zeros_like(partial)
        if self.full_counts is not None and self.full_columns is not None:
            full = _matrix(self.full_counts, self.full_columns)

        def expand(blocks: Tensor) -> Tensor:
            wide = blocks.repeat_interleave(self.size[0], -2).repeat_interleave(self.size[1], -1)
            return wide[..., : lengths[0], : lengths[1]]

        return expand(partial | full), expand(full)


def _matrix(counts: Tensor, columns: Tensor) -> Tensor:
    """From a list of block columns for every block row to a bool matrix."""
    width = columns.shape[-1]
    listed = torch.arange(width, device=columns.device) < counts.unsqueeze(-1)
    dense = torch.zeros(*columns.shape[:-1], width + 1, dtype=torch.bool, device=columns.device)
    target = torch.where(listed, columns.long(), width)  # entries past the count are undefined
    return dense.scatter_(-1, target, torch.ones_like(target, dtype=torch.bool))[..., :width]


class NpuBlockMask(BlockMask):
    """A `BlockMask` whose block tensors are made when somebody reads them.

    The fused operator needs none of them.  `source` says what the mask means; it is None where that was lost.
    """

    source: Source | None = None

    @classmethod
    def of(cls, source: Source, block_size: Any) -> NpuBlockMask:
        """A mask from its source.

        Args:
            source: what it is made from.
            block_size: as create_block_mask takes it.
        """
        mask = cls.__new__(cls)
        size = (block_size, block_size) if isinstance(block_size, int) else tuple(block_size)
        vars(mask).update(seq_lengths=source.lengths, BLOCK_SIZE=size, mask_mod=source.mod, source=source)
        return mask

    def __getattr__(self, name: str) -> Any:
        if name not in _BUILT or "kv_indices" in vars(self) or vars(self).get("source") is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        source = self.source
        assert source is not None
        size = self.BLOCK_SIZE
        with aside():
            built = create_block_mask(
                source.mod, source.batch, source.heads, *source.lengths, source.device, size, **source.options
            )
        for key, value in vars(built).items():
            vars(self).setdefault(key, value)
        return vars(self)[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "mask_mod":  # what the mask meant no longer counts
            vars(self)["source"] = None
        super().__setattr__(name, value)

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, Q, KV), without making the block tensors."""
        if self.source is None or "kv_indices" in vars(self):
            return super().shape
        return (self.source.batch or 1, self.source.heads or 1, *self.seq_lengths)

    def to(self, device: Any) -> BlockMask:
        """The mask on another device; it keeps its meaning."""
        if self.source is None:
            return super().to(device)
        device = torch.device(device)
        if device.type == "npu" and device.index is None:
            device = torch.device("npu", torch.npu.current_device())  # type: ignore[attr-defined]
        return NpuBlockMask.of(replace(self.source, device=device), self.BLOCK_SIZE)

    def __getitem__(self, index: Any) -> BlockMask:  # type: ignore[override]
        """Some of the samples keep their meaning; any other part is a plain block mask."""
        part = super().__getitem__(index)
        source = self.source
        if source is None or source.meaning is None or source.blocks is not None:
            return part
        batch = index[0] if isinstance(index, tuple) else index
        rest = index[1:] if isinstance(index, tuple) else ()
        if any(one != slice(None) for one in rest):
            return part
        rows = torch.arange(source.batch or 1, device="cpu")[[batch] if isinstance(batch, int) else batch]
        kept = NpuBlockMask.__new__(NpuBlockMask)
        vars(kept).update(vars(part))
        vars(kept)["source"] = replace(
            source,
            mod=part.mask_mod,
            batch=len(rows),
            meaning=source.meaning.select(rows),
            device=part.kv_indices.device,
        )
        return kept


_foreign: weakref.WeakKeyDictionary[BlockMask, tuple[Any, Source]] = weakref.WeakKeyDictionary()


def source_of(mask: BlockMask, batch: int, lengths: tuple[int, int], device: torch.device) -> Source | str:
    """What a block mask means for a call, or why that is not known.

    A mask that was not made here, or lost what was known of it, is evaluated once.
    """
    source = getattr(mask, "source", None) if isinstance(mask, NpuBlockMask) else None
    if source is not None:
        if source.lengths != lengths or (source.batch or 1) not in (1, batch):
            return "the block mask is for another shape"
        return source
    if is_compiling():
        return "a block mask of unknown meaning under torch.compile"
    if tuple(mask.seq_lengths) != lengths:
        return "the block mask is for another shape"
    if mask.kv_num_blocks.shape[0] not in (1, batch):
        return "the block mask is for another batch"
    key = (mask.mask_mod, batch, device)
    known = _foreign.get(mask)
    if known is not None and known[0] == key:
        return known[1]
    with aside():
        source = _foreign_source(mask, batch, lengths, device)
    if isinstance(source, Source):
        _foreign[mask] = (key, source)
    return source


def _foreign_source(mask: BlockMask, batch: int, lengths: tuple[int, int], device: torch.device) -> Source | str:
    if mask.kv_indices.dim() != 4:
        return "the block mask has no batch and head dimension"
    heads = mask.kv_indices.shape[1]
    meaning = None
    if lengths[0] == lengths[1] and heads == 1:
        meaning = recognise(mask.mask_mod, batch, lengths[0], device)
    if meaning is not None and not _adds_nothing(mask, meaning):
        meaning = None
    blocks = None if meaning is not None else Blocks.of(mask)
    source = Source(mask.mask_mod, batch, heads, lengths, device, {}, meaning, blocks)
    if meaning is None:
        try:  # whether it can be evaluated at all: the mod of a sliced mask cannot
            create_mask(mask.mask_mod, 1, 1, 1, 1, device=device)
        except Exception as error:
            return f"the mask_mod cannot be evaluated: {type(error).__name__}"
    return source


def _adds_nothing(mask: BlockMask, meaning: Meaning) -> bool:
    """Whether the lists of blocks hide nothing that the mask_mod shows, and show nothing that it hides."""
    length = meaning.lower.shape[1]
    listed, full = (blocks.to("cpu") for blocks in Blocks.of(mask).pairs((length, length)))
    keys = torch.arange(length, device="cpu")
    seen = (keys >= meaning.lower.unsqueeze(-1)) & (keys <= meaning.upper.unsqueeze(-1))
    seen = seen.unsqueeze(1)
    return bool((listed | ~seen).all()) and bool((~full | seen).all())
