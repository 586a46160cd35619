"""Runs one request: from the client's Generation to engine sequences, and from their tokens to pieces."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from msgspec import Raw

from chatterm.backends.backend import ContextFullError, EngineError, FinishReason, ModelError, TokenEvent
from chatterm.ipc.frames import FrameError
from chatterm.server.process.connection import CallStream
from chatterm.server.process.frame_batcher import Pump
from chatterm.server.process.model_pool import ModelPool, PooledModel
from chatterm.server.process.request_parsing import (
    about,
    bounded,
    parse_sampling,
    prepare_prompt,
    takes_long,
)
from chatterm.server.process.workers import Workers
from chatterm.server.service import (
    AnswerEnded,
    Delta,
    Generation,
    Kind,
    Logprob,
    RequestError,
    Started,
    TokenLogprob,
    Usage,
)
from chatterm.tool_calls.format import said_by
from engine.errors import ConstraintError, GpuLostError
from engine.events import Kind as EventKind
from models.errors import NoRoomError

if TYPE_CHECKING:
    from engine.conversation.requests import PreparedPrompt
    from engine.params import SamplingParams
    from engine.schedule.sequence import Sequence
    from models.text.tokenizer import Tokenizer

_RECALLS_S = 1.0
"""Maximum seconds that a prompt waits for earlier answers to be recorded; it usually takes milliseconds."""


@dataclass(slots=True)
class _Answer:
    sequence: "Sequence | None" = None
    text: list[str] = field(default_factory=list)
    """The answer's text without its thinking."""
    thinking: list[str] = field(default_factory=list)
    is_over: bool = False

    def of(self, kind: Kind) -> list[str]:
        """Return the text of this kind, in parts."""
        return self.text if kind == "answer" else self.thinking


def _kind(kind: EventKind) -> Kind:
    """Return the kind of piece for a kind of token; tool calls are parsed from the answer later."""
    return "reasoning" if kind == "reasoning" else "answer"


class GenerationTask:
    """Answers one Generation. On the event loop's thread unless noted otherwise."""

    def __init__(
        self, request: Generation, host: ModelPool, pump: Pump, workers: Workers, out: CallStream
    ) -> None:
        """Begin to answer; `workers` prepare prompts."""
        self.waits, self.due = False, 0.0
        self._request = request
        self._client = request.client or None
        self._host = host
        self._pump = pump
        self._workers = workers
        self._out = out
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[int, TokenEvent | None]] = deque()
        self._answers = [_Answer() for _ in range(request.count)]
        self._held: PooledModel | None = None
        self._asked: PreparedPrompt | None = None
        self._params: SamplingParams | None = None
        self._cancelled = self._expired = self._has_begun = self._is_over = False
        self._load_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._problem: Exception | None = None
        self._loading: asyncio.Task[None] | None = None
        if request.deadline_s is not None:
            self._timer = self._loop.call_later(max(request.deadline_s, 0.0), self._expire)
        self._start()

    def cancel(self) -> None:
        """End the answers within one step."""
        self._cancelled = True
        self._end_sequences()

    def _end_sequences(self) -> None:
        for answer in self._answers:
            if answer.sequence is not None:
                answer.sequence.cancelled = True
        if self._held is not None and self._held.cancel(self._begin_now):
            self._later(self._begin_now)  # it ends at once

    def feed(self, body: Raw) -> None:
        raise FrameError("A running request accepts no input.")

    # -- the beginning

    def _start(self) -> None:
        try:
            held = self._host.take_loaded(self._request.model)
        except EngineError as error:
            self.fail(error)
            return
        if held is not None:
            self._use(held)
        else:
            self._loading = self._loop.create_task(self._load())

    async def _load(self) -> None:
        began = monotonic()
        try:
            held = await self._loaded()
        except Exception as error:  # noqa: BLE001 (whatever it is, the client is told)
            self.fail(error)
            return
        self._load_s = monotonic() - began
        self._use(held)

    def _use(self, held: PooledModel) -> None:
        self._held = held
        self._host.keep(held, self._request.keep_alive_s)
        # This may follow up on one of those, which are ahead of it in the queue for a thread.
        recalls = [recall for recall, client in held.pending_recalls.items() if client == self._client]
        self._later(self._prepare_now, recalls, is_long=takes_long(held, self._request))

    async def _loaded(self) -> PooledModel:
        name = self._request.model
        if not await asyncio.wrap_future(self._workers.submit(self._client, self._host.is_here, name)):
            raise no_model(name)
        return await asyncio.to_thread(self._host.acquire, name)

    def _prepare_now(self, recalls: list[Future[None]]) -> None:
        """Prepare in a worker thread and report errors to the client, as nobody awaits this."""
        if self._cancelled:
            with suppress(RuntimeError):  # the process ends
                self._loop.call_soon_threadsafe(self._close)
            return
        try:
            self._prepare(recalls)
        except Exception as error:  # noqa: BLE001 (whatever it is, the client is told)
            with suppress(RuntimeError):  # the process ends
                self._loop.call_soon_threadsafe(self.fail, error)

    def _prepare(self, recalls: list[Future[None]]) -> None:
        """Prepare the prompt and begin the first answer. In a worker thread."""
        assert self._held is not None
        wait(recalls, _RECALLS_S)
        self._params = parse_sampling(self._held.engine, self._request)
        self._asked = prepare_prompt(self._held, self._request)
        self._params = bounded(
            self._request, len(self._asked.rows), self._params, self._held.engine.context_length
        )
        leader = self._held.requests.leader(self._asked, list(self._held.sequences), self._client)
        if leader is None or not self._held.follow(leader, self._begin_now):
            self._begin(0)

    def _begin_now(self, number: int = 0) -> None:
        """Begin an answer that had to wait; errors go to the client. In a worker thread."""
        if self._is_over:
            return
        try:
            self._begin(number)
        except Exception as error:  # noqa: BLE001 (whatever it is, the client is told)
            self._loop.call_soon_threadsafe(self.fail, error)

    def _begin(self, number: int) -> None:
        """Start the sequence of an answer. From any thread."""
        assert self._held is not None
        assert self._asked is not None
        assert self._params is not None
        answer = self._answers[number]
        is_late = self._cancelled or self._expired
        answer.sequence = self._held.requests.begin(
            self._asked, self._params, number, self._take, self._client, is_late
        )
        self._held.sequences.add(answer.sequence)
        if self._cancelled or self._expired:
            answer.sequence.cancelled = True
        if self._events:  # its first token came before `sequence` was set
            self._pump.wake(self, at_once=True)

    def _begin_others(self) -> None:
        """Begin the other answers, which reuse the prompt's rows that the first one computed. In a worker thread."""
        for number in range(1, len(self._answers)):
            try:
                self._begin(number)
            except EngineError as error:
                self._problem = error
                self._take(number, None)

    def _take(self, number: int, event: TokenEvent | None) -> None:
        """Queue a token of an answer, or None at its end. From the engine's thread."""
        self._events.append((number, event))
        if event is None or not self.waits:
            self._pump.wake(self, event is None)

    # -- on its way

    def send(self) -> bool:
        """Send what has come since the last time; return False once everything is sent."""
        self._let_followers_begin()
        if self._is_over or self._out.blocked(self):
            return not self._is_over
        deltas: dict[int, _Gathered] = {}
        while self._events:
            number, event = self._events[0]
            if self._answers[number].sequence is None and self._problem is None:
                break  # `_begin` is about to set it, and wakes this
            self._events.popleft()
            if not self._has_begun:
                self._has_begun = True
                self._say_started(number)
            gathered = deltas.get(number)
            if event is None:
                self._ended(number, gathered)
                deltas.pop(number, None)
                continue
            kind = _kind(event.kind)
            if gathered is None or gathered.kind != kind:
                if gathered is not None:
                    self._out.item(gathered.delta(number))
                gathered = deltas[number] = _Gathered(kind)
            assert self._held is not None
            gathered.add(event, self._held.engine.tokenizer)
            self._answers[number].of(kind).append(event.text)
        for number, gathered in deltas.items():
            self._out.item(gathered.delta(number))
        if all(answer.is_over for answer in self._answers):
            self._close()
        return not self._is_over

    def _let_followers_begin(self) -> None:
        """Begin the requests that wait for this one's first token, whether or not its own client reads."""
        if self._held is None or not self._held.waiting_for_prefix:
            return
        for answer in self._answers:
            sequence = answer.sequence
            if sequence is not None and (sequence.first_token or sequence.finished.is_set()):
                for begin in self._held.begun(sequence):
                    self._later(begin)

    def _say_started(self, number: int) -> None:
        sequence, held = self._answers[number].sequence, self._held
        if held is None or sequence is None or sequence.error is not None:
            return
        stats = sequence.stats()
        if not sequence.finished.is_set() or sequence.generated:
            self._out.item(Started(held.name, stats.prompt_tokens, stats.cached_tokens, held.tool_format))
        if len(self._answers) > 1:
            self._later(self._begin_others)

    def _ended(self, number: int, gathered: "_Gathered | None") -> None:
        answer = self._answers[number]
        sequence = answer.sequence
        error = self._problem if sequence is None else sequence.error
        if error is not None and sequence is not None and self._tries_again(number, sequence):
            return
        answer.is_over = True
        if error is not None:
            self._problem = error
            self.cancel()
            return
        assert sequence is not None
        if sequence.tail and sequence.output is not None:
            kind = _kind(sequence.output.kind)
            if gathered is not None and gathered.kind != kind:
                self._out.item(gathered.delta(number))
                gathered = None
            gathered = gathered or _Gathered(kind)
            gathered.text.append(sequence.tail)
            answer.of(kind).append(sequence.tail)
        if gathered is not None:
            self._out.item(gathered.delta(number))
        stats = sequence.stats()
        if self._held is not None:
            self._held.sequences.discard(sequence)
        reason = sequence.finish_reason or FinishReason.CANCELLED
        if self._expired and reason is FinishReason.CANCELLED:
            reason = FinishReason.LENGTH
        usage = Usage(
            completion_tokens=stats.generated_tokens,
            reasoning_tokens=stats.reasoning_tokens,
            load_s=self._load_s,
            queue_s=max(sequence.admitted - sequence.created, 0.0),
            prefill_s=stats.prefill_s,
            decode_s=stats.decode_s,
        )
        self._out.item(AnswerEnded(number, reason.value, usage))

    def _tries_again(self, number: int, sequence: "Sequence") -> bool:
        """Restart without masked rows if those were evicted before the first token; return whether it does."""
        held, asked = self._held, self._asked
        if held is None or asked is None or not sequence.rows.masked_until or sequence.generated:
            return False
        held.sequences.discard(sequence)
        self._answers[number].sequence = None
        self._has_begun = self._has_begun and number > 0

        def begin() -> None:
            self._asked = held.requests.exactly(asked)
            self._begin_now(number)

        self._later(begin)
        return True

    def _expire(self) -> None:
        self._expired = True
        self._end_sequences()

    # -- the end

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self.cancel()
        self._problem = about(self._request, error)
        self._close()

    def _close(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._pump.left(self)
        if self._timer is not None:
            self._timer.cancel()
        if (held := self._held) is not None:
            # Before the client is told: it may ask for another model, which needs the memory.
            self._host.begin_cleanup(held)
            try:
                recall = self._workers.submit(self._client, self._leave, held)
                held.pending_recalls[recall] = self._client
                recall.add_done_callback(lambda done: held.pending_recalls.pop(done, None))
            except RuntimeError:  # the process ends
                self._host.end_cleanup(held)
        if self._problem is not None:
            has_ended = self._held is not None and self._held.engine.is_closed
            self._out.failed(request_error(self._problem, self._has_begun, has_ended))
            self._problem = None  # its traceback refers to this object
        else:
            self._out.done()

    def _later(self, work: Callable[..., None], *arguments: Any, is_long: bool = False) -> None:
        """Run `work` in a worker thread."""
        with suppress(RuntimeError):  # the process ends
            self._workers.submit(self._client, work, *arguments, is_long=is_long)

    def _leave(self, held: PooledModel) -> None:
        """Record the answers and have the next turn prewarmed. In a worker thread."""
        from engine.conversation.turns import Answer  # imports torch, which the model has loaded

        try:
            for answer in self._answers:
                if self._asked is not None and answer.sequence is not None:
                    settles = answer is self._answers[0] and not self._cancelled
                    is_cut = answer.sequence.finish_reason is not FinishReason.EOS
                    text, calls = said_by(
                        "".join(answer.text),
                        held.tool_format,
                        self._request.tools,
                        self._request.must_call,
                        is_cut,
                    )
                    said = Answer(text, "".join(answer.thinking))
                    with suppress(EngineError, ModelError):
                        held.requests.over(self._asked, answer.sequence, said, calls, settles)
                held.sequences.discard(answer.sequence)
        finally:
            self._host.end_cleanup(held)


@dataclass(slots=True)
class _Gathered:
    """Tokens of one kind that are sent as one piece."""

    kind: Kind
    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    logprobs: list[Logprob] = field(default_factory=list)

    def add(self, event: TokenEvent, tokenizer: "Tokenizer") -> None:
        self.text.append(event.text)
        self.ids.append(event.token_id)
        if event.logprob is not None:
            top = tuple(_token(tokenizer, *pair) for pair in event.top)
            self.logprobs.append(Logprob(_token(tokenizer, event.token_id, event.logprob), top))

    def delta(self, index: int) -> Delta:
        return Delta(index, "".join(self.text), self.kind, tuple(self.ids), tuple(self.logprobs))


def _token(tokenizer: "Tokenizer", id: int, logprob: float) -> TokenLogprob:
    raw = tokenizer.token_bytes(id)
    return TokenLogprob(id, raw.decode("utf-8", "replace"), raw, logprob)


def request_error(error: Exception, has_begun: bool = False, has_ended: bool = False) -> RequestError:
    """Convert an error to the web API's. `has_begun`: part of the answer is sent. `has_ended`: the engine failed."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ContextFullError):
        return RequestError(
            400, "invalid_request_error", str(error), param="messages", code="context_length_exceeded"
        )
    if isinstance(error, NoRoomError):
        return RequestError(503, "server_error", str(error), param="model")
    if isinstance(error, GpuLostError):
        message = "The GPU was lost, and another engine process starts. Send the request again."
        return RequestError(503, "server_error", message, code="engine_ended", retry_after_s=1.0)
    if has_ended and isinstance(error, EngineError) and not isinstance(error, ConstraintError):
        message = f"{error} Send the request again: the model is loaded for it."
        return RequestError(503, "server_error", message, code="engine_ended", retry_after_s=1.0)
    if isinstance(error, ConstraintError) or (isinstance(error, EngineError | ModelError) and not has_begun):
        return RequestError(400, "invalid_request_error", str(error))
    if isinstance(error, EngineError | ModelError):
        return RequestError(500, "server_error", str(error))
    from chatterm.terminal.error_log import error_line, write_down

    return RequestError(500, "server_error", f"{error_line(error)} {write_down(error)}")


def no_model(name: str) -> RequestError:
    """Return the error for a model that requests may not use."""
    return RequestError(
        404,
        "not_found_error",
        f"There is no model {name!r:.200} here; see /v1/models for the list.",
        param="model",
        code="model_not_found",
    )
