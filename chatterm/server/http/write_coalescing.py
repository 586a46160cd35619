"""A transport that writes what one turn of the event loop has for it at once: headers, events, the end of a stream."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class GatheringTransport:
    """Stands before a transport, whose other methods are its own. A system call costs more than an event does."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.lingers: Callable[[], bool] | None = None
        """Asked when it is to be closed: whether the other side is first to send what it has."""
        self._has_said_all = False
        self._loop = asyncio.get_running_loop()
        self._gathered: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Have it written before the event loop waits for anything."""
        if not self._gathered:
            self._loop.call_soon(self._flush)
        self._gathered.append(data)

    def close(self) -> None:
        """Write what there is, then part; where it lingers, only once the other side does, or this is called again."""
        self._flush()
        if not self.is_closing() and self.lingers is not None and self.lingers():
            self._has_said_all = True
            with suppress(OSError):  # the other side is gone, which is seen elsewhere
                self._transport.write_eof()
        else:
            self._transport.close()

    def is_closing(self) -> bool:
        """Whether nothing more can be written."""
        return self._has_said_all or self._transport.is_closing()

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        if gathered and not self.is_closing():
            self._transport.write(b"".join(gathered))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
