"""A Service over the connection to the engine process, for the web API: no engine and no torch in this process."""

import asyncio
import itertools
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from msgspec import Raw

from chatterm.backends.protocol import Hello, HelloReply, Hold, agreed
from chatterm.ipc.frames import FrameError, FrameReader
from chatterm.ipc.messages import Call, Cancel, Done, Failed, Item, from_server, pack, to_frame, unpack
from chatterm.ipc.runtime import connect
from chatterm.server.service import ChatMessage, Generation, Health, Metrics, Piece, RequestError, ServedModel
from chatterm.server.write_coalescing import GatheringTransport

_LOOK = 1.0
"""Seconds between refreshes of the list of models and of the metrics."""
_PATIENCE = 2.0
"""Seconds that lists and metrics wait for the engine process; then those of a moment ago have to do."""

T = TypeVar("T")


class _Answers:
    """The incoming messages of one call."""

    def __init__(self, finished: Callable[[], None] | None) -> None:
        self._finished = finished
        self._items: deque[Item | Done | Failed] = deque()
        self._came = asyncio.Event()
        self.is_over = False

    def put(self, message: Item | Done | Failed) -> None:
        self._items.append(message)
        self._came.set()
        if self._finished is not None and not isinstance(message, Item):
            self._finished()

    async def next(self) -> Raw | None:
        """Return the body of the next item, None at the end. Raises RequestError."""
        while not self._items:
            self._came.clear()
            await self._came.wait()
        message = self._items.popleft()
        if isinstance(message, Item):
            return message.body
        self.is_over = True
        if isinstance(message, Failed):
            raise _error(message)
        self.result = message.body
        return None


class ChannelService(asyncio.Protocol):
    """One connection for many requests. When the engine process ends, `lost` is set and requests fail with 503."""

    def __init__(self) -> None:
        self._transport: GatheringTransport | None = None
        self._reader = FrameReader()
        self._calls: dict[int, _Answers] = {}
        self._numbers = itertools.count(1)
        self._models: list[ServedModel] = []
        self._looks: asyncio.Task[None] | None = None
        self._queued: Callable[[], Mapping[str, int]] = dict
        self._metrics: Metrics | None = None
        """The latest ones."""
        self._heard_at = 0.0
        """When the engine process last sent anything, on the monotonic clock."""
        self.lost = asyncio.Event()

    async def connect(self, address: str = "") -> HelloReply:
        """Attach to the engine process of this user; `address` is where the web API listens.

        Raises RequestError if there is none, or if its version differs.
        """
        peer = connect()
        if peer is None:
            raise _gone("The engine process does not answer.")
        peer.setblocking(False)
        self.lost.clear()
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, sock=peer)
        hello = Hello(agreed(), "web", os.getpid(), address)
        welcome = await self._ask("hello", hello, HelloReply)
        self._metrics = None
        await self.look()
        self._looks = loop.create_task(self._look_often())
        return welcome

    async def close(self) -> None:
        """Disconnect from the engine process, which keeps running."""
        if self._looks is not None:
            self._looks.cancel()
            with suppress(asyncio.CancelledError):
                await self._looks
        if self._transport is not None:
            self._transport.close()

    async def end(self) -> None:
        """Ask the engine process to end; return once it has begun to."""
        with suppress(RequestError):
            await self._ask("end", None, type(None))

    # -- Service

    def health(self) -> Health:
        heard = time.monotonic() - self._heard_at
        models = self._metrics.models if self._metrics is not None else ()
        return Health(
            self._transport is not None, heard, max((model.busy_s for model in models), default=0.0)
        )

    def models(self) -> list[ServedModel]:
        return list(self._models)

    async def look(self) -> None:
        self._models = await self._soon("models", None, list[ServedModel])

    async def generate(
        self, request: Generation, finished: Callable[[], None] | None = None
    ) -> AsyncGenerator[Piece, None]:
        id, answers = self._begin("generate", request, finished)
        try:
            while (body := await answers.next()) is not None:
                yield unpack(body, Piece)  # type: ignore[arg-type]
        finally:
            self._end(id, answers)

    async def tokenize(self, model: str, text: str | tuple[ChatMessage, ...]) -> list[int]:
        return await self._ask("tokenize", {"model": model, "text": text}, list[int])

    async def token_texts(self, model: str, ids: list[int]) -> list[str]:
        return await self._ask("token_texts", {"model": model, "ids": ids}, list[str])

    async def hold(self, model: str, keep_alive_s: float | None) -> None:
        await self._ask("hold", Hold(model, "", keep_alive_s), type(None))
        await self.look()

    def watch(self, queued: Callable[[], Mapping[str, int]]) -> None:
        self._queued = queued

    async def metrics(self) -> Metrics:
        try:
            self._metrics = await self._soon("metrics", dict(self._queued()), Metrics)
        except RequestError:
            if self._metrics is None:
                raise
        return self._metrics

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = GatheringTransport(transport)

    def data_received(self, data: bytes) -> None:
        self._heard_at = time.monotonic()
        try:
            for body in self._reader.feed(data):
                message = from_server(body)
                if (answers := self._calls.get(message.id)) is not None:
                    answers.put(message)
        except FrameError:
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, reason: Exception | None) -> None:
        self._transport = None
        self._reader = FrameReader()
        calls, self._calls = self._calls, {}
        for id, answers in calls.items():
            fields = {"status": 503, "kind": "server_error", "code": "engine_ended"}
            answers.put(Failed(id, "request", "The engine process has ended; try again soon.", fields))
        self.lost.set()

    # -- calls

    def _begin(
        self, method: str, body: Any, finished: Callable[[], None] | None = None
    ) -> tuple[int, _Answers]:
        if self._transport is None:
            raise _gone("The engine process is not running; try again soon.")
        id, answers = next(self._numbers), _Answers(finished)
        try:
            whole = pack(body)
        except FrameError as error:
            raise RequestError(400, "invalid_request_error", str(error)) from None
        try:
            frame = to_frame(Call(id, method, whole))
        except FrameError as error:
            raise RequestError(413, "invalid_request_error", str(error)) from None
        self._calls[id] = answers
        self._transport.write(frame)
        return id, answers

    def _end(self, id: int, answers: _Answers) -> None:
        self._calls.pop(id, None)
        if not answers.is_over and self._transport is not None:
            self._transport.write(to_frame(Cancel(id)))

    async def _ask(self, method: str, body: Any, kind: type[T]) -> T:
        id, answers = self._begin(method, body)
        try:
            while await answers.next() is not None:
                pass
            return unpack(answers.result, kind)
        finally:
            self._end(id, answers)

    async def _soon(self, method: str, body: Any, kind: type[T]) -> T:
        """Ask as `_ask` does, for what the engine process answers at once. Raises RequestError 503 if it does not."""
        try:
            async with asyncio.timeout(_PATIENCE):
                return await self._ask(method, body, kind)
        except TimeoutError:
            raise _gone("The engine process does not answer; try again soon.") from None

    async def _look_often(self) -> None:
        """Keep the list of models and the metrics fresh: that they come is the heartbeat of the engine process."""
        while self._transport is not None:
            await asyncio.sleep(_LOOK)
            for refresh in (self.look, self.metrics):
                with suppress(RequestError, FrameError):
                    await refresh()


def _gone(message: str) -> RequestError:
    return RequestError(503, "server_error", message, code="engine_ended", retry_after_s=1.0)


def _error(failed: Failed) -> RequestError:
    if failed.kind == "request":
        names = ("param", "code", "retry_after_s")
        given = {name: failed.fields.get(name) for name in names}
        status, kind = int(failed.fields.get("status", 500)), str(failed.fields.get("kind", "server_error"))
        return RequestError(status, kind, failed.message, **given)
    if failed.kind == "context":
        return RequestError(400, "invalid_request_error", failed.message, code="context_length_exceeded")
    return RequestError(500, "server_error", failed.message)
