"""Prompts as CUDA graphs: one launch instead of hundreds.

A chunk of 16 tokens keeps a GPU busy for 1 ms and the host for 20 ms, so the user would wait for the host. A graph has
a fixed number of tokens; some are padding, which writes nothing and which nothing attends to. The tokens of one
sequence lie at the end, those of several at the beginning:

    alone    | . . . . . . a b c d e |    . padding
    together | a b c d p q r x y . . |
    attends  rows 0 to start, then a; then a b; ...      (the mask is aligned at the right corner)

Sequences or tokens beyond the room of a step run as further steps, one after another.

Deterministic steps are the slabs of a sequence, of SLAB rows each. Every token lies at the place of its row in the
slab, however the prompt is cut. So a product always has the same shape and a token the same place in it, which fixes
the order of its sums, whatever the library does. Norms, positions and our attention compute each token by itself, and
the head takes one token:

    slab     | . . a b c d e . . . . |

The plain twin is `engine.execute.runner.Runner.run`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from engine.attention import RaggedBackend, Write
from engine.attention.convolving import ConvolvingStep, seen_rows
from engine.attention.parts import cache_args
from engine.attention.triton import WriteTokens
from engine.attention.unusual import Layers, unusual_layers
from engine.attention.walks import WalkStep
from engine.batch import Recorded, Span, StateMoves
from engine.cache.kv_cache import KVCache
from engine.execute.cuda.convolution import convolution_groups, most_seen
from engine.execute.cuda.graphs import Graphs
from engine.execute.cuda.host_experts import HostExperts
from engine.execute.cuda.input_buffers import StagedInputs
from engine.execute.cuda.padded_walks import SAVES, PaddedWalks, replay
from engine.kernels.convolution_rows import NONE
from engine.kernels.triton.prompt_attention import prompt_attention
from models.network import Network
from models.reference.attention import Attention

Part = TypeVar("Part")

SLAB = 1024
"""Rows of a deterministic step."""
ALONE = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Tokens in a step of one sequence. A longer chunk keeps the GPU busy for longer than the host."""
TOGETHER = (128, 256, 512, 1024, 2048)
"""Tokens in a step of several sequences."""
SPANS = (8, 32)
"""Sequences in such a step: its attention has programs for this many."""
LONGEST = (512, 2048)
"""Tokens per sequence that its attention has programs for. Thousands of programs without a token take their time."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that a graph is recorded for."""

    tokens: int
    spans: int
    """With 1, the tokens lie at the end, or at their place in the slab."""
    longest: int
    """The most tokens of a span."""


class PaddedPrefill:
    """Computes chunks of prompts, from their ids to their logits. It belongs to the loop thread.

    Deterministic steps take any chunk, slab by slab.
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
        """`rows` is the most that a sequence holds; `backend` computes attention, None for deterministic steps.

        Without `graphs` every step runs kernel by kernel. Raises ImportError if triton is not installed.
        """
        from engine.execute.cuda.prefill import FusedPrefill

        device = cache.device
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
        self._most_seen = most_seen(network.spec)
        self._convolving = convolution_groups(network.spec, cache)
        groups = len(cache.every_group)
        by_group = [tokens] * groups + [spans * blocks] * groups
        seen = [tokens * self._most_seen] * len(self._convolving)
        self._walks = PaddedWalks(cache, tokens, spans)
        walks = self._walks.sizes
        sizes = tokens, tokens, 3, spans, spans + 1, spans + 1, *walks, *by_group, *seen
        self._given = StagedInputs(sizes, device)
        self._logits = torch.zeros(spans, network.spec.vocab_size, dtype=network.dtype, device=device)

    @property
    def deterministic(self) -> bool:
        """Whether the bits of a token depend only on the tokens before it."""
        return self._backend is None

    @property
    def recorded(self) -> Recorded:
        """The sizes that chunks are padded to."""
        return Recorded(ALONE, TOGETHER)

    @property
    def firsts(self) -> int:
        """Number of steps so far that were slower than usual because they compiled or recorded something."""
        return self._graphs.firsts if self._graphs is not None else 0

    def takes(self, spans: tuple[Span, ...]) -> bool:
        """Return whether a step of these spans runs here: launching it would take the host longer than the GPU."""
        if self.deterministic:
            return True
        if len(spans) > 1 or spans[0].count <= ALONE[-1]:
            return spans[0].states is None or self._takes_walks(spans)
        return False

    def _takes_walks(self, spans: tuple[Span, ...]) -> bool:
        """Return whether spans fit into one step, because states would have to be saved where they are cut."""
        if sum(span.count for span in spans) > TOGETHER[-1] or len(spans) > SPANS[-1]:
            return False
        return self._walks.takes(spans, 1 if len(spans) == 1 else _fitting(SPANS, len(spans)))

    def run(self, spans: tuple[Span, ...]) -> list[Tensor]:
        """Compute the rows of `spans`; return the logits [vocab] of each span that wants them, in order.

        The next run overwrites them.
        """
        steps = list(by_slab(spans) if self.deterministic else pack_steps(spans, TOGETHER[-1], SPANS[-1]))
        found: list[Tensor] = []
        for step in steps:
            if self.deterministic and not self._walks.takes(step, 1):
                step = (replay(self._network, self._cache, step[0]),)
            self._compute(self._shape(step), step)
            assert all(span.wanted <= 1 for span in step), "only the native kernels check guesses"
            if any(span.wanted for span in step):
                logits = self._logits[: len(step)]
                rows = logits.clone() if len(steps) > 1 else logits
                found += [row for row, span in zip(rows, step, strict=True) if span.wanted]
        return found

    def prepare(self) -> None:
        """Compile every kernel and record the steps of one sequence; other steps are recorded when they occur again.

        The cache must be empty: the first row of its first block is written to.
        """
        moves = StateMoves(NONE, 0, ((1, 0),)) if self._walks.sizes else None
        one = Span((0,), 0, 1, (0,), (0,), states=moves)
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
        # In deterministic steps, how the experts are computed must not depend on the number of real tokens.
        real = shape.tokens if self.deterministic else sum(span.count for span in step)
        # Fetching takes longer than any launching, so it is never recorded.
        fetches = self._on_host is not None and self._on_host.fetches(real)
        if self._graphs is None or fetches:
            self._step(shape, real)
        else:
            self._graphs.run(("prompts", shape), lambda: self._step(shape, real))

    def _send(self, shape: Shape, step: tuple[Span, ...]) -> None:
        ids, positions, span_rows, last, q_ends, k_ends, *rest = self._given.begin()
        walks, slots, tables, seen = self._divide(rest)
        cache, at = self._cache, 0
        if shape.spans == 1:
            (span,) = step
            at = span.start % SLAB if self.deterministic else shape.tokens - span.count
            span_rows[:] = span.start - at, span.start, span.stop
            q_ends[0] = at
        for part in slots:
            part.fill(-1)
        for part in seen.values():
            part.fill(NONE)
        self._walks.fill(walks, step, at)
        for number, span in enumerate(step):
            end = at + span.count
            ids[at:end], positions[at:end] = span.tokens, span.positions
            blocks = span.blocks[: -(-span.stop // cache.block_size)]
            for group in cache.every_group:
                slots[group][at:end] = cache.every_slot(span.blocks, span.start, span.stop, group).numpy()
                tables[group].reshape(len(last), -1)[number, : len(blocks)] = cache.table(blocks, group)
            for group, part in seen.items():
                most = self._most_seen
                part[at * most : end * most] = seen_rows(cache, span, most, group).flatten().numpy()
            last[number] = end - 1
            # Unused spans end where the last real one does.
            q_ends[number + 1 :] = end
            k_ends[number + 1 :] = k_ends[number] + span.stop
            at = end
        self._given.send()

    def _divide(self, parts: list[Part]) -> tuple[list[Part], list[Part], list[Part], dict[int, Part]]:
        """Divide the inputs: the walks, and by group the slots of the tokens, the block tables, and what convolutions
        see."""
        groups, walks = len(self._cache.every_group), len(self._walks.sizes)
        walked, parts = parts[:walks], parts[walks:]
        seen = dict(zip(self._convolving, parts[2 * groups :], strict=True))
        return walked, parts[:groups], parts[groups : 2 * groups], seen

    @torch.inference_mode()
    def _step(self, shape: Shape, real: int) -> None:
        ids, positions, span_rows, last, q_ends, k_ends, *rest = self._given.parts
        walks, slots, tables, seen = self._divide(rest)
        size, spans = shape.tokens, shape.spans
        tables = [part.view(last.shape[0], -1)[:spans] for part in tables]
        write = WriteTokens(self._cache, slots)
        attention: Attention
        if self._backend is None:
            attention = _Slab(self._cache, self._unusual, write, span_rows, tables)
        else:
            q_ends, k_ends = q_ends[: spans + 1], k_ends[: spans + 1]
            attention = self._backend.ragged(write, q_ends, k_ends, tables, shape.longest, self._rows)
        if seen:
            places = {group: part.view(-1, self._most_seen) for group, part in seen.items()}
            attention = ConvolvingStep(attention, self._cache, (), places)
        if walks:
            attention = WalkStep(attention, self._cache, (), self._walks.read(walks, size, spans, slots))
        hidden = self._model.forward(ids[:size], positions[:size], attention, slots[0][:size], real)
        self._logits[:spans].copy_(self._model.logits(hidden.index_select(0, last[:spans])))


@dataclass(frozen=True, slots=True)
class _Slab:
    """The attention of a deterministic step."""

    cache: KVCache
    unusual: Layers
    write: Write
    span: Tensor
    """int32 [3]: see `prompt_attention`."""
    tables: Sequence[Tensor]
    """int32 [1, blocks] for each group of layers: the block tables."""

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.write(layer_index, k, v)
        layer = self.unusual.get(layer_index)
        asked = {**cache_args(self.cache, layer_index), **(layer.asked if layer is not None else {})}
        (table,) = self.tables[self.cache.groups[layer_index]]
        return prompt_attention(q, span=self.span, table=table, **asked)


def by_slab(spans: Iterable[Span]) -> Iterator[tuple[Span]]:
    """Yield each span, cut at the ends of its sequence's slabs, and where a step could not save more states."""
    for span in spans:
        rest: Span | None = span
        while rest is not None:
            end = (rest.start // SLAB + 1) * SLAB
            if rest.states is not None and len(rest.states.saves) > SAVES:
                end = min(end, rest.states.saves[SAVES - 1][0])
            part, rest = rest.cut(end)
            assert part is not None
            yield (part,)


def pack_steps(spans: Iterable[Span], tokens: int, most: int) -> Iterator[tuple[Span, ...]]:
    """Yield steps of up to `tokens` tokens and `most` spans, in order; a span is cut when a step is full."""
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
