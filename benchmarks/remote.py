"""The first token of a server through the remote backend, beside a client that does nothing else.

    python -m benchmarks.remote
    python -m benchmarks.remote openai://127.0.0.1:8000/NAME --turns 50

Without an address, a small server in a process of its own answers at once, `--delay-ms` after each request: then all
that is measured is what the clients add. Both send the same request in turns, on a connection that stays open, and the
time runs from the moment it is sent to the first text: `http.client` with the SSE line found by hand on one side, what
a chat does on the other. A round trip is a request for the list of models by the raw client on the same connection.
Medians are quoted; the first round of each is thrown away.
"""

import argparse
import http.client
import json
import re
import socketserver
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler
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
        """What chatterm adds."""
        return self.chatterm_ms - self.raw_ms

    def line(self) -> str:
        return (
            f"first token: raw client {self.raw_ms:.2f} ms, chatterm {self.chatterm_ms:.2f} ms, "
            f"{self.added_ms:.2f} ms more; a round trip takes {self.round_trip_ms:.2f} ms"
        )


class RawClient:
    """As little as it takes."""

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
        reply.read()  # the connection serves the next request
        assert took, "the server said nothing"
        return took

    def round_trip_s(self) -> float:
        began = time.perf_counter()
        self._http.request("GET", self._path + "/models")
        self._http.getresponse().read()
        return time.perf_counter() - began

    def close(self) -> None:
        self._http.close()


def measured(address: Address, turns: int) -> Times:
    """The two clients in turns."""
    backend = RemoteBackend(address, ChatOptions(sampling={"max_tokens": 4, "temperature": 0.0}), {})
    backend.open()
    named = found(backend.model, {})
    assert named is not None
    client = RawClient(named)
    raw, ours, trips = [], [], []
    try:
        for _ in range(turns + 1):
            trips.append(client.round_trip_s())
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


class _Answering(BaseHTTPRequestHandler):
    """The list of one model, and an answer of three words."""

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
    """The address of a server that answers at once, in another process: its work is not that of a client."""
    code = f"from benchmarks.remote import serve; serve({delay_s})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"openai://127.0.0.1:{int(process.stdout.readline())}/tiny"
        finally:
            process.kill()


def serve(delay_s: float) -> None:
    """Answers until it is killed; prints its port first."""
    _Answering.delay_s = delay_s
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Answering)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address", nargs="?", help="openai://HOST:PORT/MODEL, without a key")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of the server that is started")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if options.address is None:
        with answering(options.delay_ms / 1000) as text:
            times = _times(text, options.turns)
    else:
        times = _times(options.address, options.turns)
    print(times.line())
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump({**asdict(times), "added_ms": times.added_ms, "turns": options.turns}, file, indent=1)


def _times(text: str, turns: int) -> Times:
    address = found(text, {})
    if address is None or address.api != "chat":
        raise SystemExit("The address must be openai://HOST:PORT/MODEL.")
    return measured(address, turns)


if __name__ == "__main__":
    main()
