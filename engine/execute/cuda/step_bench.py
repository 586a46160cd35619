"""Times whole decode steps with other cuts of their kernels: alone a kernel says little of how it gets on in a step.

The weights are those of the model, each read once a step, so all but the smallest models come from memory and not from
L2, as in use. The KV cache is one of its own, because steps write to it.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch

from engine.cache.kv_cache import KVCache
from engine.execute.compatibility import has_experts
from engine.execute.cuda.cuts import Chosen, Cuts, numbers
from engine.execute.cuda.fused_program import FusedDecoder
from engine.execute.cuda.sharing import most_members
from engine.execute.cuda.slots import StepInput
from engine.execute.cuda.step_profile import Ran, record_trace
from engine.execute.cuda.tiles import FEW, FUSED, SMALLEST
from engine.execute.tuning.search import Measure, Numbers
from engine.kernels.triton.ahead import Compilers, Launch, recorded
from engine.kernels.triton.launch import shared_bytes
from models.network import Network

T = TypeVar("T")
ROW = 511
"""Where the token of a step lies: with the context that benchmarks have."""
PROMPT, PROMPT_TOKENS, PROMPT_LAYERS = 0, 1024, 4
"""In the place of a number of rows: the attention of a prompt of so many tokens, in so many layers."""
SLICE_S = 0.015
"""Steps of so long are one piece of work, which somebody's next token may have to wait for."""


class Compute(Protocol):
    """Has a function called by the thread that computes, once nobody needs it."""

    def __call__(self, job: Callable[[], T], /) -> T:
        """What `job` returns or raises."""
        ...


class Stopwatch(Protocol):
    """Records steps, and times what was recorded."""

    def record(self, step: Callable[[], object]) -> Any:
        """Do `step` once, and record it. Raises what goes wrong."""
        ...

    def seconds(self, recordings: Sequence[Any]) -> list[float]:
        """Of each of these, run one after the other."""
        ...


class GraphStopwatch:
    """CUDA graphs and events."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, step: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """See `Stopwatch`."""
        step()
        torch.cuda.synchronize()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        return graph

    def seconds(self, recordings: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
        """See `Stopwatch`."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(recordings) + 1)]  # type: ignore[no-untyped-call]
        recordings[0].replay()  # while it runs the host enqueues the others: nothing waits for it
        marks[0].record()
        for graph, mark in zip(recordings, marks[1:], strict=True):
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        return [one.elapsed_time(other) / 1000 for one, other in pairwise(marks)]


class StepBench:
    """Steps of a network of its own cache. Its methods may be called from any thread but the one that computes."""

    def __init__(
        self,
        network: Network,
        like: KVCache,
        pdl: bool,
        cuts: Cuts,
        compute: Compute,
        compilers: Compilers | None,
        stopwatch: Stopwatch,
        prompts: bool = False,
        used: Chosen = MappingProxyType({}),
    ) -> None:
        """`like` is the cache that sequences have, `used` their cuts; `prompts`: their attention is ours, too. Without
        `compilers` kernels are compiled where they are launched first.
        """
        self._network, self._like, self._pdl = network, like, pdl
        self._cuts = cuts
        self._compute = compute
        self._compilers = compilers
        self._stopwatch = stopwatch
        self._prompts = prompts
        self._used = used
        self._program: FusedDecoder | None = None
        self._cache: KVCache | None = None
        self._step_s = SLICE_S

    @staticmethod
    def cache_bytes(like: KVCache) -> int:
        """What its cache takes beside one like this."""
        return like.kv[:, :, :1].nbytes * _blocks(like) * like.block_size

    def candidates(self, rows: int) -> dict[str, tuple[Numbers, ...]]:
        """See `Bench`; in the order in which a step has it."""

        if rows > FEW and has_experts(self._network.spec):
            return {}  # products of the library

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
        """The program, made on the thread that computes. Raises RuntimeError where there is no memory for it."""
        if self._program is None:
            spec, like = self._network.spec, self._like
            heads, device = spec.attention, like.kv.device
            blocks = _blocks(like)
            cache = KVCache(
                len(spec.layers),
                blocks,
                like.block_size,
                heads.kv_heads,
                heads.head_dim,
                like.dtype,
                device,
                kind=like.row.kind if like.row.is_quantised else "auto",
            )
            cache.kv.zero_()
            self._cache = cache

            def full(value: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
                return torch.full(shape, value, dtype=dtype, device=device)

            given = StepInput(
                torch.arange(FUSED, dtype=torch.int32, device=device),
                full(0, FUSED, dtype=torch.int64),
                full(ROW, FUSED, 2, dtype=torch.int64),
                torch.arange(blocks, dtype=torch.int32, device=device).repeat(FUSED, 1),
                full(0, FUSED),
                full(-1, most_members(FUSED)),
            )
            self._program = FusedDecoder(self._network, cache, given, self._pdl, cuts=self._cuts.with_({}))
        return self._program

    @torch.inference_mode()
    def _run(self, rows: int) -> None:
        program = self._ready()
        if rows != PROMPT:
            program.run(rows, SMALLEST)
        elif self._prompts:
            self._prompt(program.cuts)

    def _prompt(self, cuts: Cuts) -> None:
        from engine.kernels.triton.prompt_attention import ragged_attention

        cache, spec, device = self._cache, self._network.spec.attention, self._like.kv.device
        assert cache is not None
        q = torch.zeros(PROMPT_TOKENS, spec.heads, spec.head_dim, dtype=self._network.dtype, device=device)
        ends = torch.arange(2, dtype=torch.int32, device=device) * PROMPT_TOKENS
        table = torch.arange(
            -(-PROMPT_TOKENS // cache.block_size), dtype=torch.int32, device=device
        ) % _blocks(cache)
        tile = cuts.prompt(spec, q.element_size(), shared_bytes(device))
        for layer in range(min(PROMPT_LAYERS, len(cache.k))):
            ragged_attention(
                q, cache.k[layer], cache.v[layer], ends, ends, table[None], kv_heads=cache.row.heads,
                block_size=cache.block_size, most_tokens=PROMPT_TOKENS, tile=tile, **cache.told(layer),
            )  # fmt: skip

    def _unknown(self, rows: int, chosen: Chosen) -> list[Launch]:
        self._ready().cuts = self._cuts.with_(chosen)
        with (
            recorded() as launches,
            suppress(Exception),
        ):  # what does not even compile is found out with the others
            self._run(rows)
        return launches

    def _recorded(self, rows: int, chosen: Chosen) -> Any:
        """None where these cuts do not work here."""
        self._ready().cuts = self._cuts.with_(chosen)
        try:
            return self._stopwatch.record(lambda: self._run(rows))
        except Exception:  # noqa: BLE001 - compilers and drivers raise all sorts; it is one candidate less
            return None


def _blocks(like: KVCache) -> int:
    """Of the sequence that steps are of."""
    return -(-SMALLEST // like.block_size)
