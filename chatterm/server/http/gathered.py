"""A transport that writes what one turn of the event loop has for it at once: headers, events, the end of a stream."""

import asyncio
from typing import Any


class GatheringTransport:
    """Stands before a transport, whose other methods are its own. A system call costs more than an event does."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._gathered: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Have it written before the event loop waits for anything."""
        if not self._gathered:
            self._loop.call_soon(self._flush)
        self._gathered.append(data)

    def close(self) -> None:
        """Write what there is, then part."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        if gathered and not self._transport.is_closing():
            self._transport.write(b"".join(gathered))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
