"""A deadline for the head of an HTTP response. A timeout for each read would not end one that comes byte by byte.

The time until a server begins to answer is not limited here: a model may take minutes to read a prompt.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

HEAD_S = 30.0
"""Seconds from the first byte of a head to its last; it is a few hundred bytes, sent at once."""
_SOON_S = 0.001
"""The timeout of a read, in seconds, once the deadline has passed. With 0, data that has arrived would not be read."""
_END = re.compile(rb"\n\r?\n")
_INTERIM = re.compile(rb"HTTP/1\.\d 1")
"""How an interim response begins (status 1xx), which another response follows."""


@dataclass(slots=True)
class Head:
    """Follows the bytes of one connection, to tell which of them belong to the head of a response."""

    is_due: bool = False
    until: float | None = None
    """The deadline, by `time.monotonic()`; None unless a head has begun."""
    came: bytes = b""

    def sent(self) -> None:
        """Note that a request was sent: the next bytes that are read begin a head."""
        self.is_due, self.until, self.came = True, None, b""

    def limit(self, timeout: float | None) -> float | None:
        """Return the timeout of the next read in seconds: `timeout` (None: no limit), or less to meet the deadline."""
        if self.until is None:
            return timeout
        left = max(self.until - monotonic(), _SOON_S)
        return left if timeout is None else min(left, timeout)

    def read(self, data: bytes) -> None:
        """Note that `data` was read."""
        while self.is_due and data:
            self.until = self.until or monotonic() + HEAD_S
            seen = max(len(self.came) - 2, 0)
            self.came += data
            end = _END.search(self.came, seen)
            if end is None:
                return
            data = self.came[end.end() :]
            if _INTERIM.match(self.came):
                self.sent()
            else:
                self.is_due, self.until, self.came = False, None, b""


def limit_head(name: str, info: Mapping[str, Any]) -> None:
    """Set a deadline for the heads on a connection when it is opened; for the `trace` extension of an httpx request.

    A request whose head is late then ends with httpx's ReadTimeout.
    """
    if (stream := _opened(name, info)) is None:
        return
    head, read, write = Head(), stream.read, stream.write

    def limited_read(max_bytes: int, timeout: float | None = None) -> bytes:
        data: bytes = read(max_bytes, head.limit(timeout))
        head.read(data)
        return data

    def noted_write(buffer: bytes, timeout: float | None = None) -> None:
        head.sent()
        write(buffer, timeout)

    stream.read, stream.write = limited_read, noted_write


async def limit_head_async(name: str, info: Mapping[str, Any]) -> None:
    """Do what `limit_head` does, for an asynchronous client."""
    if (stream := _opened(name, info)) is None:
        return
    head, read, write = Head(), stream.read, stream.write

    async def limited_read(max_bytes: int, timeout: float | None = None) -> bytes:
        data: bytes = await read(max_bytes, head.limit(timeout))
        head.read(data)
        return data

    async def noted_write(buffer: bytes, timeout: float | None = None) -> None:
        head.sent()
        await write(buffer, timeout)

    stream.read, stream.write = limited_read, noted_write


def _opened(name: str, info: Mapping[str, Any]) -> Any:
    """Return the stream that was just opened, or on which TLS was just started; None for any other event."""
    return (
        info.get("return_value") if name.endswith((".connect_tcp.complete", ".start_tls.complete")) else None
    )
