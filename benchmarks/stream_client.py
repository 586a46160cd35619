"""A client that reads streams and barely looks at them: while others are served, it only records what arrives when.

The received data is parsed later (`Received.answer`), so that the server is measured and not the client.
"""

import asyncio
import json
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit


@dataclass(slots=True)
class Answer:
    """One answer; times in seconds."""

    first_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Seconds between pieces of text that arrive at different times; what is read at once counts as one piece."""
    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    thinking_tokens: int = 0


@dataclass(slots=True)
class Received:
    """All bytes of a connection, as they came; times are of `perf_counter`."""

    began: float
    pieces: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def answer(self) -> Answer:
        """Parse what was said when. Raises ValueError unless it is a complete stream."""
        data, ends = b"".join(self.pieces), list(accumulate(map(len, self.pieces)))
        head, _, _ = data.partition(b"\r\n\r\n")
        status = head.partition(b"\r\n")[0]
        if b" 200 " not in status:
            raise ValueError(
                f"{status.decode('latin-1')} {data[len(head) :].decode('utf-8', 'replace').strip()}"
            )
        answer, latest, is_over = Answer(), 0.0, False
        at = len(head)
        # An event is one line. HTTP chunks do not matter, because none of them cuts an event.
        while (at := data.find(b"\ndata: ", at)) >= 0:
            end = data.find(b"\n", at + 1)
            if end < 0:
                break
            line, at = data[at + 7 : end].strip(), end
            if line == b"[DONE]":
                is_over = True
                break
            event = json.loads(line)
            _read(answer, event)
            if not _says(event):
                continue
            now = self.times[bisect_left(ends, end)]
            if answer.first_s and now > latest:
                answer.gaps_s.append(now - latest)
            elif not answer.first_s:
                answer.first_s = now - self.began
            latest = now
        if not is_over:
            raise ValueError(f"the stream broke off after {len(data):,} bytes: {data[-200:]!r}")
        return answer


def _says(event: Any) -> bool:
    """Return whether an event has text: the first of a chat has only a role, the last only a reason."""
    for choice in event.get("choices", ()):
        said = choice.get("delta", choice)
        if any(said.get(name) for name in ("text", "content", "reasoning", "reasoning_content")):
            return True
    return False


def _read(answer: Answer, event: Any) -> None:
    if "error" in event:
        raise ValueError(f"{event['error']}")
    for choice in event.get("choices", ()):
        answer.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    if (usage := event.get("usage")) is not None:
        answer.tokens, answer.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        details = usage.get("completion_tokens_details") or {}
        answer.thinking_tokens = details.get("reasoning_tokens") or 0
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


class _Reader(asyncio.Protocol):
    def __init__(self, request: bytes) -> None:
        self._request = request
        self.received = Received(perf_counter())
        self.is_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.received.times.append(perf_counter())
        self.received.pieces.append(data)

    def connection_lost(self, reason: Exception | None) -> None:
        if not self.is_over.done():
            self.is_over.set_result(None)


def request_of(url: str, path: str, body: dict[str, Any]) -> bytes:
    """Return a request for a stream with its usage, over a connection of its own."""
    place = urlsplit(url)
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST {place.path}{path} HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


async def received(url: str, request: bytes) -> Received:
    """Return everything received for a request; its time begins before connecting. Raises OSError."""
    place = urlsplit(url)
    reader = _Reader(request)
    transport, _ = await asyncio.get_running_loop().create_connection(
        lambda: reader, place.hostname, place.port
    )
    try:
        await reader.is_over
    finally:
        transport.close()
    return reader.received
