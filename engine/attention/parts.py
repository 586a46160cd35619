"""Attention of a step whose spans are computed in different ways, and the tensors that describe spans."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.batch import Span, StepBatch
from engine.cache.computing import EXPANDED_BYTES
from engine.cache.kv_cache import KVCache
from models.reference.attention import Attention

Kind = TypeVar("Kind", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Parts:
    """Computes the tokens of each part with the part's own attention."""

    parts: list[tuple[slice, Attention]]

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `models.reference.attention.Attention`."""
        if len(self.parts) == 1:
            return self.parts[0][1](layer_index, q, k, v)
        return torch.cat([attend(layer_index, q[at], k[at], v[at]) for at, attend in self.parts])


def expands(cache: KVCache, span: Span) -> bool:
    """Return whether a span may read all its rows as plain numbers. Beyond that, kernels decode tile by tile."""
    if not cache.row.is_quantized:
        return True
    rows = span.stop - cache.first_seen(span.start)
    numbers = 2 * rows * max(row.heads * row.dim for row in cache.rows)
    return numbers * cache.dtype.itemsize <= EXPANDED_BYTES


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the rows of a span lie in the parts of a group."""

    first: int
    """The first row that is read."""
    read: slice | Tensor
    """The slots of the rows, if they are one run; else int64 [blocks], the blocks to be gathered."""
    write: slice | Tensor


class SpanRows:
    """The rows of one span and those before it: a view if they are one run of slots, else gathered by block.

    Rows that the window of the layer's group has released are left out.
    """

    def __init__(self, cache: KVCache, span: Span) -> None:
        self._cache = cache
        self._span = span
        self._places: dict[int, _Places] = {}

    def write(self, layer_index: int, k: Tensor, v: Tensor) -> None:
        """Write K and V of the span itself, [count, Hkv, D] each; without heads, nothing."""
        if k.shape[1]:
            self._cache.write(layer_index, self._at(layer_index).write, k, v)

    def read(self, layer_index: int, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Return K and V, [rows, Hkv, D] each, up to the span's last row, from the first row that any of it sees in
        the `window`, rounded down to a block."""
        cache, at, blocks = self._cache, self._at(layer_index), 0
        if window is not None:
            blocks = max(self._span.start - (window - 1) - at.first, 0) // cache.block_size
        k, v = (self._rows(layer_index, rows[layer_index], at, blocks) for rows in (cache.k, cache.v))
        return k, v

    def kept(self, layer_index: int) -> Tensor:
        """Return what a layer without V keeps of all rows up to the span's last, [rows, numbers]."""
        return self._rows(layer_index, self._cache.k[layer_index], self._at(layer_index), 0).flatten(1)

    def _rows(self, layer: int, slots: Tensor, at: _Places, skipped: int) -> Tensor:
        size = self._cache.block_size
        if isinstance(at.read, slice):
            return self._cache.read(layer, slots[at.read][skipped * size :])
        pages = slots.view(-1, size, *slots.shape[1:])
        rows = self._span.stop - at.first - skipped * size
        return self._cache.read(layer, pages.index_select(0, at.read[skipped:]).flatten(0, 1)[:rows])

    def _at(self, layer: int) -> _Places:
        group = self._cache.groups[layer]
        if group not in self._places:  # the same in all layers of the group
            self._places[group] = self._look_up(group)
        return self._places[group]

    def _look_up(self, group: int) -> _Places:
        cache, span = self._cache, self._span
        first = cache.first_seen(span.start, group)
        runs = cache.slots(span.blocks, first, span.stop, group)
        if len(runs) == 1:
            return _Places(first, slice(*runs[0]), slice(runs[0][1] - span.count, runs[0][1]))
        size = cache.block_size
        blocks = cache.table(span.blocks[first // size : -(-span.stop // size)], group)
        read = torch.tensor(blocks).to(cache.device, non_blocking=True)
        return _Places(first, read, span_slots(cache, (span,), group))


class WriteSpans:
    """An `engine.attention.Write` for the rows of spans; without heads, it writes nothing."""

    def __init__(self, cache: KVCache, spans: tuple[Span, ...]) -> None:
        self._cache = cache
        self._slots = [span_slots(cache, spans, group) for group in cache.every_group]

    def __call__(self, layer_index: int, k: Tensor, v: Tensor) -> None:
        if k.shape[1]:
            self._cache.write(layer_index, self._slots[self._cache.groups[layer_index]], k, v)


def cache_args(cache: KVCache, layer_index: int) -> dict[str, Any]:
    """Return the arguments that describe the cache of a layer to kernels that attend over block tables."""
    return {
        "keys": cache.k[layer_index],
        "values": cache.v[layer_index],
        "kv_heads": cache.rows[layer_index].heads,
        "block_size": cache.block_size,
        **cache.told(layer_index),
    }


def places(batch: StepBatch) -> Iterator[tuple[slice, Span]]:
    """Yield every span with its tokens in the step."""
    token = 0
    for span in batch.spans:
        yield slice(token, token + span.count), span
        token += span.count


def runs(batch: StepBatch, kinds: list[Kind]) -> Iterator[tuple[Kind, slice, tuple[Span, ...]]]:
    """Yield each run of neighbouring spans of the same kind: the kind, their tokens in the step, and the spans."""
    for kind, group in groupby(zip(kinds, places(batch), strict=True), key=lambda pair: pair[0]):
        tokens, spans = zip(*(place for _, place in group), strict=True)
        yield kind, slice(tokens[0].start, tokens[-1].stop), spans


def span_slots(cache: KVCache, spans: tuple[Span, ...], group: int = 0) -> Tensor:
    """Return the slots of the rows that spans compute in a group, int64 [T]."""
    slots = [cache.every_slot(span.blocks, span.start, span.stop, group) for span in spans]
    return torch.cat(slots).to(cache.device, non_blocking=True)


def ends(cache: KVCache, spans: tuple[Span, ...]) -> tuple[Tensor, Tensor]:
    """Return where the tokens of each span end, and the rows that it sees, both cumulated: int32 [spans + 1] each.

    Both begin with 0.
    """
    count = len(spans) + 1
    # A kernel is compiled again for tensors that do not begin at a multiple of 16 bytes.
    both = torch.zeros(2, -(-count // 4) * 4, dtype=torch.int32)
    both[0, 1:count] = torch.tensor([span.count for span in spans]).cumsum(0)
    both[1, 1:count] = torch.tensor([span.stop for span in spans]).cumsum(0)
    q_ends, k_ends = both.to(cache.device, non_blocking=True)[:, :count]
    return q_ends, k_ends


def block_tables(cache: KVCache, spans: tuple[Span, ...]) -> list[Tensor]:
    """Return where the blocks that spans read lie in each group, int32 [spans, most blocks] each, padded with 0."""
    tables = [span.blocks[: -(-span.stop // cache.block_size)] for span in spans]
    longest = max(map(len, tables))

    def lie(group: int) -> Tensor:
        padded = [[*cache.table(blocks, group), *[0] * (longest - len(blocks))] for blocks in tables]
        return torch.tensor(padded, dtype=torch.int32).to(cache.device, non_blocking=True)

    return [lie(group) for group in cache.every_group]
