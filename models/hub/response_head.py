"""A deadline for the head of an HTTP response: a limit of single reads does not end one that comes byte by byte.

How long a server takes until it begins to answer is not limited here: a model may read a prompt for minutes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

HEAD_S = 30.0
"""Seconds from the first byte of a head to its last; it is a few hundred bytes, sent at once."""
_SOON_S = 0.001
"""The limit of a read once the time is over; 0 would not wait even for what has arrived."""
_END = re.compile(rb"\n\r?\n")
_INTERIM = re.compile(rb"HTTP/1\.\d 1")
"""How a response begins that another one follows."""


@dataclass(slots=True)
class Head:
    """Follows the bytes of one connection."""

    is_due: bool = False
    until: float | None = None
    """Of the monotonic clock, once a head has begun."""
    came: bytes = b""

    def sent(self) -> None:
        """A request was written: a head comes next."""
        self.is_due, self.until, self.came = True, None, b""

    def limit(self, timeout: float | None) -> float | None:
        """Return how long the next read may take in seconds, where `timeout` is what it may take anyway."""
        if self.until is None:
            return timeout
        left = max(self.until - monotonic(), _SOON_S)
        return left if timeout is None else min(left, timeout)

    def read(self, data: bytes) -> None:
        """These bytes have been read."""
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
    """Limit the heads on the connection that was opened: the `trace` extension of a request of httpx.

    A head that is late then ends the request with httpx's ReadTimeout.
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
    """As `limit_head`, for an asynchronous client."""
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
    """Return the stream that was opened, or that TLS was begun on; None at any other stage."""
    return (
        info.get("return_value") if name.endswith((".connect_tcp.complete", ".start_tls.complete")) else None
    )
