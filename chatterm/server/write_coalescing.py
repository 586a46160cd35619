"""A transport that joins the writes of one iteration of the event loop: headers and events, or frames."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class GatheringTransport:
    """Wraps a transport and joins its writes, as a system call costs more than an event. Other methods pass through."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.lingers: Callable[[], bool] | None = None
        """Returns, on `close`, whether the other side may first send the rest of what it has."""
        self._has_said_all = False
        self._loop = asyncio.get_running_loop()
        self._gathered: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Queue data, which is written before the event loop waits for anything."""
        if not self._gathered:
            self._loop.call_soon(self._flush)
        self._gathered.append(data)

    def close(self) -> None:
        """Write what is queued, then close; if it lingers, only once the other side does, or on the next call."""
        self._flush()
        if not self.is_closing() and self.lingers is not None and self.lingers():
            self._has_said_all = True
            with suppress(OSError):  # the other side is gone, which is handled elsewhere
                self._transport.write_eof()
        else:
            self._transport.close()

    def is_closing(self) -> bool:
        """Return whether nothing more can be written."""
        return self._has_said_all or self._transport.is_closing()

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        if gathered and not self.is_closing():
            self._transport.write(b"".join(gathered))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
