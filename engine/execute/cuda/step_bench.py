"""Times whole decode steps with different cuts of their kernels: a kernel timed alone says little about a whole step.

The weights are the model's, each read once per step, so as in use, they come from memory and not from L2, except in the
smallest models. The KV cache is a separate one, because steps write to it.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch

from engine.attention.parts import cache_args
from engine.cache.kv_cache import KVCache
from engine.cache.states import make_states
from engine.device import has_pdl
from engine.execute.compatibility import has_experts
from engine.execute.cuda.fused_program import FusedDecoder
from engine.execute.cuda.kernel_configs import Chosen, KernelConfigs, numbers, table_cuts
from engine.execute.cuda.prefix_groups import most_members
from engine.execute.cuda.slots import StepInput
from engine.execute.cuda.step_profile import Ran, record_trace
from engine.execute.cuda.tiles import FEW, FUSED, SMALLEST, context_limit
from engine.execute.tuning.search import Measure, Numbers
from engine.kernels.recording import recording, wait_for
from engine.kernels.triton.precompile import Compilers, Launch, recorded
from models.network import Network
from models.spec import kv_sources

T = TypeVar("T")
ROW = 511
"""The row of a step's token while tuning: the context that the benchmarks use."""
PROMPT, PROMPT_TOKENS, PROMPT_LAYERS = 0, 1024, 4
"""In place of a number of rows, PROMPT means the attention of a prompt of PROMPT_TOKENS tokens in PROMPT_LAYERS
layers."""
SLICE_S = 0.015
"""The longest that steps run as one job, which another sequence's next token may have to wait for."""


class Compute(Protocol):
    """Runs a function on the computing thread, once no request needs that thread."""

    def __call__(self, job: Callable[[], T], /) -> T:
        """Return what `job` returns, or raise what it raises."""
        ...


class Stopwatch(Protocol):
    """Records steps, and times the recordings."""

    def record(self, step: Callable[[], object]) -> Any:
        """Run `step` once, then record it. Raises any error of the step."""
        ...

    def seconds(self, recordings: Sequence[Any]) -> list[float]:
        """Return the seconds of each recording, run one after the other."""
        ...


class GraphStopwatch:
    """A stopwatch made of CUDA graphs and events."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, step: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """See `Stopwatch`."""
        step()
        wait_for(torch.device("cuda"))
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with recording(graph, self._pool):
            step()
        return graph

    def seconds(self, recordings: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
        """See `Stopwatch`."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(recordings) + 1)]  # type: ignore[no-untyped-call]
        recordings[0].replay()  # meanwhile the host enqueues the others, so none waits for it
        marks[0].record()
        for graph, mark in zip(recordings, marks[1:], strict=True):
            graph.replay()
            mark.record()
        wait_for(torch.device("cuda"))
        return [one.elapsed_time(other) / 1000 for one, other in pairwise(marks)]


class StepBench:
    """Times steps of a network on a cache of its own. Call its methods from any thread but the computing one."""

    def __init__(
        self,
        network: Network,
        like: KVCache,
        compute: Compute,
        compilers: Compilers | None,
        stopwatch: Stopwatch,
        prompts: bool = False,
        used: Chosen = MappingProxyType({}),
        row: int = ROW,
        sequences: int = FEW,
    ) -> None:
        """`like` is the cache of real sequences, `used` their cuts. `prompts` says whether our kernels compute prompt
        attention, too. Without `compilers`, kernels are compiled when they are first launched. `row` is that of a
        step's token. So many `sequences` have rows of their own; if a step has more, they share them."""
        self._network, self._like = network, like
        self._cuts = table_cuts(like.device)
        self._compute = compute
        self._compilers = compilers
        self._stopwatch = stopwatch
        self._prompts = prompts
        self._used = used
        self._row, self._limit, self._sequences = row, context_limit(row), sequences
        self._program: FusedDecoder | None = None
        self._cache: KVCache | None = None
        self._step_s = SLICE_S

    @staticmethod
    def cache_bytes(like: KVCache) -> int:
        """Return the bytes of a sequence in the bench's own cache."""
        row = sum(map(like.group_bytes, like.every_group))
        state = like.states.nbytes // like.states.slots if like.states is not None else 0
        return row * _blocks(like, SMALLEST) * like.block_size + state

    def candidates(self, rows: int) -> dict[str, tuple[Numbers, ...]]:
        """See `Bench`. The candidates are in the order in which a step uses them."""
        if rows > FEW and has_experts(self._network.spec):
            return {}  # the library computes the products

        def ask() -> dict[str, tuple[Numbers, ...]]:
            program = self._ready()
            program.cuts = self._cuts.with_({})
            if self._compilers is None:
                self._run(rows)
            else:
                with recorded():
                    self._run(rows)
            known = program.cuts.candidates
            return {name: tuple(numbers(cut) for cut in cuts) for name, cuts in known.items()}

        return self._compute(ask)

    def compile(self, rows: int, choices: Sequence[Chosen]) -> Callable[[], None]:
        """See `Bench`."""
        if self._compilers is None:
            return lambda: None
        pending = []
        for chosen in choices:
            launches = self._compute(partial(self._unknown, rows, chosen))
            pending += [self._compilers.compile(launch) for launch in launches]

        def wait() -> None:
            for one in pending:
                one.result()

        return wait

    def measure(self, rows: int) -> Measure:
        """See `Bench`."""
        return lambda choices, rounds: self.seconds(rows, choices, rounds)

    def profile(self, trace: Path) -> list[Ran]:
        """See `Bench`."""
        self.compile(1, [self._used])()

        def run() -> list[Ran]:
            self._ready().cuts = self._cuts.with_(self._used)
            return record_trace(self._stopwatch.record(partial(self._run, 1)), trace)

        return self._compute(run)

    def close(self) -> None:
        """See `Bench`."""
        self._program = self._cache = None
        if self._compilers is not None:
            self._compilers.close()

    def seconds(self, rows: int, choices: Sequence[Chosen], rounds: int) -> list[list[float]]:
        """See `engine.execute.tuning.search.Measure`."""
        self.compile(rows, choices)()
        recordings = [self._compute(partial(self._recorded, rows, chosen)) for chosen in choices]
        works = [number for number, recording in enumerate(recordings) if recording is not None]
        found: list[list[float]] = [[] for _ in choices]
        for round in range(rounds):
            turn = works[round % len(works) :] + works[: round % len(works)] if works else []
            while turn:
                count = max(1, int(SLICE_S / self._step_s))
                now, turn = turn[:count], turn[count:]
                steps = [recordings[number] for number in now]
                times = self._compute(partial(self._stopwatch.seconds, steps))
                for number, seconds in zip(now, times, strict=True):
                    found[number].append(seconds)
                self._step_s = max(min(times), 1e-6)
        return found

    def _ready(self) -> FusedDecoder:
        """Return the program, made on the computing thread. Raises RuntimeError if there is no memory for it."""
        if self._program is None:
            like, device = self._like, self._like.device
            blocks = _blocks(like, self._limit)
            sources = kv_sources(self._network.spec)
            cache = KVCache(
                like.rows, self._sequences * blocks, like.block_size, like.dtype, device, sources=sources
            )
            cache.states = make_states(self._network.spec, self._sequences, device)
            for part in (*cache.parts, *(cache.states.layers.values() if cache.states is not None else ())):
                part.zero_()
            self._cache = cache

            def full(value: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
                return torch.full(shape, value, dtype=dtype, device=device)

            states = [row % self._sequences for row in range(FUSED)]
            places = torch.arange(FUSED, dtype=torch.int32, device=device)[:, None] % self._sequences * blocks
            given = StepInput(
                torch.arange(FUSED, dtype=torch.int32, device=device),
                full(0, FUSED, dtype=torch.int64),
                full(self._row, FUSED, 2, dtype=torch.int64),
                (places + torch.arange(blocks, dtype=torch.int32, device=device),),
                full(0, FUSED),
                full(-1, most_members(FUSED)),
                torch.tensor([(i, i, 0, 1) for i in states], dtype=torch.int32, device=device),
            )
            self._program = FusedDecoder(
                self._network, cache, given, has_pdl(device), cuts=self._cuts.with_({})
            )
        return self._program

    @torch.inference_mode()
    def _run(self, rows: int) -> None:
        program = self._ready()
        if rows != PROMPT:
            program.run(rows, self._limit)
        elif self._prompts:
            self._prompt(program.cuts)

    def _prompt(self, cuts: KernelConfigs) -> None:
        from engine.kernels.triton.prompt_attention import ragged_attention

        cache, spec, device = self._cache, self._network.spec.attention, self._like.device
        assert cache is not None
        q = torch.zeros(PROMPT_TOKENS, spec.heads, spec.head_dim, dtype=self._network.dtype, device=device)
        ends = torch.arange(2, dtype=torch.int32, device=device) * PROMPT_TOKENS
        table = torch.arange(
            -(-PROMPT_TOKENS // cache.block_size), dtype=torch.int32, device=device
        ) % _blocks(cache, self._limit)
        tile = cuts.prompt(spec, q.element_size())
        heads = spec.heads, spec.kv_heads, spec.head_dim
        alike = [
            layer
            for layer, each in self._network.spec.attentions.items()
            if (each.heads, each.kv_heads, each.head_dim) == heads
        ]
        for layer in alike[:PROMPT_LAYERS]:
            ragged_attention(
                q, q_ends=ends, k_ends=ends, tables=table[None], most_tokens=PROMPT_TOKENS, tile=tile,
                **cache_args(cache, layer),
            )  # fmt: skip

    def _unknown(self, rows: int, chosen: Chosen) -> list[Launch]:
        self._ready().cuts = self._cuts.with_(chosen)
        with (
            recorded() as launches,
            suppress(Exception),
        ):  # what fails to compile shows up when it is recorded
            self._run(rows)
        return launches

    def _recorded(self, rows: int, chosen: Chosen) -> Any:
        """Record a step with these cuts; None if they do not work here."""
        self._ready().cuts = self._cuts.with_(chosen)
        try:
            return self._stopwatch.record(lambda: self._run(rows))
        except Exception:  # noqa: BLE001 - compilers and drivers raise all sorts; it is one candidate less
            return None


def _blocks(like: KVCache, limit: int) -> int:
    """Return the blocks of a bench sequence of up to `limit` rows."""
    return -(-limit // like.block_size)
