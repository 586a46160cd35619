"""Attention by our own Triton kernels over the block table; plain attention of many tokens uses torch's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.attention import Write
from engine.attention.convolving import convolving
from engine.attention.parts import Parts, WriteSpans, block_tables, cache_args, ends, expands, places, runs
from engine.attention.sdpa import SdpaBackend
from engine.attention.unusual import Layers
from engine.attention.walks import recurrence_step
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from models.reference.attention import Attention

if TYPE_CHECKING:
    from engine.kernels.triton.prompt_attention import Tile

FEW = 8
"""The longest span of plain attention that is split among programs, which pays the more the fewer tokens there are."""


class TritonBackend:
    """Unusual layers use one kernel for all spans. In plain layers, short spans use another, and long ones use torch's.

    Implements `RaggedBackend`, where the first kernel serves plain layers, too. The plain version is `SdpaBackend`.
    Raises ImportError if triton is not installed.
    """

    name = "triton"

    def __init__(self, cache: KVCache, unusual: Layers = MappingProxyType({})) -> None:
        """Attend in the layers of `cache`; `unusual` has those that are not plain softmax."""
        import engine.kernels.triton.paged_attention
        import engine.kernels.triton.prompt_attention  # noqa: F401 - import it now rather than in the first step

        self._cache = cache
        self._unusual = unusual
        self._has_plain = len(unusual) < len(cache.k)
        self._long = SdpaBackend(cache)
        self._step = recurrence_step(cache.device)
        self.tiles: Mapping[int, Tile] = {}
        """How spans of any length are tiled, by the size of a head; the default where it is missing. Set it before the
        first step."""

    def plan(self, batch: StepBatch) -> Attention:
        """See `AttentionBackend`."""
        return convolving(self._attention(batch), self._cache, batch.spans, self._step)

    def _attention(self, batch: StepBatch) -> Attention:
        plain = self._plain(batch) if self._has_plain and self._expands(batch) else None
        if plain is not None and not self._unusual:
            return plain
        spans, cache = batch.spans, self._cache
        write, tables = WriteSpans(cache, spans), block_tables(cache, spans)
        tokens = max(span.count for span in spans)
        return _Ragged(cache, self._unusual, write, *ends(cache, spans), tables, tokens, self.tiles, plain)

    def _expands(self, batch: StepBatch) -> bool:
        return all(span.count <= FEW or expands(self._cache, span) for span in batch.spans)

    def _plain(self, batch: StepBatch) -> Attention:
        few = [span.count <= FEW for span in batch.spans]
        return Parts(
            [
                (tokens, _paged_step(self._cache, spans) if short else self._long.plan(StepBatch(spans)))
                for short, tokens, spans in runs(batch, few)
            ]
        )

    def ragged(
        self, write: Write, q_ends: Tensor, k_ends: Tensor, tables: Sequence[Tensor], tokens: int, rows: int
    ) -> Attention:
        """See `RaggedBackend`."""
        return _Ragged(self._cache, self._unusual, write, q_ends, k_ends, tables, tokens, self.tiles)


@dataclass(frozen=True, slots=True)
class _Ragged:
    """Attention of spans of any lengths in one launch; the tensors are those of `RaggedBackend.ragged`."""

    cache: KVCache
    unusual: Layers
    write: Write
    q_ends: Tensor
    k_ends: Tensor
    tables: Sequence[Tensor]
    most_tokens: int
    tiles: "Mapping[int, Tile]"
    plain: Attention | None = None
    """The attention used for plain layers instead."""

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from engine.kernels.triton.prompt_attention import ragged_attention

        layer = self.unusual.get(layer_index)
        if layer is None and self.plain is not None:
            return self.plain(layer_index, q, k, v)
        self.write(layer_index, k, v)
        return ragged_attention(
            q,
            q_ends=self.q_ends,
            k_ends=self.k_ends,
            tables=self.tables[self.cache.groups[layer_index]],
            most_tokens=self.most_tokens,
            tile=self.tiles.get(q.shape[2]),
            **cache_args(self.cache, layer_index),
            **(layer.asked if layer is not None else {}),
        )


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Attention of a few tokens of one or several sequences in one launch, a `models.reference.attention.Attention`.

    It serves plain layers, which see all rows and thus are in the primary group.
    """

    cache: KVCache
    write: Write
    spans: Tensor
    """int32 [n, 3]: see `paged_attention`."""
    tables: Tensor
    """int32 [n, blocks]"""
    most_tokens: int
    most_rows: int

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `models.reference.attention.Attention`."""
        from engine.kernels.triton.paged_attention import paged_attention

        self.write(layer_index, k, v)
        return paged_attention(
            q,
            spans=self.spans,
            tables=self.tables,
            most_tokens=self.most_tokens,
            most_rows=self.most_rows,
            **cache_args(self.cache, layer_index),
        )


@dataclass(frozen=True, slots=True)
class WriteTokens:
    """An `engine.attention.Write` that reads on the device where each token goes; without heads it writes nothing."""

    cache: KVCache
    slots: Sequence[Tensor]
    """int32 [tokens or more] for each group: the cache slot of each token, -1 for padding, which is not written."""

    def __call__(self, layer_index: int, k: Tensor, v: Tensor) -> None:
        """See `engine.attention.Write`."""
        from engine.kernels.triton.kv_rows import write_rows

        if k.shape[1]:
            rows = self.cache.k[layer_index], self.cache.v[layer_index]
            slots = self.slots[self.cache.groups[layer_index]]
            write_rows(rows, self.cache.told(layer_index), slots, k, v)


def _paged_step(cache: KVCache, spans: tuple[Span, ...]) -> PagedStep:
    given = [(tokens.start, span.start, span.count) for tokens, span in places(StepBatch(spans))]
    return PagedStep(
        cache,
        WriteSpans(cache, spans),
        torch.tensor(given, dtype=torch.int32).to(cache.device, non_blocking=True),
        block_tables(cache, spans)[0],
        most_tokens=max(span.count for span in spans),
        most_rows=max(span.stop for span in spans),
    )
