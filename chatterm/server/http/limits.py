"""What the server lets through: bounds of requests, and the queue in front of the engine."""

import asyncio
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from time import monotonic

from chatterm.server.http.errors import stopping
from chatterm.server.service import RequestError


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds; times in seconds, sizes in bytes."""

    running: int = 64
    """Answers that are computed at the same time; each of the n answers of a request counts."""
    waiting: int = 256
    """Requests that wait for their turn; more are refused with 429."""
    queue_s: float = 120.0
    """How long a request waits for its turn."""
    request_s: float = 3600.0
    """How long an answer may take."""
    answers: int = 16
    """The answers (`n`, prompts of a list) of one request."""
    context: int | None = None
    """Tokens of prompt and answer of a request; None: as many as the model holds."""
    body_bytes: int = 16 * 2**20
    body_s: float = 30.0
    """How long a client may take to send a body."""
    refused_bytes: int = 256 * 2**20
    """How much a client may go on sending after its answer (for `body_s` at most), so that it gets to read that."""
    header_bytes: int = 32 * 2**10
    header_s: float = 10.0
    """The same for the headers."""
    write_s: float = 30.0
    """How long a client may leave unread what was sent to it."""
    connections: int = 1024
    shutdown_s: float = 5.0
    """How long requests have for their last words when the server stops."""

    def room(self, context: int | None) -> int | None:
        """Tokens that a request may have with a model of that context; None: no limit is known."""
        return min((size for size in (context, self.context) if size is not None), default=None)


@dataclass(slots=True, eq=False)
class _Waiting:
    size: int
    model: str
    turn: asyncio.Future[None]


class AdmissionQueue:
    """Lets requests to the engine, `running` answers at once. Each client has a line to wait in; lines take turns."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lines: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        self._free = limits.running
        self._unread = 0
        """Answers that have no turn any more but are yet to be read."""
        self._took = 1.0
        """Seconds that a request takes, smoothed."""
        self.closing = asyncio.Event()
        """Set when the server stops: streams end, and nothing new begins."""

    @property
    def running(self) -> int:
        """Answers that are being computed."""
        return self._limits.running - self._free

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(map(len, self._lines.values()))

    def queued(self) -> dict[str, int]:
        """Answers that wait, by model."""
        found: Counter[str] = Counter()
        for line in self._lines.values():
            for waiting in line:
                found[waiting.model] += waiting.size
        return dict(found)

    def turn(self, client: str, size: int, model: str = "") -> "Ticket":
        """A turn of `size` answers of `model`."""
        return Ticket(self, client, min(size, self._limits.running), model)

    def leave_unread(self, size: int) -> bool:
        """Have so many answers more without a turn that are yet to be read; False: that would take too much memory."""
        if self._unread + size > self._limits.running:
            return False
        self._unread += size
        return True

    def read(self, size: int) -> None:
        """So many of those have been read."""
        self._unread -= size

    async def enter(self, client: str, size: int, model: str) -> None:
        """Wait for a turn.

        Raises RequestError: 429 where too many wait or it takes too long, 503 when the server stops.
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
        """Nothing begins any more; who waits is told so."""
        self.closing.set()
        for line in self._lines.values():
            for waiting in line:
                if not waiting.turn.done():
                    waiting.turn.set_exception(stopping())

    def leave(self, size: int, took_s: float) -> None:
        """A turn is over."""
        self._took += 0.1 * (took_s - self._took)
        self._free_again(size)

    def _free_again(self, size: int) -> None:
        self._free += size
        self._next()

    def _next(self) -> None:
        """Give turns: one from each line, then the next line. Nobody is overtaken by who needs less room."""
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
    """Waited for where its block begins, which gets the seconds waited; over at its end, or earlier."""

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
        """The engine has no more to do for it: others may begin, unless too much is unread."""
        if self._is_held and self._gate.leave_unread(self._size):
            self._leave()

    def _leave(self) -> None:
        self._is_held = False
        self._gate.leave(self._size, monotonic() - self._began)
