"""Streams: server-sent events, what is sent while there is nothing to say, and clients that have gone."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from time import monotonic
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams."""
ALIVE = b": still there\n\n"
"""A comment: it keeps proxies from giving up."""
QUIET_S = 10.0
"""Seconds without an event after which it is sent."""

_ENCODER = msgspec.json.Encoder()


def event(data: Any, name: str | None = None) -> bytes:
    """One event, with JSON as its data."""
    head = f"event: {name}\n".encode() if name is not None else b""
    return b"%bdata: %b\n\n" % (head, _ENCODER.encode(data))


def line(data: Any) -> bytes:
    """One line of NDJSON."""
    return _ENCODER.encode(data) + b"\n"


class ClientGone(Exception):
    """The client has closed the connection: nobody reads what would be sent."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do this as long as the client is there; its body has been read. Raises ClientGone when it goes away."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, watch):
            if not each.done():
                each.cancel()
                with suppress(asyncio.CancelledError):
                    await each
        del task, watch, each  # an error refers to this frame, and the task to the error


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Stream:
    """A response that is sent in pieces; `alive` is sent where there is nothing to say for long."""

    def __init__(self, send: Send, content_type: bytes, alive: bytes | None) -> None:
        self._send = send
        self._type = content_type
        self._alive = alive
        self._latest = 0.0
        self._begun = asyncio.Event()

    @property
    def has_begun(self) -> bool:
        """Whether the status has been sent."""
        return self._begun.is_set()

    async def begin(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Send status 200 and the headers."""
        self._begun.set()
        self._latest = monotonic()
        kept = [(b"content-type", self._type), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await self._send({"type": "http.response.start", "status": 200, "headers": [*kept, *headers]})

    async def write(self, chunks: list[bytes]) -> None:
        """Send these at once."""
        if chunks:
            self._latest = monotonic()
            body = b"".join(chunks)
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        """Nothing follows."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def keep_alive(self) -> None:
        """Runs beside the stream, until it is cancelled."""
        await self._begun.wait()
        while self._alive is not None:
            left = self._latest + QUIET_S - monotonic()
            if left <= 0:
                await self.write([self._alive])
            else:
                await asyncio.sleep(left)
