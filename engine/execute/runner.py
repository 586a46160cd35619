"""From a scheduled batch to logits."""

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engine.attention import AttentionBackend
from engine.attention.flash import FlashBackend
from engine.cache.kv_cache import KVCache
from engine.execute.batch import Batch, Span
from engine.execute.cpu.executor import NativeDecoder, NativeSpan, unsupported
from engine.execute.cuda.graphs import Graphs
from engine.kernels.native.library import Pool
from engine.schedule.scheduler import Chunk
from models.network import Network
from models.reference.attention import Attention
from models.reference.decoder import Decoder as Reference

if TYPE_CHECKING:
    from engine.execute.cuda.short_prefill import ShortPrefill


class Decoder(Protocol):
    """What the runner needs of a network (see `models/reference/decoder.py`)."""

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """int64 [T], int64 [T] -> hidden states [T, hidden_size]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size]."""
        ...


class Runner:
    """Runs the plain modules, or fused kernels; the tokens of all chunks lie side by side in one flat batch.

    On a CPU native kernels compute all chunks together, where there are some for the model: of a model whose weights
    are not quantised only the rows of answers. What computes a row depends on nothing but whether it is a prompt's.
    """

    def __init__(self, network: Network, backend: AttentionBackend, device: torch.device) -> None:
        self._model: Decoder = Reference(network)
        self._backend = backend
        self._device = device
        self._short: ShortPrefill | None = None
        self._native: NativeDecoder | None = None
        self._pool: Pool | None = None

    @property
    def name(self) -> str:
        """The program of a decode step, for people."""
        return self._native.name if self._native is not None else "plain modules"

    def go_native(self, network: Network, cache: KVCache, threads: int) -> str | None:
        """Compute with native kernels from now on what they are best at, where there are some for `network`.

        Else say why not. Raises NativeError when they cannot be had after all.
        """
        reason = unsupported(network.spec)
        if reason is None:
            self._pool = Pool(threads)
            self._native = NativeDecoder(network, cache, self._pool)
        return reason

    @torch.inference_mode()
    def fuse(self, network: Network) -> str | None:
        """Run `network` with fused kernels from now on, where there are some for it; compile them.

        Else say why not. The cache must be empty: its first block is written to. Raises ImportError where triton is
        not installed.
        """
        from engine.execute.cuda.fused_program import unsupported
        from engine.execute.cuda.prefill import FusedPrefill

        if (reason := unsupported(network)) is not None:
            return reason
        self._model = FusedPrefill(network)
        ids = torch.arange(16, device=self._device)
        hidden = self._model.forward(ids, ids, self._backend.plan(Batch((Span((0,), 0, 16),))))
        self._model.logits(hidden[-1:])
        return None

    def record(self, network: Network, cache: KVCache, rows: int, graphs: Graphs) -> None:
        """Run short chunks as `graphs` from now on, where flash-attn and fused kernels run them; record them.

        `rows` is the most that a sequence holds. The cache must be empty: its first block is written to.
        """
        from engine.execute.cuda.fused_program import unsupported
        from engine.execute.cuda.short_prefill import ShortPrefill

        if isinstance(self._backend, FlashBackend) and unsupported(network) is None:
            self._short = ShortPrefill(network, cache, self._backend.attend, rows, graphs)
            self._short.prepare()

    @property
    def all_native(self) -> bool:
        """Whether native kernels compute everything, attention included."""
        return self._native is not None and self._native.takes_prompts

    def uses_torch(self, chunks: list[Chunk]) -> bool:
        """Whether the plain modules have something to compute for `chunks`."""
        return self._native is None or (
            not self.all_native and any(chunk.start < _first_of_answer(chunk) for chunk in chunks)
        )

    def set_alone(self, alone: bool) -> None:
        """Whether the native kernels keep to one core from now on."""
        if self._pool is not None and self._pool.alone is not alone:
            self._pool.set_alone(alone)

    @torch.inference_mode()
    def run(self, chunks: list[Chunk]) -> list[Tensor]:
        """Compute the rows of `chunks` and return the logits [vocab] of each chunk that samples, in order.

        The next call may overwrite them.
        """
        if self._short is not None and len(chunks) == 1 and self._short.takes(chunks[0]):
            logits = self._short.run(chunks[0])
            return [logits] if chunks[0].samples else []
        if self._native is None:
            return self._run(chunks)
        if self._native.takes_prompts:
            return list(_run_native(self._native, chunks))
        return self._run_apart(self._native, chunks)

    def _run_apart(self, native: NativeDecoder, chunks: list[Chunk]) -> list[Tensor]:
        """The rows of prompts by the plain modules, those of answers by the native kernels."""
        prompts, answers = [], []
        for chunk in chunks:
            count = min(max(_first_of_answer(chunk) - chunk.start, 0), chunk.count)
            left = chunk.count - count
            if count:
                prompts.append(replace(chunk, count=count))
            if left:
                answers.append(replace(chunk, start=chunk.start + count, count=left))
        found: dict[int, Tensor] = {}
        if prompts:
            found |= zip(_sampling(prompts), self._run(prompts), strict=True)
        if answers:
            found |= zip(_sampling(answers), _run_native(native, answers), strict=True)
        return [found[name] for name in _sampling(chunks)]

    def _run(self, chunks: list[Chunk]) -> list[Tensor]:
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
        return list(self._model.logits(hidden[last])) if last else []


def _run_native(native: NativeDecoder, chunks: list[Chunk]) -> Tensor:
    """fp32 [chunks that sample, vocab]"""
    spans = []
    for chunk in chunks:
        sequence, rows = chunk.sequence, slice(chunk.start, chunk.start + chunk.count)
        assert sequence.table is not None
        tokens, positions = sequence.rows.token_ids[rows], sequence.rows.positions[rows]
        spans.append(NativeSpan(tokens, chunk.start, positions, sequence.table.blocks, chunk.samples))
    return native.run(spans)


def _sampling(chunks: list[Chunk]) -> list[int]:
    """Which sequences get logits; a sequence has one chunk in a step."""
    return [id(chunk.sequence) for chunk in chunks if chunk.samples]


def _first_of_answer(chunk: Chunk) -> int:
    """From which row on the native kernels compute a chunk where they leave prompts to the plain modules.

    An answer that goes on is a prompt as far as it has to be computed again; one row of it is a decode step.
    """
    sequence = chunk.sequence
    return sequence.prompt_tokens - (sequence.earlier if chunk.count == 1 else 0)
