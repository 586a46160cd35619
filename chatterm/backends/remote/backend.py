"""A conversation with a model on a server, as a Backend: the history is kept here and sent whole with every request."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from chatterm.backends.backend import (
    ChatOptions,
    Document,
    DraftCost,
    EngineError,
    Exchange,
    Figures,
    FinishReason,
    Message,
    ModelChoice,
    ModelInfo,
    OnProgress,
    Outcome,
    Part,
    Request,
    TokenEvent,
    ToolResult,
    TurnStats,
)
from chatterm.backends.base import BackendBase, no_model
from chatterm.backends.pictures import collect_pictures
from chatterm.backends.remote.address import Address, Remote, found
from chatterm.backends.remote.answer import RunningAnswer
from chatterm.backends.remote.client import Began, Client, Inbox, Lost, Over, Waits
from chatterm.backends.remote.dialects.base import AnswerRequest, Entry
from chatterm.backends.remote.errors import Refused, explain_refusal, without_tools
from chatterm.backends.remote.history import cache_key, history, with_user
from chatterm.backends.remote.keys import find_key, redact
from chatterm.backends.remote.model_lookup import (
    choose_dialect,
    find_entry,
    list_models,
    not_found,
    resolve_model,
    server_kind,
)
from chatterm.backends.remote.title import Title
from chatterm.backends.title import TITLE_TOKENS, title_question
from chatterm.terminal.sanitize import one_line
from chatterm.terminal.wording import sentences
from engine.params import seeds

if TYPE_CHECKING:
    from engine.cache.block_map import BlockMap

_SOON = 3.0
"""Time limit in seconds for a list that only helps to explain an error."""
_AT_ONCE = 8
"""Default number of simultaneous requests."""


class RemoteBackend(BackendBase):
    """Implements Backend."""

    def __init__(self, address: Address, options: ChatOptions, remotes: Mapping[str, Remote]) -> None:
        super().__init__(address.name, options)
        self._address = address
        self._remotes = remotes
        self._dialect = choose_dialect(address.api)
        self._client: Client | None = None
        self._key: str | None = None
        self._server = ""
        self._turns: list[Exchange] = []
        self._last: Outcome | None = None
        self._running: dict[int, RunningAnswer] = {}
        self._futures: dict[int, Future[None]] = {}
        self._title: Title | None = None
        self._waits_until = 0.0
        self._waits_for = ""

    # --- anyone ---

    @property
    def last(self) -> Outcome | None:
        running = self._front
        return running.outcome() if running is not None and running.has_begun else self._last

    @property
    def _front(self) -> RunningAnswer | None:
        """The running answer, if exactly one runs."""
        running = list(self._running.values())
        return running[0] if len(running) == 1 and -1 in self._running else None

    def figures(self) -> Figures | None:
        return None

    def notes(self) -> Sequence[str]:
        notes = []
        if self.info is not None and self._key and not (self._address.is_secure or self._address.is_local):
            notes.append(f"The key and all messages go to {self._address.host} unencrypted; use https there.")
        if unknown := [name for name in self._dialect.unknown if self.options.sampling.get(name) is not None]:
            names = ", ".join(unknown)
            notes.append(f"{self._address.host} does not get {names}: its API has no such setting.")
        return notes

    def waiting(self, index: int = 0) -> str:
        left = self._waits_until - time.monotonic()
        return f"{self._waits_for}; trying again in {max(left, 0.0):.0f} s" if self._waits_for else ""

    def blocks(self) -> "BlockMap | None":
        return None

    def token_text(self, token_id: int) -> str | None:
        return None

    def made_title(self) -> str | None:
        return title.said if (title := self._title) is not None else None

    def stop(self, but: int | None = None) -> None:
        for index, running in list(self._running.items()):
            if index != but:
                running.is_stopped = True
                if (future := self._futures.get(index)) is not None:
                    future.cancel()

    def answer_now(self) -> None:
        """Do nothing: no API can end the thinking."""

    # --- the worker ---

    def open(self, on_progress: OnProgress | None = None) -> None:
        self._key = find_key(self._address)
        client = Client(self._address, self._key)
        try:
            models = list_models(client, self._dialect, bool(self._key), on_progress)
            self._address = client.address = resolve_model(self._address, models)
        except EngineError as error:
            client.close()
            raise self._error(str(error)) from None
        except BaseException:
            client.close()
            raise
        here = find_entry(self._address, models)
        self._client, self.model = client, self._address.name
        self._server = server_kind(self._address, models)
        context = (here.context_length if here is not None else 0) or self.options.context or 0
        self.info = ModelInfo(
            self.model,
            self._address.host,
            "",
            context,
            True,
            calls_tools=True,
            is_remote=True,
            resumes=frozenset({"nothing", "text"} if self._dialect.can_go_on(self._server) else {"nothing"}),
        )

    def switch(self, model: str, on_progress: OnProgress | None = None) -> None:
        address = found(model, self._remotes)
        if address is None:
            raise EngineError(f"{one_line(model, 80)} is no remote model.")
        other = RemoteBackend(address, self.options, self._remotes)
        other.open(on_progress)
        self.close()
        self._address, self._dialect, self._client = other._address, other._dialect, other._client
        self._key, self._server, self.model, self.info = (other._key, other._server, other.model, other.info)
        self.reset()

    def send(self, text: str) -> Iterator[TokenEvent]:
        return self._answer(list(self._turns), Exchange(0, None, text))

    def tell(self, results: Sequence[ToolResult]) -> Iterator[TokenEvent]:
        calls = self._turns[-1].calls if self._turns else []
        if not calls or len(calls) != len(results):
            raise EngineError("The last answer does not call these tools; send a message instead.")
        said = "\n\n".join(result.text for result in results)
        return self._answer(list(self._turns), Exchange(0, None, said, results=list(results)))

    def resume(self) -> Iterator[TokenEvent]:
        if not self._turns:
            raise EngineError("There is no answer to continue; send a message first.")
        *before, last = self._turns
        if last.finish_reason in ("eos", "stop"):
            raise EngineError("The answer is complete; /retry generates another one.")
        if not last.text and not last.reasoning:
            return self._answer(before, Exchange(0, None, last.user, results=last.results))
        if not self._dialect.can_go_on(self._server):
            raise EngineError(
                f"{self._address.host} cannot continue an answer; /retry generates another one."
            )
        if not last.text:
            raise EngineError("A remote model cannot continue its thinking; /retry generates another answer.")
        return self._answer(before, last, goes_on=True)

    def candidates(self, text: str, count: int) -> Iterator[tuple[int, Part]]:
        messages = with_user(history(self._begins, self._turns), text)
        asked = [
            replace(self._asked(messages), sampling={**self.options.sampling, "seed": seed})
            for seed in seeds(self.options.sampling.get("seed"), count)
        ]
        return self._several(iter(asked), count)

    def answers(self, requests: Iterable[Request]) -> Iterator[tuple[int, Part]]:
        at_once = self.options.streams if self.options.streams > 1 else _AT_ONCE
        return self._several((self._requested(request) for request in requests), min(at_once, 32))

    def _requested(self, request: Request) -> AnswerRequest:
        messages = list(request.messages)
        if (system := self._begins) and (not messages or messages[0].role != "system"):
            messages.insert(0, Message("system", system))
        sampling = {**self.options.sampling, **request.sampling}
        constraint = sampling.pop("constraint", None) or self.options.constraint
        asked = replace(self._asked(messages), sampling=sampling, constraint=constraint)
        return replace(asked, think=request.think or self.options.think, tools=())

    def load_path(self, exchanges: Sequence[Exchange]) -> None:
        self._turns = [replace(exchange) for exchange in exchanges]
        self._last, self.used_tokens = None, 0
        for last in exchanges[-1:]:
            known = set(FinishReason)
            reason = (
                FinishReason(last.finish_reason) if last.finish_reason in known else FinishReason.CANCELLED
            )
            self._last = Outcome(
                last.text, last.reasoning, reason, TurnStats.of(last.stats), (), calls=last.calls
            )
            if last.model in (self.model, self.info.name if self.info else ""):
                self._count()

    def count(self, draft: str) -> DraftCost | None:
        return None

    def reset(self) -> None:
        self.load_path([])

    def read(self, document: Document) -> int | None:
        """Return None: the server's cache is its own."""
        return None

    def settle(self) -> None:
        """Do nothing: the server's cache is its own."""

    def prepare(self, draft: str) -> None:
        """Do nothing, as `settle`; a draft also stays private until it is sent."""

    def begin_title(self, question: str, answer: str) -> bool:
        if not (self._address.is_local or self._address.remote.titles):
            return False  # it may cost money
        client = self._client
        if client is None or self._running:
            return True
        asks = [Message("user", title_question(question, answer))]
        if self._title is None or self._title.question != asks:
            asked = AnswerRequest(self._address.model, asks, {"max_tokens": TITLE_TOKENS}, think="off")
            self._title = Title(client, self._dialect, asked, self._server)
        return True

    def catalogue(self) -> list[ModelChoice]:
        from chatterm.backends.model_list import plain_choices

        return plain_choices()

    def close(self) -> None:
        self.stop()
        client, self._client, self.info = self._client, None, None
        if client is not None:
            client.close()

    # --- internals ---

    def _asked(self, messages: Sequence[Entry]) -> AnswerRequest:
        said = [
            message.content for message in messages if isinstance(message, Message) and message.role == "user"
        ]
        return AnswerRequest(
            self._address.model,
            messages,
            self.options.sampling,
            self.options.think,
            self.options.constraint,
            cache_key(messages),
            self.options.context,
            tools=self.options.tools,
            pictures=collect_pictures(said),
        )

    def _answer(
        self, path: list[Exchange], exchange: Exchange, *, goes_on: bool = False
    ) -> Iterator[TokenEvent]:
        """Answer `exchange` after `path`, or continue its answer. What arrives is kept, however it ends."""
        asks = Exchange(0, None, exchange.user, results=exchange.results)
        messages = history(self._begins, [*path, asks])
        before = None
        if goes_on:
            messages.append(Message("assistant", exchange.text))
            before = Outcome(exchange.text, exchange.reasoning, None, TurnStats())
        inbox: Inbox = SimpleQueue()
        running = RunningAnswer(self._dialect, self.model, before, has_tools=bool(self.options.tools))
        self._begin(-1, running, replace(self._asked(messages), goes_on=goes_on), inbox)
        is_whole = False
        try:
            yield from self._events(running, inbox)
            is_whole = not running.problem
        except GeneratorExit:
            running.is_stopped = True
            raise
        finally:
            self._end(-1)
            if running.has_begun or running.is_stopped or is_whole:
                self._last = running.ended()
                made = replace(exchange, model=self.model)
                made.take(self._last)
                self._turns = [*path, made]
                self._count()
        if running.problem and not running.is_stopped:
            raise self._error(running.problem)

    def _events(self, running: RunningAnswer, inbox: Inbox) -> Iterator[TokenEvent]:
        while True:
            _, item = inbox.get()
            events, is_over = self._heard(running, item)
            for event in events:
                running.take(event)
                yield event
            if is_over or running.is_stopped:
                return

    def _several(self, asked: Iterator[AnswerRequest], at_once: int) -> Iterator[tuple[int, Part]]:
        """Answer requests as they are needed, `at_once` at a time."""
        inbox: Inbox = SimpleQueue()
        numbered = enumerate(asked)
        is_all = False
        try:
            while True:
                while not is_all and len(self._running) < at_once:
                    taken = next(numbered, None)
                    if taken is None:
                        is_all = True
                        break
                    running = RunningAnswer(self._dialect, self.model, has_tools=bool(taken[1].tools))
                    try:
                        self._begin(taken[0], running, taken[1], inbox)
                    except EngineError as error:
                        self._end(taken[0])
                        yield taken[0], error
                if not self._running:
                    return
                index, item = inbox.get()
                if (one := self._running.get(index)) is not None:
                    yield from ((index, part) for part in self._parts(index, one, item))
        finally:
            for index in list(self._running):
                self._end(index)

    def _parts(self, index: int, running: RunningAnswer, item: Any) -> Iterator[Part]:
        events, is_over = self._heard(running, item)
        for event in events:
            if not running.has_begun:
                yield running.outcome()
            running.take(event)
            yield event
        if is_over or running.is_stopped:
            self._end(index)
            is_failed = bool(running.problem) and not running.is_stopped
            yield self._error(running.problem) if is_failed else running.ended()

    def _begin(self, index: int, running: RunningAnswer, asked: AnswerRequest, inbox: Inbox) -> None:
        client = self._client
        if client is None:
            raise no_model()
        if self._title is not None:
            self._title.cancel()
        body = self._dialect.body(asked, self._server)
        self._running[index] = running
        self._futures[index] = future = client.begin(self._dialect.path, body, inbox, index)
        if running.is_stopped:  # stop came at this moment
            future.cancel()

    def _end(self, index: int) -> None:
        """Release an answer that is no longer waited for."""
        running, future = self._running.pop(index, None), self._futures.pop(index, None)
        if future is not None and self._client is not None and running is not None and running.is_complete:
            self._client.leave(future)
        elif future is not None:
            future.cancel()
        if not self._running:
            self._waits_for = ""

    def _heard(self, running: RunningAnswer, item: Any) -> tuple[list[TokenEvent], bool]:
        """Return the events of an item, and whether it was the last of its answer. Note any problem."""
        if isinstance(item, bytes):
            events = running.feed(item)
            return events, running.reader.is_over and self._note(running)
        if isinstance(item, Began):
            self._waits_for = ""
            running.began(item)
        elif isinstance(item, Waits):
            what = "the server is limiting requests" if item.status == 429 else "the server is overloaded"
            self._waits_for, self._waits_until = what, time.monotonic() + item.seconds
        elif isinstance(item, Refused):
            running.problem = self._refusal(item)
            if running.has_tools:
                running.problem += without_tools(item)
        elif isinstance(item, Lost):
            running.problem = item.line
        elif isinstance(item, Over):
            error = item.future.exception() if not item.future.cancelled() else None
            if error is not None:
                raise error
            events = running.end() if running.has_begun or not running.problem else []
            return events, self._note(running)
        return [], False

    def _note(self, running: RunningAnswer) -> bool:
        """Record why an ended answer ended abnormally, if it did."""
        reader = running.reader
        if reader.problem and not running.problem and not running.is_stopped:
            kept = "What had arrived is kept" if running.has_begun else "Try again"
            running.problem = sentences(f"{one_line(self._address.host, 80)} {reader.problem}", kept)
        if reader.calls and not running.has_tools and not running.problem and not running.text:
            running.problem = (
                f"{one_line(self.model, 80)} called a tool, although none was offered; ask in another way."
            )
        return True

    def _refusal(self, refused: Refused) -> str:
        """Explain a refusal in one line."""
        models = None
        if refused.status == 404 and self._client is not None:
            with suppress(EngineError):
                models = list_models(self._client, self._dialect, bool(self._key), seconds=_SOON)
        if models:
            return not_found(refused, self._address, models)
        return explain_refusal(refused, self._address, bool(self._key))

    def _count(self) -> None:
        """Count the context: the server's latest count, plus what followed it."""
        self.used_tokens = 0
        for turn in reversed(self._turns):
            stats = TurnStats.of(turn.stats)
            self.used_tokens += stats.prompt_tokens + stats.generated_tokens
            if stats.prompt_tokens:
                return

    def _error(self, line: str) -> EngineError:
        return EngineError(redact(one_line(line, 900), self._key))
