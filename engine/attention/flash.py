"""Attention by the flash-attn package (an optional extra): bf16 or fp16 on GPUs of compute capability 8.0 or later.

Written for flash-attn 2.8 (https://github.com/Dao-AILab/flash-attention), which supports windows, caps and scales, but
not sinks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from engine.attention import Write
from engine.attention.convolving import convolving
from engine.attention.parts import SpanRows, WriteSpans, block_tables, ends, expands
from engine.attention.sdpa_gpu import GpuSpan
from engine.attention.triton import TritonBackend
from engine.attention.unusual import Layers
from engine.attention.walks import recurrence_step
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from engine.kernels.flash import MODULE, attend_pages, attend_ragged
from models.reference.attention import Attention
from models.spec import Attention as AttentionSpec

Options = Mapping[int, dict[str, Any]]
"""By layer index, the arguments that each unusual layer passes to the kernels."""

PAGE = 256
"""flash-attn's paged kernels take blocks of a multiple of this many rows."""
FEW = 8
"""Up to this many tokens, splitting the rows among programs pays, which only `attend` does."""
MANY = 512
"""From this many tokens on, gathering scattered blocks first is faster than reading through block tables."""
LONG = 1024
"""From this many tokens with nothing before them on, torch's own kernel for Hopper is faster."""
HOPPER = 9


class FlashBackend:
    """A long span reads a view of contiguous blocks, or a copy of many; everything else goes through block tables.

    With a quantised cache, only long spans go through flash-attn, on numbers decoded for them; other spans go through
    kernels that read the bytes. Implements `RaggedBackend`. The plain version is `SdpaBackend`.
    """

    name = "flash"

    def __init__(self, cache: KVCache, unusual: Layers = MappingProxyType({})) -> None:
        """Set up; `unusual` has the layers that are not plain softmax.

        Raises ValueError for a block size that it cannot page, and whatever importing a broken package raises.
        """
        import_module(MODULE)
        if cache.block_size % PAGE:
            raise ValueError(f"flash-attn needs blocks of a multiple of {PAGE} rows, not {cache.block_size}")
        self._cache = cache
        self._bytes = TritonBackend(cache, unusual) if cache.row.is_quantized else None
        self._options = {index: _options(layer.spec) for index, layer in unusual.items()}
        self._step = recurrence_step(cache.device)
        self._by_torch = (
            cache.device.type == "cuda" and torch.cuda.get_device_capability(cache.device)[0] == HOPPER
        )

    def plan(self, batch: StepBatch) -> Attention:
        """See `AttentionBackend`."""
        return convolving(self._attention(batch), self._cache, batch.spans, self._step)

    def _attention(self, batch: StepBatch) -> Attention:
        spans, counts = batch.spans, [span.count for span in batch.spans]
        if len(spans) == 1 and self._is_whole(spans[0]):
            return _Whole(self._cache, self._options, spans[0], self._by_torch)
        if self._bytes is not None:
            return self._bytes.plan(batch)
        if len(spans) == 1 or max(counts) == min(counts) <= FEW:
            return _Paged(self._cache, self._options, spans)
        write, tables = WriteSpans(self._cache, spans), block_tables(self._cache, spans)
        most = max(span.stop for span in spans)
        return self.ragged(write, *ends(self._cache, spans), tables, max(counts), most)

    def ragged(
        self, write: Write, q_ends: Tensor, k_ends: Tensor, tables: Sequence[Tensor], tokens: int, rows: int
    ) -> Attention:
        """See `RaggedBackend`."""
        if self._bytes is not None:
            return self._bytes.ragged(write, q_ends, k_ends, tables, tokens, rows)
        if len(tables[0]) == 1:
            return LastTokens(self._cache, self._options, write, k_ends[1:], tables)
        return _Ragged(self._cache, self._options, write, q_ends, k_ends, tables, tokens, rows)

    def _is_whole(self, span: Span) -> bool:
        if self._cache.row.is_quantized:
            return span.count > FEW and expands(self._cache, span)
        first = self._cache.first_seen(span.start)
        one_run = span.count > FEW and len(self._cache.slots(span.blocks, first, span.stop)) == 1
        return one_run or span.count >= MANY


def _options(spec: AttentionSpec) -> dict[str, Any]:
    """Return flash-attn's arguments for a layer; a window counts the rows before a token and those after it (none)."""
    asked: dict[str, Any] = {}
    if spec.scale is not None:
        asked["scale"] = spec.scale
    if spec.window is not None:
        asked["window"] = (spec.window - 1, 0)
    if spec.score_cap is not None:
        asked["cap"] = spec.score_cap
    return asked


class _Whole:
    """Attention of one span over all rows side by side, or over those in the window of a layer."""

    def __init__(self, cache: KVCache, options: Options, span: Span, by_torch: bool) -> None:
        """`by_torch`: use torch's own kernel for plain layers of a long prompt with nothing before it."""
        self._rows = SpanRows(cache, span)
        self._options = options
        by_torch = by_torch and span.start == 0 and span.count >= LONG
        self._plain = GpuSpan(cache, span, gqa=True) if by_torch else None

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._plain is not None and layer_index not in self._options:
            return self._plain(layer_index, q, k, v)
        self._rows.write(layer_index, k, v)
        options = self._options.get(layer_index, {})
        window = options["window"][0] + 1 if "window" in options else None
        keys, values = (x.unsqueeze(0) for x in self._rows.read(layer_index, window))
        # flash-attn's causal mask is aligned at the lower right: the last query sees the last row.
        return attend_pages(q.unsqueeze(0), (keys, values), **options).squeeze(0)


class _Paged:
    """Attention of spans with the same number of tokens; the kernel also writes their K and V."""

    def __init__(self, cache: KVCache, options: Options, spans: tuple[Span, ...]) -> None:
        self._cache = cache
        self._options = options
        self._shape = (len(spans), spans[0].count)
        self._tables = block_tables(cache, spans)
        starts = torch.tensor([span.start for span in spans], dtype=torch.int32)
        self._starts = starts.to(cache.device, non_blocking=True)

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend_pages(
            q.view(*self._shape, *q.shape[1:]),
            _pages(self._cache, layer_index),
            new=(k.view(*self._shape, *k.shape[1:]), v.view(*self._shape, *v.shape[1:])),
            rows=self._starts,
            table=self._tables[self._cache.groups[layer_index]],
            **self._options.get(layer_index, {}),
        )
        return out.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class LastTokens:
    """Attention of the last tokens of sequences, as many of each. Of a single one, tokens before its first row are
    padding."""

    cache: KVCache
    options: Options
    write: Write
    rows: Tensor
    """int32 [sequences]: the number of rows that the last token sees."""
    tables: Sequence[Tensor]
    """int32 [sequences, blocks] for each group"""

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `models.reference.attention.Attention`."""
        self.write(layer_index, k, v)
        table = self.tables[self.cache.groups[layer_index]]
        out = attend_pages(
            q.view(len(table), -1, *q.shape[1:]),
            _pages(self.cache, layer_index),
            rows=self.rows,
            table=table,
            **self.options.get(layer_index, {}),
        )
        return out.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class _Ragged:
    """Attention of spans of any lengths in one call; the tensors are those of `RaggedBackend.ragged`."""

    cache: KVCache
    options: Options
    write: Write
    q_ends: Tensor
    k_ends: Tensor
    tables: Sequence[Tensor]
    most_tokens: int
    most_rows: int

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.write(layer_index, k, v)
        return attend_ragged(
            q,
            _pages(self.cache, layer_index),
            (self.q_ends, self.k_ends),
            self.tables[self.cache.groups[layer_index]],
            (max(self.most_tokens, 2), self.most_rows),  # it would take 1 for a batch without padding
            **self.options.get(layer_index, {}),
        )


def _pages(cache: KVCache, layer_index: int) -> tuple[Tensor, Tensor]:
    """Return K and V of a layer, [blocks, rows of a block, Hkv, D] each."""
    row = cache.rows[layer_index]
    shape = (-1, cache.block_size, row.heads, row.dim)
    return cache.k[layer_index].view(shape), cache.v[layer_index].view(shape)
