"""A server on a loopback port that sends whatever a test wants, as rudely as it wants."""

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Request:
    """What a client sent."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int
    """The number of its connection, from 1."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Handler = Callable[[Request, socket.socket], bool | None]
"""Answers one request; True keeps the connection for the next."""

MODELS = {
    "object": "list",
    "data": [{"id": "tiny", "object": "model", "owned_by": "vllm", "max_model_len": 4096}],
}


@dataclass
class RoughServer:
    """Lists of models are answered with `models`, everything else with the `handlers` in order; the last stays."""

    port: int
    handlers: list[Handler] = field(default_factory=list)
    models: Any = field(default_factory=lambda: MODELS)
    """A document, or a Handler."""
    requests: list[Request] = field(default_factory=list)
    """All but those for a list of models."""
    listings: list[Request] = field(default_factory=list)
    connections: int = 0
    closed: threading.Event = field(default_factory=threading.Event)
    """A client has gone while it was being answered."""

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.port}"

    def handler_for(self, request: Request) -> Handler:
        if request.path.endswith(("/models", "/api/tags")):
            self.listings.append(request)
            return self.models if callable(self.models) else document(self.models)
        self.requests.append(request)
        if not self.handlers:
            return status(500)
        return self.handlers.pop(0) if len(self.handlers) > 1 else self.handlers[0]


@contextmanager
def rough(
    *handlers: Handler, trust: ssl.SSLContext | None = None, models: Any = MODELS
) -> Iterator[RoughServer]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = RoughServer(listener.getsockname()[1], list(handlers), models)
    over = threading.Event()
    open_ones: list[socket.socket] = []

    def serve(sock: socket.socket, number: int) -> None:
        with suppress(OSError), sock:
            if trust is not None:
                sock = trust.wrap_socket(sock, server_side=True)
            source = sock.makefile("rb")
            while not over.is_set():
                try:
                    request = _read(source, number)
                except ValueError:  # as every server of HTTP does: it may be the beginning of TLS
                    status(400)(Request("", "", {}, b"", number), sock)
                    return
                if request is None:
                    break
                if not server.handler_for(request)(request, sock):
                    return
        server.closed.set()

    def accept() -> None:
        while not over.is_set():
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server.connections += 1
            open_ones.append(sock)
            threading.Thread(target=serve, args=(sock, server.connections), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        over.set()
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for sock in open_ones:
            with suppress(OSError):
                sock.close()
        thread.join(5)


def _read(source: Any, number: int) -> Request | None:
    """The next request, or None where there is none. Raises ValueError for what is no HTTP."""
    line = source.readline(65536)
    if not line:
        return None
    first = line.decode("latin-1").split()
    if len(first) != 3 or not first[2].startswith("HTTP/"):
        raise ValueError(line)
    headers = {}
    while (line := source.readline(65536).decode("latin-1").strip()) != "":
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    body = source.read(int(headers.get("content-length", "0")))
    return Request(first[0], first[1], headers, body, number)


# --- what it may do ---


def document(value: Any, code: int = 200, **headers: str) -> Handler:
    return reply(json.dumps(value).encode(), code, "application/json", **headers)


def reply(body: bytes, code: int = 200, content_type: str = "text/plain", **headers: str) -> Handler:
    """A whole answer with a length."""

    def handle(request: Request, sock: socket.socket) -> bool:
        lines = [f"HTTP/1.1 {code} X", f"Content-Type: {content_type}", f"Content-Length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        sock.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        return True

    return handle


def status(code: int, message: str = "", **headers: str) -> Handler:
    return document({"error": {"message": message}} if message else {}, code, **headers)


def stream(
    *parts: bytes, pause_s: float = 0.0, ends: bool = True, content_type: str = "text/event-stream"
) -> Handler:
    """Parts as chunks of a body; without an end the connection breaks off behind them."""

    def handle(request: Request, sock: socket.socket) -> bool:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nTransfer-Encoding: chunked\r\n\r\n"
        sock.sendall(head.encode())
        for part in parts:
            if part:
                sock.sendall(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            time.sleep(pause_s)
        if ends:
            sock.sendall(b"0\r\n\r\n")
        return ends

    return handle


def gated(gate: threading.Event, before: Sequence[bytes], after: Sequence[bytes] = ()) -> Handler:
    """`after` only comes once the gate is open."""

    def handle(request: Request, sock: socket.socket) -> bool:
        sock.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for part in before:
            sock.sendall(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        gate.wait(30)
        for part in after:
            sock.sendall(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        sock.sendall(b"0\r\n\r\n")
        return True

    return handle


def breaks(request: Request, sock: socket.socket) -> None:
    """Not a byte comes."""


def drips(request: Request, sock: socket.socket) -> None:
    """A head comes byte by byte, and never ends."""
    sock.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        sock.sendall(b"x")
        time.sleep(0.01)


def events(*messages: Any, done: bool = True) -> list[bytes]:
    """Messages as server-sent events, each a part."""
    parts = [b"data: " + json.dumps(message).encode() + b"\n\n" for message in messages]
    return [*parts, b"data: [DONE]\n\n"] if done else parts


def delta(text: str = "", finish: str | None = None, **more: Any) -> dict[str, Any]:
    """A chunk of a chat completion."""
    said = ({"content": text} if text else {}) | more
    return {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": said, "finish_reason": finish}],
    }


def usage(prompt: int, generated: int, cached: int = 0) -> dict[str, Any]:
    """The chunk behind the last."""
    told = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
    return {"choices": [], "usage": told | {"prompt_tokens_details": {"cached_tokens": cached}}}


def said(*words: str, prompt: int = 12, cached: int = 0) -> Handler:
    """A whole answer."""
    return stream(*events(*map(delta, words), delta(finish="stop"), usage(prompt, len(words), cached)))
