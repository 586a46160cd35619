"""A conversation with an engine in another process on this machine, as a Backend."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from msgspec import Raw

from chatterm.backends.backend import (
    Backend,
    ChatOptions,
    ConversationSettings,
    Document,
    DraftCost,
    EngineError,
    Exchange,
    Figures,
    FinishReason,
    ModelChoice,
    ModelError,
    OnProgress,
    Outcome,
    Part,
    Request,
    TokenEvent,
    ToolResult,
    TurnStats,
)
from chatterm.backends.base import BackendBase, changed, no_model
from chatterm.backends.protocol import (
    BegunAnswer,
    LiveState,
    Loading,
    OnePart,
    Open,
    Said,
    ServerStatus,
    State,
    Tokens,
    Wanted,
)
from chatterm.ipc.link import Answers, Link, ServerGoneError, Then, to_error
from chatterm.ipc.messages import Done, Failed, Item, unpack

if TYPE_CHECKING:
    from engine.cache.block_map import BlockMap

_AGAIN = 0.03
"""Seconds between two requests for figures."""
_SOON = 0.5
"""Time limit in seconds of a call that a screen waits for."""
_PATIENCE = 5.0
"""Time limit in seconds of a call that no screen waits for."""

P = ParamSpec("P")
T = TypeVar("T")


class ProcessBackend(BackendBase):
    """Implements Backend. The conversation is in the server; what a screen shows is kept here.

    When the server is gone, calls raise ServerGoneError and the part of the answer that arrived is kept.
    """

    def __init__(
        self, link: Link, model: str, options: ChatOptions, keep_alive_s: float | None = None
    ) -> None:
        """`keep_alive_s` is as in Open."""
        super().__init__(model, options)
        self._keep_alive_s = keep_alive_s
        self._link = link
        self._has_opened = False
        self._last: Outcome | None = None
        self._running: _PartialAnswer | None = None
        self._look = LiveState(None, None)
        self._looks_at = 0.0
        self._awaited: set[str] = set()
        """The methods whose results have been requested and have not arrived."""
        self._map: BlockMap | None = None
        self._texts: dict[int, str | None] = {}

    @property
    def is_lost(self) -> bool:
        """Whether the server is gone."""
        return self._link.is_lost

    @property
    def _is_open(self) -> bool:
        return self._has_opened and not self.is_lost

    # --- anyone ---

    @property
    def last(self) -> Outcome | None:
        running = self._running
        return running.outcome() if running is not None else self._last

    def figures(self) -> Figures | None:
        self._look_again()
        return self._look.figures

    def made_title(self) -> str | None:
        self._look_again()
        return self._look.title

    def blocks(self) -> "BlockMap | None":
        from engine.cache.block_map import BlockMap

        def keep(body: Raw) -> None:
            self._map = unpack(body, BlockMap | None)  # type: ignore[arg-type]

        self._request("blocks", keep)
        return self._map

    def token_text(self, token_id: int) -> str | None:
        if token_id not in self._texts and self._is_open:
            with suppress(EngineError):  # the server is gone or slow
                kind: Any = str | None
                self._texts[token_id] = self._link.ask("token_text", (token_id,), kind, _SOON)
        return self._texts.get(token_id)

    def stop(self, but: int | None = None) -> None:
        if self._is_open:
            self._post("stop", (but,))

    def answer_now(self) -> None:
        if self._is_open:
            self._post("answer_now")

    def _look_again(self) -> None:
        now = time.monotonic()
        if now < self._looks_at + _AGAIN:
            return

        def keep(body: Raw) -> None:
            self._look = unpack(body, LiveState)

        self._looks_at = now
        self._request("look", keep)

    def _request(self, method: str, keep: Callable[[Raw], None]) -> None:
        """Call a method unless its result is awaited already; `keep` takes the result once it arrives."""

        def came(message: Item | Done | Failed | None) -> None:
            self._awaited.discard(method)
            if isinstance(message, Done):
                keep(message.body)

        if self._is_open and method not in self._awaited:
            self._awaited.add(method)
            self._post(method, (), came)

    def _post(self, method: str, body: Any = (), then: Then = lambda message: None) -> None:
        try:
            self._link.begin(method, body, then)
        except ServerGoneError:
            then(None)

    # --- the worker ---

    def open(self, on_progress: OnProgress | None = None) -> None:
        wanted = Open(self.model, str(Path.cwd()), self.options, self._keep_alive_s)
        self._finish(self._link.call("open", wanted), on_progress)
        self._has_opened = True
        path, self._path = self._path, ()
        if path:
            self.load_path(path)

    def switch(self, model: str, on_progress: OnProgress | None = None) -> None:
        if not self._has_opened:
            self.model = model
            return self.open(on_progress)
        self._finish(self._begin(Backend.switch, model), on_progress)
        self.model, self._texts, self._map = model, {}, None
        return None

    def send(self, text: str) -> Iterator[TokenEvent]:
        return self._events(self._begin(Backend.send, text))

    def tell(self, results: Sequence[ToolResult]) -> Iterator[TokenEvent]:
        return self._events(self._begin(Backend.tell, results))

    def resume(self) -> Iterator[TokenEvent]:
        return self._events(self._begin(Backend.resume))

    def candidates(self, text: str, count: int) -> Iterator[tuple[int, Part]]:
        return self._parts(self._begin(Backend.candidates, text, count), iter(()))

    def answers(self, requests: Iterable[Request]) -> Iterator[tuple[int, Part]]:
        return self._parts(self._begin(Backend.answers, ()), iter(requests))

    def load_path(self, exchanges: Sequence[Exchange]) -> None:
        if self._has_opened:
            self._value(Backend.load_path, self._known(exchanges))
        else:
            self._path = tuple(exchanges)

    def _known(self, exchanges: Sequence[Exchange]) -> list[Exchange]:
        """Return the exchanges with the server's name of the model."""
        name = self.info.name if self.info is not None else ""
        return [
            replace(exchange, model=name) if exchange.model == self.model else exchange
            for exchange in exchanges
        ]

    def count(self, draft: str) -> DraftCost | None:
        return self._value(Backend.count, draft) if self._is_open else None

    def reset(self) -> None:
        self._path = ()
        if self._has_opened:
            self._value(Backend.reset)

    def configure(self, settings: ConversationSettings) -> None:
        options = changed(self.options, settings)
        if self._has_opened:
            self._value(Backend.configure, settings)
        self.options = options

    def read(self, document: Document) -> int | None:
        return self._value(Backend.read, document) if self._has_opened else None

    def know(self, exchanges: Sequence[Exchange]) -> None:
        if self._has_opened:
            self._value(Backend.know, self._known(exchanges))

    def settle(self) -> None:
        if self._is_open:
            self._value(Backend.settle)

    def prepare(self, draft: str) -> None:
        if self._is_open:
            self._value(Backend.prepare, draft)

    def begin_title(self, question: str, answer: str) -> bool:
        return not self._is_open or self._value(Backend.begin_title, question, answer)

    def catalogue(self) -> list[ModelChoice]:
        return self._value(Backend.catalogue) if self._has_opened else []

    def has_loaded(self, model: str) -> bool:
        try:
            status = self._link.ask("status", None, ServerStatus, _PATIENCE)
        except EngineError:  # the server is gone or hangs
            return False
        return any(one.name == model for one in status.models)

    def close(self) -> None:
        self._has_opened, self.info = False, None
        self._link.close()

    # --- internals ---

    def _begin(
        self, method: Callable[Concatenate[Any, P], object], /, *arguments: P.args, **named: P.kwargs
    ) -> Answers:
        """Start a call of a method of Backend."""
        if not self._has_opened:
            raise no_model()
        return self._link.call(method.__name__, (*arguments, *named.values()))

    def _value(self, method: Callable[Concatenate[Any, P], T], /, *arguments: P.args, **named: P.kwargs) -> T:
        """Call a method of Backend and return its result."""
        state = self._finish(self._begin(method, *arguments, **named))
        return unpack(state.value, method.__annotations__["return"])  # type: ignore[no-any-return]

    def _finish(self, answers: Answers, on_progress: OnProgress | None = None) -> State:
        """Wait for the end of a call that yields nothing."""
        for said in self._said(answers):
            if isinstance(said, Loading) and on_progress is not None:
                try:
                    on_progress(said.progress)
                except BaseException:
                    answers.cancel()
                    raise
        return self._over(answers)

    def _said(self, answers: Answers) -> Iterator[Said]:
        """Yield the messages of a call. If it fails, the reported state of the server is taken over first."""
        while (body := answers.next()) is not None:
            said: Said = unpack(body, Said)  # type: ignore[arg-type]
            if isinstance(said, State):
                self._take(said)
            else:
                yield said

    def _over(self, answers: Answers) -> State:
        state = unpack(answers.result, State)
        self._take(state)
        return state

    def _take(self, state: State) -> None:
        self.info, self.used_tokens, self._look = state.info, state.used_tokens, state.look
        for last in state.last:
            self._last, self._running = last, None

    def _events(self, answers: Answers) -> Iterator[TokenEvent]:
        try:
            for said in self._said(answers):
                if isinstance(said, BegunAnswer):
                    self._running = _PartialAnswer(said.outcome)
                elif isinstance(said, Tokens):
                    for event in said.events:
                        if self._running is not None:
                            self._running.add(event, said.stats)
                        yield event
            self._over(answers)
        finally:
            self._leave(answers)

    def _leave(self, answers: Answers) -> None:
        """Wait for the end of an answer that is no longer read: the server reports how much of it is kept."""
        try:
            if not answers.is_over:
                answers.cancel()
                for _ in self._said(answers):
                    pass
                self._over(answers)
        except (EngineError, ModelError):
            pass
        if (running := self._running) is not None:  # the server can no longer report it
            self._running, self._last = None, running.outcome(FinishReason.CANCELLED)

    def _parts(self, answers: Answers, requests: Iterator[Request]) -> Iterator[tuple[int, Part]]:
        try:
            for said in self._said(answers):
                if isinstance(said, Wanted):
                    request = next(requests, None)
                    answers.feed(None if request is None else request)
                elif isinstance(said, OnePart):
                    yield said.index, _part(said)
            self._over(answers)
        finally:
            self._leave(answers)


class _PartialAnswer:
    """An answer so far."""

    def __init__(self, before: Outcome) -> None:
        self._before = before
        self._text, self._reasoning = before.text, before.reasoning
        self._ids = list(before.token_ids)
        self._stats = before.stats

    def add(self, event: TokenEvent, stats: TurnStats) -> None:
        self._ids.append(event.token_id)
        self._stats = stats
        if event.kind == "reasoning":
            self._reasoning += event.text
        elif event.kind == "answer":
            self._text += event.text

    def outcome(self, reason: FinishReason | None = None) -> Outcome:
        before = self._before
        return Outcome(
            self._text,
            self._reasoning,
            reason,
            self._stats,
            self._ids,
            before.shown,
            before.opening,
            before.seed,
            before.ends_at if reason is None else None,
        )


def _part(said: OnePart) -> Part:
    unknown = Failed(0, "engine", "The answer failed; try again.", {})
    return said.token or said.outcome or to_error(said.error or unknown)
