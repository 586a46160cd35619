"""Handles a request from its body to the last byte of the answer."""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from chatterm.server.http.answer_state import AnswerState, Collector, Totals
from chatterm.server.http.body import read_body
from chatterm.server.http.errors import broken, error_for, error_headers, renamed, stopping
from chatterm.server.http.fields import Ignored, json_object, wrong
from chatterm.server.http.guard import send_json
from chatterm.server.http.limits import AdmissionQueue, Limits
from chatterm.server.http.metrics import ModelFigures, Recorder
from chatterm.server.http.renderer import ParsedRequest, Renderer
from chatterm.server.http.request_log import ENTRY, RequestEntry, RequestLog
from chatterm.server.http.schema_check import SchemaChecker, to_check
from chatterm.server.http.sse import ALIVE, ClientGone, StreamedResponse, unless_gone
from chatterm.server.logs import log
from chatterm.server.service import (
    AnswerConstraint,
    Delta,
    Generation,
    Piece,
    RequestError,
    ServedModel,
    Service,
    Started,
)
from chatterm.tool_calls.format import schemas
from models.units import counted

Headers = Sequence[tuple[bytes, bytes]]
LARGEST_CONSTRAINT = 200_000
"""Maximum characters of a schema or a grammar."""
LATE_S = 10.0
"""Seconds after the deadline of a request when the engine counts as unresponsive."""


@dataclass(slots=True)
class ServerState:
    """The state that the endpoints share."""

    service: Service
    limits: Limits
    gate: AdmissionQueue
    log: RequestLog
    is_strict: bool = False
    """Whether fields that have no effect are refused."""
    recorder: Recorder = field(default_factory=Recorder)
    checker: SchemaChecker = field(default_factory=SchemaChecker)
    working: set[asyncio.Task[Any]] = field(default_factory=set)
    """Tasks that answer requests."""
    _others: set[asyncio.Task[Any]] = field(default_factory=set)
    stopped: bool = False

    @property
    def trouble(self) -> str | None:
        """Why requests cannot be answered now; None: they can."""
        return "The server is shutting down." if self.gate.closing.is_set() else self.service.health().trouble

    async def stop(self) -> None:
        """Admit nothing new, wait a little for running requests, then end them with an error."""
        self.gate.close()
        if self.working:
            running = counted(len(self.working), "running answer")
            log.warning("Shutting down; %s may take %g s to end.", running, self.limits.shutdown_s)
        deadline = monotonic() + self.limits.shutdown_s
        while self.working and monotonic() < deadline:
            await asyncio.sleep(0.05)
        self.stopped = True
        for task in list(self.working):
            task.cancel()

    def background(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work`, which no client waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)

    @asynccontextmanager
    async def work(self) -> AsyncIterator[None]:
        """End the block with a RequestError when the server stops."""
        task = asyncio.current_task()
        assert task is not None
        self.working.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self.stopped:
                task.uncancel()
                raise stopping() from None
            raise
        finally:
            self.working.discard(task)

    async def model(self, name: str, *, loaded: bool = False) -> ServedModel:
        """Return the model of this name or alias; `loaded`: after loading it. Raises RequestError 404."""
        found = self._find(name)
        if found is not None and loaded and not found.loaded:
            await self.service.hold(found.name, None)
            found = self._find(name)
        if found is None:
            known = ", ".join(model.name for model in self.service.models()[:10])
            message = f"Unknown model {name[:100]!r}; this server has: {known or 'none'}."
            raise RequestError(404, "not_found_error", message.replace("'", '"'), "model", "model_not_found")
        return found

    def _find(self, name: str) -> ServedModel | None:
        names = {name, name.removesuffix(":latest")}  # Ollama's clients add that
        return next((one for one in self.service.models() if names & {one.name, *one.aliases}), None)


Instead = Callable[[dict[str, Any], ServedModel, Service, Ignored], Awaitable[bytes | None]]
"""Returns the response to a request that generates nothing; None for all others."""
Parse = Callable[[dict[str, Any], ServedModel, Limits, str, Ignored], ParsedRequest]


class Endpoint:
    """A path that answers with what a model generates."""

    def __init__(
        self,
        site: ServerState,
        parse: Parse,
        content_type: bytes = b"text/event-stream; charset=utf-8",
        instead: Instead | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """`content_type` is that of streams; `names` has this API's own names of fields, by those of OpenAI's chats."""
        self._instead, self._names = instead, names or {}
        self._site = site
        self._parse = parse
        self._type = content_type
        self._alive = ALIVE if content_type.startswith(b"text/event-stream") else None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        stream = StreamedResponse(send, self._type, self._alive)
        site, entry, renderer = self._site, scope[ENTRY], None
        ignored = Ignored(site.is_strict)
        try:
            try:
                body = json_object(await read_body(scope, receive, site.limits))
                if (trouble := site.service.health().trouble) is not None:
                    raise RequestError(503, "server_error", trouble, code="engine_ended", retry_after_s=2.0)
                model = await self._model(body)
                body["model"] = entry.model = model.name
                if self._instead is not None and (
                    done := await self._instead(body, model, site.service, ignored)
                ):
                    await send_whole(send, done)
                    return
                asked = self._parse(body, model, site.limits, entry.client, ignored)
                for generation in asked.generations:
                    check_constraint(generation.constraint)
                site.log.asked(entry, asked.generations)
                renderer = asked.renderer
                await unless_gone(receive, self._answer(asked, entry, ignored, stream, send))
            except (RequestError, ClientGone, asyncio.CancelledError):
                raise
            except Exception as error:
                log.exception("a request to %s failed", entry.path)
                raise broken() from error
        except ClientGone:
            entry.status = 499
        except RequestError as error:
            await self._tell(renamed(error, self._names), entry, renderer, stream, send)
        finally:
            stream.close()
            site.log.ignored(entry, ignored.names)
            site.recorder.responses[entry.path, entry.status] += 1

    async def _tell(
        self,
        error: RequestError,
        entry: RequestEntry,
        renderer: Renderer | None,
        stream: StreamedResponse,
        send: Any,
    ) -> None:
        """Send an error. Not where it was caught: the frame of its traceback must not refer to it."""
        entry.refuse(error)
        if not stream.has_begun:
            await send_json(send, error.status, error_for(entry.path, error), error_headers(error))
        elif renderer is not None:
            await stream.end(renderer.failed(error))

    async def _model(self, body: dict[str, Any]) -> ServedModel:
        name = body.get("model")
        if not isinstance(name, str) or not name:
            raise wrong("model", "model is missing: name one of those that /v1/models lists.")
        # What a model's calls look like is known only once it is loaded.
        return await self._site.model(name, loaded=bool(body.get("tools")))

    async def _answer(
        self,
        asked: ParsedRequest,
        entry: RequestEntry,
        ignored: Ignored,
        stream: StreamedResponse,
        send: Any,
    ) -> None:
        site, generations = self._site, asked.generations
        size = sum(generation.count for generation in generations)
        client, model = generations[0].client, generations[0].model
        turn = site.gate.turn(client, size, model)
        async with site.work(), turn as waited:
            work = _Work(asked, entry, stream, site.recorder.of(model), waited, ignored.unenforced)
            try:
                async with asyncio.timeout(site.limits.request_s + LATE_S):
                    async with aclosing(merged(site.service, generations, turn.finished)) as pieces:
                        async for number, piece in pieces:
                            await work.take(number, piece)
            except TimeoutError:
                raise RequestError(
                    504, "server_error", "The engine did not finish in time; try again.", code="timeout"
                ) from None
            work.check()
        if asked.stream:
            await work.begin()
            await stream.end(asked.renderer.end(work.states, work.totals))
            if ignored.unenforced:  # nobody waits for it
                site.background(self._check(ignored, entry, work))
        else:
            kept = await self._check(ignored, entry, work) if ignored.unenforced else None
            headers = _unenforced(ignored.unenforced, kept)
            await send_whole(send, asked.renderer.whole(work.states, work.totals), headers)

    async def _check(self, ignored: Ignored, entry: RequestEntry, work: "_Work") -> bool | None:
        """Log whether answers keep what their schemas say and could not be enforced; return it, None if unknown."""
        found = await self._site.checker.fits(to_check(work.states, ignored.schema, work.schemas))
        self._site.log.unenforced(entry, ignored.unenforced, found)
        return found


class _Work:
    """A request that is being answered."""

    def __init__(
        self,
        asked: ParsedRequest,
        entry: RequestEntry,
        stream: StreamedResponse,
        figures: ModelFigures,
        waited: float,
        unenforced: Collection[str],
    ) -> None:
        self._asked = asked
        self._headers = _unenforced(unenforced, None)
        self.schemas = schemas(asked.generations[0].tools)
        self._entry = entry
        self._stream = stream
        self._figures = figures
        self._asked_at = monotonic() - waited
        self._latest: dict[int, float] = {}
        self.totals = Totals(asked.generations[0].model, queue_s=waited)
        figures.queue.add(waited)
        self._collectors: list[Collector] = []
        first = 0
        for generation in asked.generations:
            tools = schemas(generation.tools)
            self._collectors.append(Collector(generation.count, tools, generation.must_call, first))
            first += generation.count

    @property
    def states(self) -> Sequence[AnswerState]:
        """All answers."""
        return [state for collector in self._collectors for state in collector.states]

    async def begin(self) -> None:
        """Send the headers of a stream, once."""
        if not self._stream.has_begun:
            await self._stream.begin(self._headers)
            await self._stream.write(self._asked.renderer.begin(self.totals))

    async def take(self, number: int, piece: Piece) -> None:
        """Process a piece of the generation of this number."""
        taken = self._collectors[number].take(piece)
        if isinstance(piece, Started):
            self.totals.prompt_tokens += piece.prompt_tokens
            self.totals.cached_tokens += piece.cached_tokens
            self._entry.prompt_tokens = self.totals.prompt_tokens
            self._entry.cached_tokens = self.totals.cached_tokens
            self._figures.prompt_tokens.add(piece.prompt_tokens)
        if taken is None:
            return
        state, parts = taken
        self._record(state, piece)
        if self._asked.stream:
            await self.begin()
            if parts:
                await self._stream.write(self._asked.renderer.piece(state, parts))

    def check(self) -> None:
        """Raise RequestError if the engine ended before its answers did."""
        if not all(collector.is_complete for collector in self._collectors):
            raise RequestError(
                500, "server_error", "The engine stopped in the middle of an answer; try again."
            )

    def _record(self, state: AnswerState, piece: Piece) -> None:
        now, figures = monotonic(), self._figures
        if isinstance(piece, Delta):
            count = len(piece.token_ids)
            before = self._latest.get(state.index)
            if before is None:
                self._entry.first_token = self._entry.first_token or now
                figures.first_token.add(now - self._asked_at)
            elif count:
                figures.between_tokens.add((now - before) / count, count)
            self._latest[state.index] = now
        elif state.usage is not None and state.reason is not None:
            figures.generation_tokens.add(state.usage.completion_tokens)
            self._entry.answer_tokens = (self._entry.answer_tokens or 0) + state.usage.completion_tokens
            figures.finished[{"eos": "stop", "context_full": "length"}.get(state.reason, state.reason)] += 1
            figures.whole.add(now - self._asked_at)


def check_constraint(constraint: AnswerConstraint | None) -> None:
    """Raise RequestError 400 for a constraint that would take too long to prepare."""
    if constraint is not None and len(constraint.text) > LARGEST_CONSTRAINT:
        raise wrong(None, f"Schemas and grammars can have {LARGEST_CONSTRAINT:,} characters at most.")


async def merged(
    service: Service, generations: Sequence[Generation], finished: Callable[[], None]
) -> AsyncGenerator[tuple[int, Piece], None]:
    """Yield the pieces of all generations as they come, each with its number. The first error ends them all.

    `finished` is called once all have arrived, read or not.
    """
    if len(generations) == 1:
        async with aclosing(service.generate(generations[0], finished)) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    arrived: asyncio.Queue[tuple[int, Piece | BaseException | None]] = asyncio.Queue()
    coming = len(generations)

    def one_finished() -> None:
        nonlocal coming
        coming -= 1
        if not coming:
            finished()

    async def pump(number: int) -> None:
        try:
            async with aclosing(service.generate(generations[number], one_finished)) as pieces:
                async for piece in pieces:
                    arrived.put_nowait((number, piece))
            arrived.put_nowait((number, None))
        except BaseException as error:
            arrived.put_nowait((number, error))
            raise

    tasks = [asyncio.ensure_future(pump(number)) for number in range(len(generations))]
    try:
        left = len(tasks)
        while left:
            number, came = await arrived.get()
            if isinstance(came, BaseException):
                raise came
            if came is None:
                left -= 1
            else:
                yield number, came
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _unenforced(names: Collection[str], fits: bool | None) -> Headers:
    """Return the header that names what a schema says and could not be enforced, and whether the answer keeps it."""
    if not names:
        return []
    said = ", ".join(sorted(names)) + {None: "", True: "; kept", False: "; broken"}[fits]
    return [(b"x-chatterm-not-enforced", said.encode())]


async def send_whole(send: Any, body: bytes, more: Headers = ()) -> None:
    """Send a JSON response."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
