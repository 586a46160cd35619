"""The backend of a chat: a server if one runs or can be started, and an engine in this process once it has ended."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from chatterm.backends.backend import (
    ENGINE_OPTIONS,
    Backend,
    ChatOptions,
    EngineError,
    Exchange,
    Figures,
    OnProgress,
    Outcome,
    TokenEvent,
    ToolResult,
)
from chatterm.backends.forwarding import ForwardingBackend
from chatterm.backends.protocol import Hello, HelloReply, agreed
from chatterm.ipc.link import Link, ServerGoneError
from chatterm.ipc.runtime import ServerRunsError, connect

if TYPE_CHECKING:
    from chatterm.backends.process import ProcessBackend

Start = Callable[[], Callable[[], None]]
"""Starts a server; returns a function that releases it: from then on it lives as long as it is needed.

Raises ServerRunsError if one already runs, and EngineError.
"""
_PATIENCE = 5.0
"""Seconds for a server to answer, or to finish ending."""
_AGAIN = 0.1
"""Seconds between two attempts to start a server."""
_HERE = "The model is loaded in this process."
_ENDED = "The chatterm server has ended; the model runs in this process now."


def connect_to_server(kind: str) -> tuple[Link, HelloReply] | None:
    """Connect to this user's server; return None if there is none. Raises EngineError if it cannot be used."""
    peer = connect()
    if peer is None:
        return None
    link = Link(peer)
    try:
        return link, link.ask("hello", Hello(agreed(), kind, os.getpid()), HelloReply, _PATIENCE)
    except ServerGoneError:
        link.close()
        return None  # it ended at this moment
    except EngineError:
        link.close()
        raise


def attach(
    model: str, options: ChatOptions, start: Start | None = None, keep_alive_s: float | None = None
) -> tuple["FailoverBackend | None", str]:
    """Return a backend on a running server whose options match `options`; otherwise None and a line that says why.

    With `start`, a server is started if none runs, once the model is opened; a server that was left behind then keeps
    the model for `keep_alive_s` (below 0: forever).
    """
    peer, why = _found(options)
    if peer is None and (why or start is None):
        return None, why
    return FailoverBackend(model, options, peer, start, keep_alive_s), ""


@dataclass(frozen=True, slots=True)
class Stays:
    """What a conversation leaves behind: a loaded model in another process."""

    bytes: int
    keep_alive_s: float
    """Seconds until an unused model is freed; below 0: never."""


_Peer = tuple[Link, HelloReply]


def _found(options: ChatOptions) -> tuple[_Peer | None, str]:
    """Connect to the running server if its options match; otherwise return a line that says why not, "" if none
    runs.
    """
    try:
        peer = connect_to_server("terminal")
    except EngineError as error:
        return None, f"{error} {_HERE}"
    if peer is None:
        return None, ""
    link, welcome = peer
    if other := [name for name in ENGINE_OPTIONS if _differs(name, options, welcome.options)]:
        link.close()
        names = ", ".join(f"--{_OPTION.get(name, name.replace('_', '-'))}" for name in other)
        end = " chatterm stop ends that server." if welcome.ends_unused else ""
        why = f"The running server was started with another {names}, so the model is loaded in this process."
        return None, why + end
    return peer, ""


def _started(options: ChatOptions, start: Start) -> tuple[_Peer | None, str]:
    """Connect as `_found` does, but start a server if none runs. Raises EngineError if none can be started."""
    until = time.monotonic() + _PATIENCE
    while True:
        peer, why = _found(options)
        if peer is not None or why:
            return peer, why
        try:
            let_go = start()
        except ServerRunsError:  # another terminal was faster, or a server is about to end
            if time.monotonic() > until:
                raise
            time.sleep(_AGAIN)
            continue
        try:
            return _found(options)
        finally:
            let_go()


_OPTION = {"graphs": "no-graph", "tune": "no-tune"}


def _differs(name: str, asked: ChatOptions, given: ChatOptions) -> bool:
    """Return whether an option was asked for that the server was not started with."""
    wanted = getattr(asked, name)
    return bool(wanted != getattr(ChatOptions(), name) and wanted != getattr(given, name))


class FailoverBackend(ForwardingBackend):
    """Implements Backend: on a server while that lives, and with a local engine and the same history from then on.

    Before it is opened, a local backend that loads nothing holds the settings and the path.
    """

    def __init__(
        self,
        model: str,
        options: ChatOptions,
        peer: _Peer | None,
        start: Start | None = None,
        keep_alive_s: float | None = None,
    ) -> None:
        self._start = start
        self._keep_alive_s = keep_alive_s
        self._path: list[Exchange] = []
        self._note = ""
        self._process: ProcessBackend | None = None
        self._welcome: HelloReply | None = None
        self.stays: Stays | None = None
        """The model that is left loaded, once this is closed."""
        super().__init__(self._on(peer, model, options) if peer is not None else _local(model, options))

    def figures(self) -> Figures | None:
        figures = self._now.figures()
        if figures is None or not self._note or self._now is self._process:
            return figures
        return replace(figures, notes=(*figures.notes, self._note))

    def notes(self) -> Sequence[str]:
        figures = self.figures()
        return figures.notes if figures is not None else ()

    def open(self, on_progress: OnProgress | None = None) -> None:
        self._begin()
        self._load(lambda: self._answering(on_progress) if self._has_ended else self._now.open(on_progress))

    def switch(self, model: str, on_progress: OnProgress | None = None) -> None:
        self._begin()
        if self._has_ended:
            backend = _local(model, self._now.options)
            backend.open(on_progress)
            self._now, self._note = backend, _ENDED
        else:
            self._load(lambda: self._now.switch(model, on_progress))
        self._path = []

    def close(self) -> None:
        """Close the backend, and note which model stays loaded in the server. Closing twice is fine."""
        welcome, figures = self._welcome, self._now.figures()
        is_there = self._now is self._process and not self._has_ended and figures is not None
        if welcome is not None and welcome.ends_unused and is_there and self.stays is None:
            usual, asked = welcome.keep_alive_s, self._keep_alive_s
            assert figures is not None
            self.stays = Stays(figures.weight_bytes + figures.kv_bytes, usual if asked is None else asked)
        self._now.close()

    def _on(self, peer: _Peer, model: str, options: ChatOptions) -> Backend:
        """Return a backend on this server."""
        from chatterm.backends.process import ProcessBackend

        link, self._welcome = peer
        if not self._welcome.ends_unused:  # whoever started it decides how long models stay
            self._keep_alive_s = None
        self._process = ProcessBackend(link, model, options, self._keep_alive_s)
        return self._process

    def _begin(self) -> None:
        """Connect to the server, or start it, before the first model is loaded."""
        start, self._start = self._start, None
        if start is None or self._process is not None:
            return
        try:
            peer, why = _started(self.options, start)
        except EngineError as error:
            peer, why = None, f"{error} {_HERE}"
        if peer is None:
            self._note = why or f"The engine process has ended. {_HERE}"
        else:
            self._now = self._moved(self._on(peer, self._now.model, self._now.options))

    def _load(self, load: Callable[[], object]) -> None:
        try:
            load()
        except ServerGoneError as error:
            if error.why:
                raise EngineError(
                    f"{error} Open the model again: it is then loaded in this process."
                ) from None
            raise EngineError(
                "The engine process ended while it was loading the model; it may have run out of memory. Choose a "
                "smaller model, or free some memory."
            ) from None

    def send(self, text: str) -> Iterator[TokenEvent]:
        return self._follow(self._answering().send(text), text, self._path)

    def tell(self, results: Sequence[ToolResult]) -> Iterator[TokenEvent]:
        return self._follow(self._answering().tell(results), "", self._path, results)

    def resume(self) -> Iterator[TokenEvent]:
        last = self._path[-1] if self._path else None
        text, results = (last.user, last.results) if last is not None else ("", [])
        return self._follow(self._answering().resume(), text, self._path[:-1], results)

    def load_path(self, exchanges: Sequence[Exchange]) -> None:
        self._path = list(exchanges)
        if not self._has_ended:  # otherwise it is loaded with the model
            self._now.load_path(exchanges)

    def reset(self) -> None:
        self._path = []
        if not self._has_ended:
            self._now.reset()

    def _follow(
        self,
        events: Iterator[TokenEvent],
        text: str,
        before: Sequence[Exchange],
        results: Sequence[ToolResult] = (),
    ) -> Iterator[TokenEvent]:
        """Yield the events of an answer and record it, so that another engine can continue it."""
        began = is_cut = False
        try:
            for event in events:
                began = True
                yield event
        except ServerGoneError as error:
            is_cut = True
            raise EngineError(
                f"{error} What had arrived of the answer is kept. Ask again: the model is then loaded in this process."
            ) from None
        finally:
            cast("Any", events).close()
            last = self._now.last
            if began and last is not None:
                made = _exchange(text, last, self._now)
                made.results = list(results)
                # As after a crash: what followed these tokens is unknown.
                made.finish_reason = None if is_cut else made.finish_reason
                self._path = [*before, made]

    @property
    def _has_ended(self) -> bool:
        return self._process is not None and self._now is self._process and self._process.is_lost

    def _answering(self, on_progress: OnProgress | None = None) -> Backend:
        """Return the backend that answers: once the server has ended, one with an engine of its own."""
        if self._has_ended:
            backend = self._moved(_local(self._now.model, self._now.options))
            backend.open(on_progress)
            self._now, self._note = backend, _ENDED
        return self._now

    def _moved(self, backend: Backend) -> Backend:
        """Hand the conversation over to `backend` and return it."""
        backend.load_path(self._path)
        return backend


def _local(model: str, options: ChatOptions) -> Backend:
    from chatterm.backends.local import LocalBackend

    return LocalBackend(model, options)


def _exchange(text: str, last: Outcome, backend: Backend) -> Exchange:
    made = Exchange(0, None, text, model=backend.info.name if backend.info is not None else backend.model)
    made.take(last)
    return made
