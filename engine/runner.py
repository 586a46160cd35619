"""From a scheduled batch to logits."""

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engine.attention import AttentionBackend
from engine.attention.flash import FlashBackend
from engine.batch import Batch, Span
from engine.cuda_graphs import Graphs
from engine.kv_cache import KVCache
from engine.scheduler import Chunk
from models.attention import Attention
from models.decoder import DecoderModel

if TYPE_CHECKING:
    from engine.short_prefill import ShortPrefill


class Decoder(Protocol):
    """What the runner needs of a network (see `models/decoder.py`)."""

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """int64 [T], int64 [T] -> hidden states [T, hidden_size]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size]."""
        ...


class Runner:
    """Runs the plain modules, or fused kernels; the tokens of all chunks lie side by side in one flat batch."""

    def __init__(self, model: Decoder, backend: AttentionBackend, device: torch.device) -> None:
        self._model = model
        self._backend = backend
        self._device = device
        self._short: ShortPrefill | None = None

    @torch.inference_mode()
    def fuse(self, model: DecoderModel) -> None:
        """Run `model` with fused kernels from now on, where there are some for it; compile them.

        The cache must be empty: its first block is written to. Raises ImportError where triton is not installed.
        """
        from engine.fused import supports
        from engine.fused_prefill import FusedPrefill

        if supports(model) is not None:
            return
        self._model = FusedPrefill(model)
        ids = torch.arange(16, device=self._device)
        hidden = self._model.forward(ids, ids, self._backend.plan(Batch((Span((0,), 0, 16),))))
        self._model.logits(hidden[-1:])

    def record(self, model: DecoderModel, cache: KVCache, rows: int, graphs: Graphs) -> None:
        """Run short chunks as `graphs` from now on, where flash-attn and fused kernels run them; record them.

        `rows` is the most that a sequence holds. The cache must be empty: its first block is written to.
        """
        from engine.fused import supports
        from engine.short_prefill import ShortPrefill

        if isinstance(self._backend, FlashBackend) and supports(model) is None:
            self._short = ShortPrefill(model, cache, self._backend.attend, rows, graphs)
            self._short.prepare()

    @torch.inference_mode()
    def run(self, chunks: list[Chunk]) -> Tensor:
        """Compute the rows of `chunks`; logits [n, vocab] of the n chunks that sample, in order, for this step only."""
        if self._short is not None and len(chunks) == 1 and self._short.takes(chunks[0]):
            return self._short.run(chunks[0])[: int(chunks[0].samples)]
        token_ids: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        last: list[int] = []
        for chunk in chunks:
            sequence, stop = chunk.sequence, chunk.start + chunk.count
            assert sequence.table is not None
            token_ids += sequence.rows.token_ids[chunk.start : stop]
            positions += sequence.rows.positions[chunk.start : stop]
            spans.append(Span(tuple(sequence.table.blocks), chunk.start, chunk.count))
            if chunk.samples:
                last.append(len(token_ids) - 1)
        hidden = self._model.forward(
            torch.tensor(token_ids, device=self._device),
            torch.tensor(positions, device=self._device),
            self._backend.plan(Batch(tuple(spans))),
        )
        # Only the rows that are sampled from go through the head.
        return self._model.logits(hidden[last])
