"""Time to the first token of a server through the remote backend, compared with a minimal client.

    python -m benchmarks.remote
    python -m benchmarks.remote --distance-ms 20 --turns 20
    python -m benchmarks.remote openai://127.0.0.1:8000/NAME --turns 50

Without an address, a small server in a process of its own answers `--delay-ms` after each request, so that only the
overhead of the clients is measured. Both send the same request in turns, on a connection that stays open. The time runs
from sending to the first text: one side uses `http.client` and finds the SSE line by hand, the other does what a chat
does. A round trip is a request for the list of models by the raw client on the same connection. Medians are reported;
the first round of each is discarded.
"""

import argparse
import http.client
import json
import re
import socket
import socketserver
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from http.server import BaseHTTPRequestHandler
from queue import SimpleQueue
from urllib.parse import urlsplit

from chatterm.backends.backend import ChatOptions
from chatterm.backends.remote.address import Address, found
from chatterm.backends.remote.backend import RemoteBackend

_QUESTION = "Name a river."
_TEXT = re.compile(rb'"(content|reasoning|reasoning_content)": ?"[^"]')


@dataclass(frozen=True, slots=True)
class Times:
    """Medians, in milliseconds."""

    raw_ms: float
    chatterm_ms: float
    round_trip_ms: float

    @property
    def added_ms(self) -> float:
        """The time that chatterm adds."""
        return self.chatterm_ms - self.raw_ms

    def line(self) -> str:
        return (
            f"raw client {self.raw_ms:.2f} ms, chatterm {self.chatterm_ms:.2f} ms, {self.added_ms:.2f} ms more; "
            f"a round trip takes {self.round_trip_ms:.2f} ms: {self.added_ms / self.round_trip_ms:.2f} more of them"
        )


class RawClient:
    """A minimal client."""

    def __init__(self, address: Address) -> None:
        parts = urlsplit(address.url)
        self._http = http.client.HTTPConnection(parts.hostname or "", parts.port)
        self._path = parts.path
        message = {"role": "user", "content": _QUESTION}
        body = {
            "model": address.model,
            "messages": [message],
            "stream": True,
            "max_tokens": 4,
            "temperature": 0.0,
        }
        self._body = json.dumps(body)

    def first_token_s(self) -> float:
        began = time.perf_counter()
        self._http.request(
            "POST", self._path + "/chat/completions", self._body, {"Content-Type": "application/json"}
        )
        reply = self._http.getresponse()
        took = 0.0
        while line := reply.readline():
            if not took and _TEXT.search(line):
                took = time.perf_counter() - began
        reply.read()  # so that the connection can serve the next request
        assert took, "the server said nothing"
        return took

    def round_trip_s(self) -> float:
        began = time.perf_counter()
        self._http.request("GET", self._path + "/models")
        self._http.getresponse().read()
        return time.perf_counter() - began

    def close(self) -> None:
        self._http.close()


def measured(address: Address, turns: int, fresh: bool = False) -> Times:
    """Measure the two clients in turns; with `fresh`, each request has a connection of its own."""
    backend, client = _clients(address)
    raw, ours, trips = [], [], []
    try:
        for _ in range(turns + 1):
            trips.append(client.round_trip_s())
            if fresh:
                client.close()
                backend.close()
                backend, client = _clients(address)
            raw.append(client.first_token_s())
            backend.reset()
            began = time.perf_counter()
            events = backend.send(_QUESTION)
            next(events)
            ours.append(time.perf_counter() - began)
            list(events)
    finally:
        client.close()
        backend.close()
    median = [1000 * statistics.median(values[1:]) for values in (raw, ours, trips)]
    return Times(*median)


def _clients(address: Address) -> tuple[RemoteBackend, RawClient]:
    backend = RemoteBackend(address, ChatOptions(sampling={"max_tokens": 4, "temperature": 0.0}), {})
    backend.open()
    named = found(backend.model, {})
    assert named is not None
    return backend, RawClient(replace(address, model=named.model))


class _Answering(BaseHTTPRequestHandler):
    """A server with a list of one model, and an answer of three words."""

    protocol_version = "HTTP/1.1"
    delay_s = 0.0

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send("application/json", json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(self.delay_s)
        words = [{"choices": [{"delta": {"content": word}}]} for word in ("The", " Rhine", ".")]
        messages = [
            json.dumps(word) for word in [*words, {"choices": [{"delta": {}, "finish_reason": "stop"}]}]
        ]
        self._send("text/event-stream", "".join(f"data: {m}\n\n" for m in [*messages, "[DONE]"]).encode())

    def _send(self, kind: str, body: bytes) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        self.wfile.write(head.encode() + body)


@contextmanager
def answering(delay_s: float) -> Iterator[str]:
    """Provide the address of a server that answers at once, in another process, so that no client pays for its work."""
    code = f"from benchmarks.remote import serve; serve({delay_s})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"openai://127.0.0.1:{int(process.stdout.readline())}/tiny"
        finally:
            process.kill()


def serve(delay_s: float) -> None:
    """Print the port, then answer until killed."""
    _Answering.delay_s = delay_s
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Answering)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()


@contextmanager
def far(address: Address, distance_s: float) -> Iterator[Address]:
    """Provide the same server behind a relay that takes `distance_s` one way."""
    there = urlsplit(address.url)

    class Relay(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            time.sleep(2 * distance_s)  # the time of a handshake
            with socket.create_connection((there.hostname or "", there.port or 80)) as server:
                server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _pass_on(self.request, server, distance_s)
                _pass_on(server, self.request, distance_s).join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Relay) as relay:
        relay.daemon_threads = True
        threading.Thread(target=relay.serve_forever, daemon=True).start()
        try:
            yield replace(address, url=f"http://127.0.0.1:{relay.server_address[1]}{there.path}")
        finally:
            relay.shutdown()


def _pass_on(source: socket.socket, target: socket.socket, after_s: float) -> threading.Thread:
    """Forward data, each piece `after_s` later, until either side ends. Return the thread that sends."""
    coming: SimpleQueue[tuple[float, bytes]] = SimpleQueue()

    def take() -> None:
        data = b"-"
        while data:
            try:
                data = source.recv(65536)
            except OSError:
                data = b""
            coming.put((time.perf_counter() + after_s, data))

    def give() -> None:
        while True:
            due, data = coming.get()
            time.sleep(max(due - time.perf_counter(), 0.0))
            try:
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)
            except OSError:
                return

    threading.Thread(target=take, daemon=True).start()
    giving = threading.Thread(target=give, daemon=True)
    giving.start()
    return giving


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address", nargs="?", help="openai://HOST:PORT/MODEL, without a key")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of the server that is started")
    parser.add_argument("--distance-ms", type=float, default=0.0, help="one way to the server")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    with ExitStack() as stack:
        text = options.address or stack.enter_context(answering(options.delay_ms / 1000))
        address = found(text, {})
        if address is None or address.api != "chat":
            raise SystemExit("The address must be openai://HOST:PORT/MODEL.")
        if options.distance_ms:
            address = stack.enter_context(far(address, options.distance_ms / 1000))
        told: dict[str, object] = {"turns": options.turns, "distance_ms": options.distance_ms}
        for name, fresh in (("kept connection", False), ("new connection", True)):
            times = measured(address, options.turns, fresh)
            print(f"first token, {name}: {times.line()}", flush=True)
            told[name] = {**asdict(times), "added_ms": times.added_ms}
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump(told, file, indent=1)


if __name__ == "__main__":
    main()
