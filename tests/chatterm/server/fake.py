"""A service that says what a test wants, word by word, and a server of it on a loopback port."""

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from chatterm.server.http.app import make_app
from chatterm.server.http.keys import ApiKeys
from chatterm.server.http.limits import Limits
from chatterm.server.http.web import listen, make_server
from chatterm.server.service import (
    AnswerEnded,
    ChatMessage,
    Delta,
    Generation,
    Health,
    Logprob,
    Metrics,
    ModelMetrics,
    Piece,
    Reason,
    RequestError,
    ServedModel,
    Started,
    TokenLogprob,
    ToolFormat,
    Usage,
)
from tests.counting import PATIENCE

Say = Callable[[Generation, int], list[tuple[str, str]]]
"""What answer i to a request is: texts, each of a kind."""


def echo(request: Generation, index: int) -> list[tuple[str, str]]:
    """The last message."""
    if request.messages is None:
        return [("answer", f" after {request.prompt}")]
    return [("answer", request.messages[-1].content)]


@dataclass
class FakeService:
    """Implements Service."""

    say: Say = echo
    tool_format: ToolFormat | None = "hermes"
    thinks: bool = True
    reason: Reason = "eos"
    pause_s: float = 0.0
    """Before each piece."""
    known: Health = field(default_factory=lambda: Health(True))
    is_quick: bool = False
    """All has come before any of it is read."""
    asked: list[Generation] = field(default_factory=list)
    held: list[tuple[str, float | None]] = field(default_factory=list)
    running: int = 0
    said: int = 0
    """Words so far."""
    closed: int = 0
    """Generators that have been closed or have ended."""

    def health(self) -> Health:
        return self.known

    async def look(self) -> None:
        """It always tells what there is."""

    def models(self) -> list[ServedModel]:
        return [
            ServedModel(
                name="tiny",
                aliases=("tiny-alias",),
                created=1_700_000_000,
                context_length=4096,
                thinks=self.thinks,
                tool_format=self.tool_format,
                bytes=1000,
                loaded=True,
                family="qwen3",
                parameters=600_000_000,
                format="Q8_0",
                template="{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}",
            ),
            ServedModel(name="other", created=1_700_000_000, context_length=None),
        ]

    async def generate(
        self, request: Generation, finished: Callable[[], None] | None = None
    ) -> AsyncGenerator[Piece, None]:
        self.asked.append(request)
        self.running += 1
        if finished is not None and self.is_quick:
            finished()
        try:
            async for piece in self._pieces(request):
                yield piece
        finally:
            self.running -= 1
            self.closed += 1

    async def _pieces(self, request: Generation) -> AsyncGenerator[Piece, None]:
        _check(request)
        prompt = await self.tokenize(request.model, request.messages or str(request.prompt))
        await asyncio.sleep(self.pause_s)
        yield Started(request.model, len(prompt), len(prompt) // 2, self.tool_format)
        scripts = [_words(self.say(request, index)) for index in range(request.count)]
        made = [0] * request.count
        thought = [0] * request.count
        ended = [False] * request.count
        limit = request.sampling.get("max_tokens")
        while not all(ended):
            for index, script in enumerate(scripts):
                if ended[index]:
                    continue
                if not script or made[index] == limit:
                    ended[index] = True
                    reason: Reason = "length" if script else self.reason
                    usage = Usage(
                        completion_tokens=made[index], reasoning_tokens=thought[index], decode_s=0.5
                    )
                    yield AnswerEnded(index, reason, usage)
                    continue
                kind, word = script.pop(0)
                made[index] += 1
                self.said += 1
                thought[index] += kind == "reasoning"
                await asyncio.sleep(self.pause_s)
                yield Delta(index, word, kind, (made[index],), _likely(request, word))

    async def tokenize(self, model: str, text: str | tuple[ChatMessage, ...]) -> list[int]:
        said = text if isinstance(text, str) else " ".join(message.content for message in text)
        return [len(word) for word in said.split()]

    async def token_texts(self, model: str, ids: list[int]) -> list[str]:
        return [f"<{id}>" for id in ids]

    async def hold(self, model: str, keep_alive_s: float | None) -> None:
        self.held.append((model, keep_alive_s))

    def watch(self, queued: Callable[[], Mapping[str, int]]) -> None:
        self.queued = queued

    async def metrics(self) -> Metrics:
        model = ModelMetrics(
            model="tiny",
            running=self.running,
            waiting=0,
            kv_usage=0.25,
            prompt_tokens=10,
            cached_tokens=5,
            generated_tokens=7,
            preemptions=0,
        )
        return Metrics(models=(model,), terminals=1, process_bytes=1000)


def _words(script: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(kind, word) for kind, text in script for word in re.findall(r"\s*\S+\s*$|\s*\S+|\s+", text)]


def _likely(request: Generation, word: str) -> tuple[Logprob, ...]:
    count = request.sampling.get("logprobs")
    if count is None:
        return ()
    top = tuple(TokenLogprob(at, f"t{at}", b"t%d" % at, -float(at)) for at in range(count))
    return (Logprob(TokenLogprob(1, word, word.encode(), -0.5), top),)


def _check(request: Generation) -> None:
    """As SamplingParams and the context of a model do."""
    ranges = {
        "temperature": (0, 1e9),
        "top_p": (1e-9, 1),
        "min_p": (0, 1),
        "max_tokens": (1, 1e9),
        "top_k": (0, 2**31),
    }
    ranges |= {
        "presence_penalty": (-2, 2),
        "frequency_penalty": (-2, 2),
        "seed": (0, 2**63),
        "logprobs": (0, 20),
    }
    ranges |= {"repetition_penalty": (1e-9, 1e9)}
    for name, (low, high) in ranges.items():
        value = request.sampling.get(name)
        if value is not None and not low <= value <= high:
            raise RequestError(400, "invalid_request_error", f"{name} is {value}; it is out of range.", name)
    if request.messages is not None and sum(len(message.content) for message in request.messages) > 100_000:
        message = "The prompt is too long for the context of 4,096 tokens; shorten it."
        raise RequestError(400, "invalid_request_error", message, "messages", "context_length_exceeded")


@dataclass
class Running:
    """A server in a thread of its own."""

    port: int
    service: FakeService
    stop: Callable[[], None]
    """Asks it to stop, as a signal does."""
    thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def serving(
    service: FakeService, limits: Limits | None = None, keys: ApiKeys | None = None
) -> Iterator[Running]:
    """A real server on a loopback port."""
    app = make_app(service, limits, keys)
    sock = listen(app, "127.0.0.1", 0)
    server = make_server(app)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
    thread.start()

    def stop() -> None:
        server.should_exit = True

    try:
        yield Running(sock.getsockname()[1], service, stop, thread)
    finally:
        stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()
