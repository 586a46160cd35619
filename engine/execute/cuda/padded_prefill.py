"""Prompts as CUDA graphs: one launch instead of some hundred.

A chunk of 16 tokens keeps a GPU busy for 1 ms and the host for 20, so the host is what a person would wait for. A graph
has a fixed number of tokens; some of them are padding, which writes nothing and is seen by nothing. The tokens of one
sequence lie at the end, those of several at the beginning:

    alone    | . . . . . . a b c d e |    . padding
    together | a b c d p q r x y . . |
    attends  rows 0 to start, then a; then a b; ...      (the mask is aligned at the right corner)

More sequences or tokens than a step has room for are several steps, one after another.

Deterministic steps are the slabs of a sequence, SLAB rows each, and every token lies where its row lies in the slab,
however the prompt is cut. So a product has one shape and a token one place in it: the order of its sums is the same,
whatever the library does; norms, positions and our attention compute a token by itself, and the head takes one:

    slab     | . . a b c d e . . . . |

The plain twin is `engine.execute.runner.Runner.run`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from engine.attention import RaggedBackend, Write
from engine.attention.unusual import Layers, unusual_layers
from engine.batch import Recorded, Span
from engine.cache.kv_cache import KVCache
from engine.execute.cuda.given import Given
from engine.execute.cuda.graphs import Graphs
from engine.execute.cuda.host_experts import HostExperts
from engine.kernels.triton.kv_rows import write_rows
from engine.kernels.triton.prefill import write_kernel
from engine.kernels.triton.prompt_attention import prompt_attention
from models.network import Network
from models.reference.attention import Attention

SLAB = 1024
"""Rows of a deterministic step."""
ALONE = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Tokens of a step of one sequence. A longer chunk keeps the GPU busy for longer than the host."""
TOGETHER = (128, 256, 512, 1024, 2048)
"""Tokens of a step of several."""
SPANS = (8, 32)
"""Sequences of such a step: its attention has programs for so many."""
LONGEST = (512, 2048)
"""And for so many tokens of each; those without a token end at once, but thousands of them take their time."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a graph is recorded for."""

    tokens: int
    spans: int
    """1: they lie at the end, or where they lie in their slab."""
    longest: int
    """Tokens of a span at most."""


class PaddedPrefill:
    """Chunks of prompts, from their ids to their logits. It belongs to the loop thread.

    Deterministic: any chunk, slab by slab.
    """

    def __init__(
        self,
        network: Network,
        cache: KVCache,
        backend: RaggedBackend | None,
        rows: int,
        graphs: Graphs | None,
        on_host: HostExperts | None = None,
    ) -> None:
        """`rows` is the most that a sequence holds; `backend` attends, None for deterministic steps.

        Without `graphs` every step runs kernel by kernel. Raises ImportError where triton is not installed.
        """
        from engine.execute.cuda.prefill import FusedPrefill

        device = cache.kv.device
        self._network = network
        self._model = FusedPrefill(network, on_host)
        self._on_host = on_host
        self._cache = cache
        self._backend = backend
        self._unusual = unusual_layers(network)
        self._graphs = graphs
        self._alone = ALONE if backend is not None else (SLAB,)
        tokens, spans = (TOGETHER[-1], SPANS[-1]) if backend is not None else (SLAB, 1)
        tokens = max(tokens, self._alone[-1])
        self._rows = (-(-rows // cache.block_size) + 1) * cache.block_size
        blocks = self._rows // cache.block_size
        sizes = (tokens, tokens, tokens, 3, spans, spans + 1, spans + 1, spans * blocks)
        self._given = Given(sizes, device)
        self._logits = torch.zeros(spans, network.spec.vocab_size, dtype=network.dtype, device=device)

    @property
    def deterministic(self) -> bool:
        """Whether the bits of a token depend on nothing but the tokens before it."""
        return self._backend is None

    @property
    def recorded(self) -> Recorded:
        """The sizes that chunks are padded to."""
        return Recorded(ALONE, TOGETHER)

    @property
    def firsts(self) -> int:
        """Steps that took longer than they will from now on, because something was compiled or recorded."""
        return self._graphs.firsts if self._graphs is not None else 0

    def takes(self, spans: tuple[Span, ...]) -> bool:
        """Whether a step of these is one where the host is slow."""
        return self.deterministic or len(spans) > 1 or spans[0].count <= ALONE[-1]

    def run(self, spans: tuple[Span, ...]) -> list[Tensor]:
        """Compute the rows of `spans`; the logits [vocab] of each that wants some, in order.

        The next run overwrites them.
        """
        steps = list(by_slab(spans) if self.deterministic else packed(spans, TOGETHER[-1], SPANS[-1]))
        found: list[Tensor] = []
        for step in steps:
            self._compute(self._shape(step), step)
            assert all(span.wanted <= 1 for span in step), "only the native kernels check guesses"
            if any(span.wanted for span in step):
                logits = self._logits[: len(step)]
                rows = logits.clone() if len(steps) > 1 else logits
                found += [row for row, span in zip(rows, step, strict=True) if span.wanted]
        return found

    def prepare(self) -> None:
        """Compile every kernel, and record the steps of one sequence; others are when they come a second time.

        The cache must be empty: the first row of its first block is written to.
        """
        one = Span((0,), 0, 1, (0,), (0,))
        for size in self._alone:
            for _ in range(2 if self._graphs is not None else 1):
                self._compute(Shape(size, 1, size), (one,))
        if not self.deterministic:
            self._compute(self._shape((one, one)), (one, one))

    def _shape(self, step: tuple[Span, ...]) -> Shape:
        count = sum(span.count for span in step)
        if len(step) == 1 and count <= self._alone[-1]:
            size = _fitting(self._alone, count)
            return Shape(size, 1, size)
        size, longest = _fitting(TOGETHER, count), _fitting(LONGEST, max(span.count for span in step))
        return Shape(size, _fitting(SPANS, len(step)), min(size, longest))

    def _compute(self, shape: Shape, step: tuple[Span, ...]) -> None:
        self._send(shape, step)
        # Which way the experts are computed must not depend on how many tokens are real where sums have one order.
        real = shape.tokens if self.deterministic else sum(span.count for span in step)
        # Fetching them takes longer than launching anything, and nothing of it is recorded.
        fetches = self._on_host is not None and self._on_host.fetches(real)
        if self._graphs is None or fetches:
            self._step(shape, real)
        else:
            self._graphs.run(("prompts", shape), lambda: self._step(shape, real))

    def _send(self, shape: Shape, step: tuple[Span, ...]) -> None:
        ids, positions, slots, span_rows, last, q_ends, k_ends, tables = self._given.begin()
        at = 0
        if shape.spans == 1:
            (span,) = step
            at = span.start % SLAB if self.deterministic else shape.tokens - span.count
            span_rows[:] = span.start - at, span.start, span.stop
            q_ends[0] = at
        slots.fill(-1)
        for number, (span, table) in enumerate(zip(step, tables.reshape(len(last), -1), strict=False)):
            end = at + span.count
            ids[at:end], positions[at:end] = span.tokens, span.positions
            slots[at:end] = self._cache.every_slot(span.blocks, span.start, span.stop).numpy()
            blocks = span.blocks[: -(-span.stop // self._cache.block_size)]
            table[: len(blocks)] = blocks
            last[number] = end - 1
            # Spans that are not there end where the last one does.
            q_ends[number + 1 :] = end
            k_ends[number + 1 :] = k_ends[number] + span.stop
            at = end
        self._given.send()

    @torch.inference_mode()
    def _step(self, shape: Shape, real: int) -> None:
        ids, positions, slots, span_rows, last, q_ends, k_ends, tables = self._given.parts
        size, spans = shape.tokens, shape.spans
        table = tables.view(last.shape[0], -1)[:spans]
        write = _Write(self._cache, slots)
        attention: Attention
        if self._backend is None:
            attention = _Slab(self._cache, self._unusual, write, span_rows, table[0])
        else:
            q_ends, k_ends = q_ends[: spans + 1], k_ends[: spans + 1]
            attention = self._backend.ragged(write, q_ends, k_ends, table, shape.longest, self._rows)
        hidden = self._model.forward(ids[:size], positions[:size], attention, slots[:size], real)
        self._logits[:spans].copy_(self._model.logits(hidden.index_select(0, last[:spans])))


class _Write:
    """Writes K and V of the tokens of a step into the cache."""

    def __init__(self, cache: KVCache, slots: Tensor) -> None:
        """slots int32 [tokens or more]: where each goes, -1 for padding."""
        self._cache = cache
        self._slots = slots

    def __call__(self, layer_index: int, k: Tensor, v: Tensor) -> None:
        if self._cache.row.is_quantised:
            cache = self._cache
            rows = cache.k[layer_index], cache.v[layer_index]
            write_rows(rows, cache.told(layer_index), self._slots, k, v)
            return
        keys = self._cache.k[layer_index]
        width = keys.shape[1] * keys.shape[2]
        write_kernel[(k.shape[0],)](
            k,
            v,
            keys,
            self._cache.v[layer_index],
            self._slots,
            STRIDE=k.stride(0),
            WIDTH=width,
            PADDED=triton.next_power_of_2(width),
            num_warps=4,
        )


@dataclass(frozen=True, slots=True)
class _Slab:
    """Attention of a deterministic step."""

    cache: KVCache
    unusual: Layers
    write: Write
    span: Tensor
    """int32 [3]: see `prompt_attention`."""
    table: Tensor
    """int32 [blocks]"""

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.write(layer_index, k, v)
        keys, values = self.cache.k[layer_index], self.cache.v[layer_index]
        layer, size = self.unusual.get(layer_index), self.cache.block_size
        asked = {**self.cache.told(layer_index), **(layer.asked if layer is not None else {})}
        heads = self.cache.row.heads
        return prompt_attention(
            q, keys, values, self.span, self.table, kv_heads=heads, block_size=size, **asked
        )


def by_slab(spans: Iterable[Span]) -> Iterator[tuple[Span]]:
    """Each span cut where a slab of its sequence ends."""
    for span in spans:
        rest: Span | None = span
        while rest is not None:
            part, rest = rest.cut((rest.start // SLAB + 1) * SLAB)
            assert part is not None
            yield (part,)


def packed(spans: Iterable[Span], tokens: int, most: int) -> Iterator[tuple[Span, ...]]:
    """Steps of up to `tokens` tokens of up to `most` spans, in order; a span is cut where a step is full."""
    step: list[Span] = []
    left = tokens
    for span in spans:
        rest: Span | None = span
        while rest is not None:
            part, rest = rest.cut(rest.start + left)
            assert part is not None
            step.append(part)
            left -= part.count
            if left == 0 or len(step) == most:
                yield tuple(step)
                step, left = [], tokens
    if step:
        yield tuple(step)


def _fitting(sizes: tuple[int, ...], count: int) -> int:
    return next(size for size in sizes if size >= count)
