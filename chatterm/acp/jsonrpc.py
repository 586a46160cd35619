"""Messages as lines of JSON on two file descriptors. Invalid lines are answered here and not passed on."""

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

from chatterm.terminal.sanitize import one_line

LONGEST = 64 * 1024 * 1024
"""The longest message read, in bytes."""
_WAITING = 1_000
"""The most messages queued; reading pauses while the queue is full."""
_INVALID, _NO_JSON, _WRONG_PARAMS = -32600, -32700, -32602


class LineTransport:
    """The transport of the SDK's connection, for one event loop. One thread reads, and one at a time writes."""

    def __init__(self, source: int, target: int) -> None:
        self._source, self._target = source, target
        self._loop = asyncio.get_running_loop()
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._room = threading.Semaphore(_WAITING)
        self._writing = asyncio.Lock()
        threading.Thread(target=self._read, name="acp", daemon=True).start()

    async def send(self, message: dict[str, Any]) -> None:
        """Send a message. Raises ConnectionError if the other side is gone."""
        try:
            data = json.dumps(format_message(message), separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            data = json.dumps(_error(message.get("id"), -32603, "The answer cannot be written as JSON."))
        async with self._writing:
            await asyncio.to_thread(self._write, data.encode() + b"\n")

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message; None at the end. Invalid lines are answered with an error."""
        while (line := await self._lines.get()) is not None:
            self._room.release()
            message, problem = parse_line(line)
            if message is not None:
                return message
            if problem is not None:
                await self.send(problem)
        return None

    async def close(self) -> None:
        """Do nothing: sent messages are already written."""

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._target, view) :]
        except OSError as error:
            raise ConnectionError(error.strerror or "The other side has closed the connection.") from None

    def _read(self) -> None:
        for line in _read_lines(self._source):
            self._room.acquire()
            if not self._put(line):
                return
        self._put(None)

    def _put(self, line: bytes | None) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._lines.put_nowait, line)
        except RuntimeError:  # the loop has ended
            return False
        return True


def _read_lines(source: int) -> Iterator[bytes]:
    """Yield the lines of a file descriptor. Of a line longer than LONGEST, yield the first LONGEST + 1 bytes."""
    held, is_lost = bytearray(), False
    while True:
        try:
            data = os.read(source, 1 << 16)
        except OSError:
            data = b""
        if not data:
            if held and not is_lost:
                yield bytes(held)
            return
        *whole, rest = data.split(b"\n")
        for part in whole:
            if not is_lost:
                held += part
                yield bytes(held[: LONGEST + 1])
            held, is_lost = bytearray(), False
        if not is_lost:
            held += rest
            if len(held) > LONGEST:
                yield bytes(held[: LONGEST + 1])
                held, is_lost = bytearray(), True


def parse_line(line: bytes) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Parse a line: return a message that is safe for the SDK, or an error to send back; neither for a blank line."""
    if not line.strip():
        return None, None
    if len(line) > LONGEST:
        return None, _error(None, _INVALID, f"A message may have at most {LONGEST:,} bytes.")
    try:
        message = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None, _error(None, _NO_JSON, "This line is not JSON.")
    if not isinstance(message, dict):
        return None, _error(None, _INVALID, "A message must be a JSON object.")
    id = message.get("id")
    if isinstance(id, bool) or not isinstance(id, str | int | None):
        return None, _error(None, _INVALID, "The id of a message must be a string or a whole number.")
    if "method" not in message:
        if not isinstance(message.get("error", {}), dict):
            message["error"] = {}
        return message, None
    if not isinstance(message["method"], str):
        return None, _error(id, _INVALID, "The method of a message must be a string.")
    params = message.get("params")
    if not isinstance(params, dict | None):
        return None, _error(id, _INVALID, "The params of a message must be an object.")
    # The SDK would pass what is in _meta on as arguments, unchecked.
    message["params"] = {name: value for name, value in (params or {}).items() if name != "_meta"}
    return message, None


def format_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as it is sent: an error on parameters becomes one line, without the values received."""
    error = message.get("error")
    if not isinstance(error, dict) or error.get("code") != _WRONG_PARAMS:
        return message
    data = error.get("data")
    found = data.get("errors") if isinstance(data, dict) else None
    if not isinstance(found, list):
        return message
    parts = [f"{'.'.join(map(str, one['loc'])) or 'params'}: {one['msg']}" for one in found[:3]]
    return {**message, "error": {"code": _WRONG_PARAMS, "message": one_line("; ".join(parts), 300)}}


def _no_number(text: str) -> float:
    """Raise ValueError: JSON has neither NaN nor Infinity."""
    raise ValueError(text)


def _error(id: Any, code: int, text: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": text}}
