"""Limits of requests, and the admission queue in front of the engine."""

import asyncio
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from time import monotonic

from chatterm.server.http.errors import stopping
from chatterm.server.service import RequestError


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits; times in seconds, sizes in bytes."""

    running: int = 64
    """Answers that are computed at the same time; each of a request's n answers counts."""
    waiting: int = 256
    """Requests that may be queued; more are refused with 429."""
    queue_s: float = 120.0
    """How long a request may be queued."""
    request_s: float = 3600.0
    """How long an answer may take."""
    answers: int = 16
    """Answers of one request: `n` for each of its prompts."""
    context: int | None = None
    """Tokens of a request's prompt and answer; None: the model's context."""
    body_bytes: int = 16 * 2**20
    body_s: float = 30.0
    """How long a client may take to send a body."""
    refused_bytes: int = 256 * 2**20
    """How much a client may still send after an early response (for `body_s` at most), so that it can read that."""
    header_bytes: int = 32 * 2**10
    header_s: float = 10.0
    """How long a client may take to send the headers."""
    write_s: float = 30.0
    """How long a client may leave unread what was sent to it."""
    connections: int = 1024
    shutdown_s: float = 5.0
    """How long running requests may continue when the server stops."""

    def room(self, context: int | None) -> int | None:
        """Return the limit of tokens of a request to a model with this context; None: no limit is known."""
        return min((size for size in (context, self.context) if size is not None), default=None)


@dataclass(slots=True, eq=False)
class _Waiting:
    size: int
    model: str
    turn: asyncio.Future[None]


class AdmissionQueue:
    """Admits requests to the engine, `running` answers at once. Each client has its own queue, served round-robin."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lines: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        self._free = limits.running
        self._unread = 0
        """Finished answers that hold no slot any more but are still unread."""
        self._took = 1.0
        """Smoothed duration of a request, in seconds."""
        self.closing = asyncio.Event()
        """Set when the server stops: streams end, and nothing new begins."""

    @property
    def running(self) -> int:
        """Answers that are being computed."""
        return self._limits.running - self._free

    @property
    def waiting(self) -> int:
        """Requests that are queued."""
        return sum(map(len, self._lines.values()))

    def queued(self) -> dict[str, int]:
        """Return the number of queued answers by model."""
        found: Counter[str] = Counter()
        for line in self._lines.values():
            for waiting in line:
                found[waiting.model] += waiting.size
        return dict(found)

    def turn(self, client: str, size: int, model: str = "") -> "Ticket":
        """Return a ticket for `size` answers of `model`."""
        return Ticket(self, client, min(size, self._limits.running), model)

    def leave_unread(self, size: int) -> bool:
        """Count `size` finished answers as unread; return False if these would take too much memory."""
        if self._unread + size > self._limits.running:
            return False
        self._unread += size
        return True

    def read(self, size: int) -> None:
        """Count `size` unread answers as read."""
        self._unread -= size

    async def enter(self, client: str, size: int, model: str) -> None:
        """Wait for `size` free slots.

        Raises RequestError: 429 if too many requests wait or it takes too long, 503 when the server stops.
        """
        if self.closing.is_set():
            raise stopping()
        if not self._lines and size <= self._free:
            self._free -= size
            return
        if self.waiting >= self._limits.waiting:
            raise self._busy("Too many requests are waiting")
        waiting = _Waiting(size, model, asyncio.get_running_loop().create_future())
        self._lines.setdefault(client, deque()).append(waiting)
        try:
            async with asyncio.timeout(self._limits.queue_s):
                await waiting.turn
        except BaseException as error:
            if waiting.turn.done() and not waiting.turn.cancelled() and waiting.turn.exception() is None:
                self._free_again(size)  # its turn came in the same moment
            else:
                self._drop(client, waiting)
            if isinstance(error, TimeoutError):
                raise self._busy("The request waited too long for its turn") from None
            raise

    def close(self) -> None:
        """Admit nothing more; requests that wait fail with an error."""
        self.closing.set()
        for line in self._lines.values():
            for waiting in line:
                if not waiting.turn.done():
                    waiting.turn.set_exception(stopping())

    def leave(self, size: int, took_s: float) -> None:
        """Free the slots of a request that held them for `took_s` seconds."""
        self._took += 0.1 * (took_s - self._took)
        self._free_again(size)

    def _free_again(self, size: int) -> None:
        self._free += size
        self._next()

    def _next(self) -> None:
        """Admit what fits, one request per client in turn. Small requests never overtake large ones."""
        while self._lines:
            client, line = next(iter(self._lines.items()))
            if line[0].turn.done():
                line.popleft()
            elif line[0].size <= self._free:
                waiting = line.popleft()
                self._free -= waiting.size
                waiting.turn.set_result(None)
                self._lines.move_to_end(client)
            else:
                return
            if not line:
                del self._lines[client]

    def _drop(self, client: str, waiting: _Waiting) -> None:
        if (line := self._lines.get(client)) is not None and waiting in line:
            line.remove(waiting)
            if not line:
                del self._lines[client]
        self._next()

    def _busy(self, what: str) -> RequestError:
        expected = self._took * (self.waiting + 1) / self._limits.running
        return RequestError(
            429,
            "rate_limit_error",
            f"{what}; try again later.",
            code="rate_limit_exceeded",
            retry_after_s=min(max(expected, 1.0), 120.0),
        )


class Ticket:
    """Holds slots for the length of an `async with` block, which yields the seconds waited, or until `finished`."""

    def __init__(self, gate: AdmissionQueue, client: str, size: int, model: str) -> None:
        self._gate = gate
        self._asked = (client, size, model)
        self._size = size
        self._began = 0.0
        self._is_held = False

    async def __aenter__(self) -> float:
        asked = monotonic()
        await self._gate.enter(*self._asked)
        self._began, self._is_held = monotonic(), True
        return self._began - asked

    async def __aexit__(self, *error: object) -> None:
        if self._is_held:
            self._leave()
        else:
            self._gate.read(self._size)

    def finished(self) -> None:
        """Free the slots, as the engine is done with the request, unless too much is unread."""
        if self._is_held and self._gate.leave_unread(self._size):
            self._leave()

    def _leave(self) -> None:
        self._is_held = False
        self._gate.leave(self._size, monotonic() - self._began)
