"""Streams: server-sent events, keep-alive comments, and the detection of clients that have gone."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from time import monotonic
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams."""
ALIVE = b": still there\n\n"
"""A comment that keeps proxies from timing out."""
QUIET_S = 10.0
"""Seconds without an event after which `ALIVE` is sent."""

_OTHER_LINE_ENDS = [(char.encode(), b"\\u%04x" % ord(char)) for char in "\x85\u2028\u2029"]
"""Some clients also end lines at these; JSON has them within strings only."""
_ENCODER = msgspec.json.Encoder()


def event(data: Any, name: str | None = None) -> bytes:
    """Encode an event, with JSON as its data."""
    head = f"event: {name}\n".encode() if name is not None else b""
    return b"%bdata: %b\n\n" % (head, _ENCODER.encode(data))


def line(data: Any) -> bytes:
    """Encode a line of NDJSON."""
    written = _ENCODER.encode(data)
    if not written.isascii():
        for character, escape in _OTHER_LINE_ENDS:
            written = written.replace(character, escape)
    return written + b"\n"


class ClientGone(Exception):
    """The client has closed the connection."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, or raise ClientGone when the client disconnects. The request's body must have been read.

    Like `asyncio.timeout`, this cancels the current task, which saves one task per request.
    """
    task = asyncio.current_task()
    assert task is not None
    is_gone = is_over = False

    def leave(watch: asyncio.Task[None]) -> None:
        nonlocal is_gone
        if not watch.cancelled() and not is_over:
            is_gone = True
            task.cancel()

    watch = asyncio.ensure_future(_gone(receive))
    watch.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and task.uncancel() <= 0:
            raise ClientGone from None
        raise
    finally:
        is_over = True
        watch.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class StreamedResponse:
    """A response that is sent in pieces; `alive` is sent after a long silence."""

    def __init__(self, send: Send, content_type: bytes, alive: bytes | None) -> None:
        self._send = send
        self._type = content_type
        self._alive = alive
        self._latest = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.has_begun = False
        """Whether the status has been sent."""

    async def begin(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Send status 200 and the headers."""
        self.has_begun = True
        kept = [(b"content-type", self._type), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await self._send({"type": "http.response.start", "status": 200, "headers": [*kept, *headers]})
        self._latest = monotonic()
        if self._alive is not None:
            self._timer = asyncio.get_running_loop().call_later(QUIET_S, self._keep_alive)

    async def write(self, chunks: list[bytes]) -> None:
        """Send these chunks as one."""
        if chunks:
            self._latest = monotonic()
            body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, chunks: list[bytes]) -> None:
        """Send the last chunks."""
        await self._send({"type": "http.response.body", "body": b"".join(chunks), "more_body": False})

    def close(self) -> None:
        """Stop keeping the stream alive."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()

    def _keep_alive(self) -> None:
        """Send `alive` after a long silence, and call this again later, until `close`."""
        loop, left = asyncio.get_running_loop(), self._latest + QUIET_S - monotonic()
        if left <= 0 and self._alive is not None:
            task = loop.create_task(self.write([self._alive]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._timer = loop.call_later(left if left > 0 else QUIET_S, self._keep_alive)
