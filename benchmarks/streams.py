"""Many requests to one engine, all watched by one thread that records when each token came."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from inspect import signature
from queue import SimpleQueue
from time import perf_counter
from typing import Any

from engine import Engine, SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and the number of tokens to generate after it."""

    prompt: list[int]
    tokens: int


@dataclass(slots=True, eq=False)
class Stream:
    """A request in progress; times are those of `perf_counter`, taken where the engine hands a token out."""

    request: Request
    sequence: Any = None
    started: float = 0.0
    times: list[float] = field(default_factory=list)
    """The time of each token so far."""
    done: bool = False

    def gaps(self, begin: float, end: float) -> list[float]:
        """Return the seconds between neighbouring tokens whose gaps overlap the time from `begin` to `end`."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [later - earlier for earlier, later in pairs if begin <= later and earlier <= end]


class _Tap:
    """Receives a sequence's events: records the time, and passes them on to one queue for all streams."""

    def __init__(self, stream: Stream, together: "SimpleQueue[tuple[Stream, float, Any]]") -> None:
        self._stream, self._together = stream, together

    def put(self, event: Any) -> None:
        self._together.put((self._stream, perf_counter(), event))


class Crowd:
    """The streams of one engine."""

    def __init__(self, engine: Engine, temperature: float) -> None:
        self._engine = engine
        self._temperature = temperature
        self._events: SimpleQueue[tuple[Stream, float, Any]] = SimpleQueue()
        self.running: set[Stream] = set()

    def start(self, request: Request) -> Stream:
        """Queue a request."""
        stream = Stream(request)

        def follow(sequence: Any) -> None:
            stream.sequence = sequence
            sequence.events = _Tap(stream, self._events)

        params = SamplingParams(temperature=self._temperature, max_tokens=request.tokens)
        stream.started = perf_counter()
        self._engine.start(rows_of(request.prompt), params, follow=follow)
        self.running.add(stream)
        return stream

    def wait(self) -> Stream:
        """Wait for the next token or end of any stream. Raises RuntimeError if a stream is too short."""
        stream, when, event = self._events.get()
        if event is not None:
            stream.times.append(when)
            return stream
        self.running.remove(stream)
        stream.done = True
        if stream.sequence.error is not None:
            raise stream.sequence.error
        if len(stream.times) != stream.request.tokens and not stream.sequence.cancelled:
            raise RuntimeError(f"a stream ended after {len(stream.times)} of {stream.request.tokens} tokens")
        return stream

    def cancel(self) -> None:
        """End all running streams, and wait for that."""
        for stream in self.running:
            stream.sequence.cancelled = True
        while self.running:
            self.wait()


def serve(engine: Engine, requests: Iterable[Request], at_once: int, temperature: float) -> list[Stream]:
    """Answer all requests, at most `at_once` at a time: when one ends, the next is started."""
    crowd, left = Crowd(engine, temperature), iter(requests)
    streams = [crowd.start(request) for _, request in zip(range(at_once), left, strict=False)]
    while crowd.running:
        if crowd.wait().done and (following := next(left, None)) is not None:
            streams.append(crowd.start(following))
    return streams


def room_for(streams: int) -> dict[str, int]:
    """Return the option that makes an engine reserve room for `streams` streams; older trees have none."""
    return {"streams": streams} if "streams" in signature(Engine.load).parameters else {}


def rows_of(token_ids: list[int]) -> Any:
    """Return the rows of a prompt."""
    try:
        from engine.cache.rows import Rows
    except ImportError:  # an older tree, which is measured beside this one
        from engine.engine import Rows  # type: ignore[attr-defined,no-redef]

    return Rows.of(token_ids)
