"""From a scheduled batch to logits."""

from typing import Protocol

import torch
from torch import Tensor

from engine.attention import AttentionBackend
from engine.batch import Batch, Span
from engine.scheduler import Chunk
from models.attention import Attention
from models.decoder import DecoderModel


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

    @torch.inference_mode()
    def run(self, chunks: list[Chunk]) -> Tensor:
        """Compute the rows of `chunks` and return the logits [n, vocab] of the n chunks that sample, in order."""
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
