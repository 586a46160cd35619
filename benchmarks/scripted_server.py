"""The two processes of a server whose GPU is a clock: they do their real work, and wait instead of computing.

    python -P benchmarks/scripted_server.py engine FOLDER STREAMS PACE
    python -P benchmarks/scripted_server.py web STREAMS
    python -P benchmarks/scripted_server.py alone FOLDER STREAMS PACE

`benchmarks.serve_cpu` starts them with the measured tree first in PYTHONPATH, so that only this file is used from the
current tree. FOLDER has a checkpoint. PACE is `none`, or numbers of streams with their total of tokens/s:
`1:1670,256:25000`; between two of them the time of a step grows linearly with the streams. `alone` answers the
workloads of `benchmarks.peers.serving` without a server.
"""

import asyncio
import ctypes
import gc
import json
import os
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any, ClassVar

import torch

PROMPT_ROW_S = 5e-6
"""Seconds per row of a prompt."""


def pace_of(text: str) -> list[tuple[int, float]]:
    """Parse a pace to pairs of streams and seconds per step; empty for `none`."""
    pairs = [part.split(":") for part in text.split(",")] if text != "none" else []
    return sorted((int(streams), int(streams) / float(rate)) for streams, rate in pairs)


def step_seconds(pace: list[tuple[int, float]], streams: int) -> float:
    """Return the seconds of a step of `streams` streams; 0.0 without a pace."""
    if not pace:
        return 0.0
    for (few, least), (many, most) in pairwise(pace):
        if few <= streams <= many:
            return least + (most - least) * (streams - few) / (many - few)
    return pace[0][1] if streams < pace[0][0] else pace[-1][1] * streams / pace[-1][0]


class Clock:
    """The time that a device would take, one piece of work after the other."""

    def __init__(self) -> None:
        self._free = 0.0

    def enqueue(self, seconds: float) -> float:
        """Queue work of `seconds`; return when it will be done."""
        self._free = max(self._free, time.perf_counter()) + seconds
        return self._free


def wait_for(moment: float) -> None:
    if (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


@dataclass(eq=False)
class ScriptedRunner:
    """Replaces a DecodeRunner: it draws tokens at random, in the time that a step takes."""

    capacity: int
    vocab: range
    pace: list[tuple[int, float]]
    clock: Clock
    checks_guesses: ClassVar[bool] = False

    def __post_init__(self) -> None:
        from engine.sampling.sampler import SampledToken

        self._unread: deque[tuple[float, list[Any]]] = deque()
        self._left: set[Any] = set()
        random = Random(0)
        self._tokens = [SampledToken(random.choice(self.vocab)) for _ in range(4099)]
        self._at = 0

    name = "scripted"

    def join(self, sequence: Any, logits: Any) -> None:
        self._left.discard(sequence)
        if logits is not None:
            self._unread.append((self.clock.enqueue(0.0), [sequence]))

    def launch(self, sequences: list[Any]) -> bool:
        done = self.clock.enqueue(step_seconds(self.pace, len(sequences)))
        self._unread.append((done, sequences))
        return False

    def read(self) -> list[tuple[Any, Any]]:
        done, sequences = self._unread.popleft()
        wait_for(done)
        there = [sequence for sequence in sequences if sequence not in self._left]
        self._at = (self._at + len(there)) % (len(self._tokens) - len(there))
        return list(zip(there, self._tokens[self._at :], strict=False))

    def leave(self, sequence: Any) -> None:
        self._left = {one for one in self._left if any(one in step for _, step in self._unread)} | {sequence}


@dataclass(eq=False)
class ScriptedPrompts:
    """Replaces the Runner of prompts."""

    vocab: int
    clock: Clock
    waits: bool
    firsts = 0
    copied_bytes = 0
    all_native = False
    is_divided = False
    name = "scripted"

    def __post_init__(self) -> None:
        self._logits = torch.zeros(self.vocab)

    def run(self, batch: Any) -> list[torch.Tensor]:
        self.clock.enqueue(sum(span.count for span in batch.spans) * PROMPT_ROW_S * self.waits)
        return [self._logits for span in batch.spans if span.wanted]

    def uses_torch(self, batch: Any) -> bool:
        return False

    def leave_cores(self, alone: bool, free: int) -> None:
        """Do nothing, because there are no threads."""

    def while_idle(self) -> bool:
        return False


def scripted(engine: Any, streams: int, pace: str) -> Any:
    """Replace the engine's model by a clock; no token ends an answer."""
    clock, steps = Clock(), engine.engine_step
    size = engine.vocab_size

    def change() -> None:
        ctypes.CDLL(None).prctl(15, b"engine", 0, 0, 0)  # Linux shows the thread under this name
        steps.answers.stop_ids = frozenset()
        steps.computing.runner = ScriptedPrompts(size, clock, pace != "none")
        steps.computing.others.are_busy = lambda: False
        steps.decode_with(ScriptedRunner(streams, range(256, size - 3), pace_of(pace), clock))
        steps.scheduler.max_chunk = 8192

    steps.computing.others = type("Nobody", (), {"free": os.cpu_count() or 1})()
    engine.loop.call(change)
    return engine


def load(folder: str, streams: int) -> Any:
    """Load a model with room for `streams` answers."""
    from engine.engine import Engine

    return Engine.load(folder, device="cpu", context=4096, streams=streams, threads=1)


def run_engine(folder: str, streams: int, pace: str) -> None:
    """Run the engine process as its own program does."""
    from chatterm.backends.backend import ChatOptions
    from chatterm.backends.local import OwnEngines
    from chatterm.server.process.engine_process import serve
    from chatterm.server.spawn import ProcessOptions

    class Scripted(OwnEngines):
        def load(self, *arguments: Any) -> Any:
            return scripted(load(folder, streams), streams, pace)

    sys.setswitchinterval(0.0001)

    def ready(calls: Any) -> None:
        print("ready", flush=True)
        os.dup2(2, 1)

    options = ProcessOptions(ChatOptions(device="cpu"))
    more = {"freezes": True} if "freezes" in signature(serve).parameters else {}  # not in an older tree
    asyncio.run(serve(options, Scripted(), ready, sys.stdin.fileno(), **more))


def run_web(streams: int, folder: str) -> None:
    """Run the web process; print its address once the model is loaded."""
    from chatterm.backends.protocol import Hold
    from chatterm.server.channel_service import ChannelService
    from chatterm.server.http.app import make_app
    from chatterm.server.http.limits import Limits
    from chatterm.server.http.web import listen, make_server

    async def run() -> None:
        service = ChannelService()
        app = make_app(service, Limits(running=streams))
        sock = listen(app, "127.0.0.1", 0)
        await service.connect("")
        await service._ask("hold", Hold(folder, "/", -1.0), type(None))
        await service.look()
        with suppress(ImportError):  # an older tree
            from chatterm.server.gc_tuning import leave_out

            leave_out()
        server = make_server(app)
        address = f"http://127.0.0.1:{sock.getsockname()[1]}"
        print(json.dumps({"url": address, "model": service.models()[0].name}), flush=True)

        async def end() -> None:
            await asyncio.to_thread(sys.stdin.read)
            server.should_exit = True

        ending = asyncio.create_task(end())
        await server.serve(sockets=[sock])
        await ending
        await service.close()

    asyncio.run(run())


class Tap:
    """Puts the events of one answer into a queue that all answers share."""

    def __init__(self, number: int, events: "SimpleQueue[tuple[int, Any]]") -> None:
        self._number, self._events = number, events

    def put(self, event: Any) -> None:
        self._events.put((self._number, event))


def answered(engine: Any, asked: Any) -> float:
    """Return the seconds that a workload of `benchmarks.peers.serving` takes."""
    from engine.cache.rows import Rows

    events: SimpleQueue[tuple[int, Any]] = SimpleQueue()
    left = iter(enumerate(zip(asked["prompts"], asked["tokens"], strict=True)))

    def begin() -> bool:
        if (following := next(left, None)) is None:
            return False
        number, (prompt, tokens) = following
        params = engine.default_params(temperature=0.6, max_tokens=tokens)

        def follow(sequence: Any) -> None:
            sequence.events = Tap(number, events)

        engine.start(Rows.of(prompt), params, follow=follow)
        return True

    began = time.perf_counter()
    running = sum(begin() for _ in range(asked["at_once"]))
    while running:
        _, event = events.get()
        running -= event is None and not begin()
    return time.perf_counter() - began


def run_alone(folder: str, streams: int, pace: str) -> None:
    """Run the engine without a server; one thread takes all tokens. It answers each line with one line."""
    engine = scripted(load(folder, streams), streams, pace)
    gc.freeze()
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": answered(engine, json.loads(line))}), flush=True)
    engine.close()


def main() -> None:
    kind, *given = sys.argv[1:]
    if kind == "web":
        run_web(int(given[0]), given[1])
    else:
        {"engine": run_engine, "alone": run_alone}[kind](given[0], int(given[1]), given[2])


if __name__ == "__main__":
    # -P keeps this file's folder out of the path, and the measured tree is in PYTHONPATH.
    assert Path(__file__).parent.as_posix() not in sys.path
    main()
    sys.stdout.flush()
    os._exit(0)
