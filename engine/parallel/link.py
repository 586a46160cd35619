"""Messages between rank 0 and another rank over a socket: a length in 8 bytes (little-endian), then the bytes."""

import json
import socket
from contextlib import suppress
from time import sleep
from typing import Any

_LENGTH = 8
_BEAT_S = 1.0


def send(link: socket.socket, message: bytes) -> None:
    """Send a message. Raises OSError when the other end is gone."""
    link.sendall(len(message).to_bytes(_LENGTH, "little") + message)


def receive(link: socket.socket) -> bytes | None:
    """Return the next message, or None when the other end is gone."""
    try:
        head = _exactly(link, _LENGTH)
        return _exactly(link, int.from_bytes(head, "little"))
    except OSError:
        return None


def tell(link: socket.socket, words: dict[str, Any]) -> None:
    """Send `words` as JSON: for rare messages, such as how a rank begins and what went wrong."""
    send(link, json.dumps(words).encode())


def beat(link: socket.socket) -> None:
    """Send an empty message every second, as a sign of life, until the other end is gone."""
    with suppress(OSError):
        while True:
            send(link, b"")
            sleep(_BEAT_S)


def hear(link: socket.socket) -> dict[str, Any] | None:
    """Return the next JSON message; None when the other end is gone, or silent for longer than the socket's timeout."""
    message: bytes | None = b""
    while message == b"":
        message = receive(link)
    found = None if message is None else json.loads(message)
    return found if isinstance(found, dict) else None


def _exactly(link: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        got = link.recv_into(view[done:])
        if not got:
            raise OSError("the other end is gone")
        done += got
    return bytes(data)
