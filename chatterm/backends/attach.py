"""A running server as the backend of a chat, where there is one, and an engine in this process once that has ended."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from chatterm.backends.backend import (
    Backend,
    ChatOptions,
    EngineError,
    Exchange,
    Figures,
    OnProgress,
    Outcome,
    TokenEvent,
)
from chatterm.backends.wire import ENGINE_OPTIONS, Hello, Welcome, agreed
from chatterm.channel.link import Link, ServerGoneError
from chatterm.channel.runtime import connected

if TYPE_CHECKING:
    from chatterm.backends.remote import RemoteBackend

_PATIENCE = 5.0
"""Seconds in which a server has to answer."""
_ENDED = "The chatterm server has ended; the model runs in this process now."


def greeted(kind: str) -> tuple[Link, Welcome] | None:
    """A connection to the server of this user; None where there is none. Raises EngineError where it is of no use."""
    peer = connected()
    if peer is None:
        return None
    link = Link(peer)
    try:
        return link, link.ask("hello", Hello(agreed(), kind, os.getpid()), Welcome, _PATIENCE)
    except ServerGoneError:
        link.close()
        return None  # it ended in this moment
    except EngineError:
        link.close()
        raise


def attached(model: str, options: ChatOptions) -> tuple[Backend | None, str]:
    """A backend on the server, where one runs that computes as `options` say; else None, and in a line why not."""
    try:
        found = greeted("terminal")
    except EngineError as error:
        return None, f"{error} The model is loaded in this process."
    if found is None:
        return None, ""
    link, welcome = found
    other = [name for name in ENGINE_OPTIONS if _differs(name, options, welcome.options)]
    if other:
        link.close()
        names = ", ".join(f"--{_OPTION.get(name, name)}" for name in other)
        return None, f"The server that runs here has another {names}, so the model is loaded in this process."
    from chatterm.backends.remote import RemoteBackend

    return cast("Backend", Attached(RemoteBackend(link, model, options), options)), ""


_OPTION = {"graphs": "no-graph", "offload_gb": "offload-gb"}


def _differs(name: str, asked: ChatOptions, given: ChatOptions) -> bool:
    """Whether an option was asked for that the server was not started with."""
    wanted = getattr(asked, name)
    return bool(wanted != getattr(ChatOptions(), name) and wanted != getattr(given, name))


_WORK = frozenset(
    {
        *("candidates", "answers", "set_system", "set_think", "set_think_cache", "set_sampling", "models"),
        "catalogue",
    }
)
"""Calls of the worker that change nothing of the path."""
_IDLE: dict[str, Any] = {"settle": None, "prepare": None, "count": None, "begin_title": True}
"""Calls for which no model is loaded, and what they return then."""


class Attached:
    """Implements Backend: a remote one while its server lives, and a local one with the same history from then on."""

    def __init__(self, remote: "RemoteBackend", options: ChatOptions) -> None:
        self._remote = remote
        self._now: Backend = remote
        self._options = options
        self._path: list[Exchange] = []

    def __getattr__(self, name: str) -> Any:
        """What is not said here is done by the backend of now."""
        if self._has_ended and name in _IDLE:
            return lambda *arguments: _IDLE[name]
        return getattr(self._here() if name in _WORK else self._now, name)

    def figures(self) -> Figures | None:
        figures = self._now.figures()
        if figures is None or self._now is self._remote:
            return figures
        return replace(figures, notes=(*figures.notes, _ENDED))

    def open(self, on_progress: OnProgress | None = None) -> None:
        if self._has_ended:
            self._here(on_progress)
        else:
            self._now.open(on_progress)

    def switch(self, model: str, on_progress: OnProgress | None = None) -> None:
        self._here().switch(model, on_progress)
        self._path = []

    def send(self, text: str) -> Iterator[TokenEvent]:
        return self._follow(self._here().send(text), text, self._path)

    def retry(self) -> Iterator[TokenEvent]:
        return self._again(self._here().retry())

    def resume(self) -> Iterator[TokenEvent]:
        return self._again(self._here().resume())

    def load_path(self, exchanges: Sequence[Exchange]) -> None:
        self._path = list(exchanges)
        if not self._has_ended:  # else it is loaded with the model
            self._now.load_path(exchanges)

    def undo(self) -> bool:
        done = self._here().undo()
        self._path = self._path[:-1] if done else self._path
        return done

    def reset(self) -> None:
        self._path = []
        if not self._has_ended:
            self._now.reset()

    def _again(self, events: Iterator[TokenEvent]) -> Iterator[TokenEvent]:
        """Another answer to the last message, or more of it."""
        return self._follow(events, self._path[-1].user if self._path else "", self._path[:-1])

    def _follow(
        self, events: Iterator[TokenEvent], text: str, before: Sequence[Exchange]
    ) -> Iterator[TokenEvent]:
        """Keep what comes of an answer, so that another engine can go on with it."""
        began = is_cut = False
        try:
            for event in events:
                began = True
                yield event
        except ServerGoneError as error:
            is_cut = True
            raise EngineError(
                f"{error} What came of the answer is kept; ask again, and the model is loaded in this process."
            ) from None
        finally:
            cast("Any", events).close()
            last = self._now.last
            if began and last is not None:
                made = _exchange(text, last, self._now)
                # As after a crash: nobody knows what was said after these tokens.
                made.finish_reason = None if is_cut else made.finish_reason
                self._path = [*before, made]

    @property
    def _has_ended(self) -> bool:
        return self._now is self._remote and self._remote.is_lost

    def _here(self, on_progress: OnProgress | None = None) -> Backend:
        """The backend that answers: once the server has ended one with an engine of its own."""
        if not self._has_ended:
            return self._now
        from chatterm.backends.local import LocalBackend

        old = self._remote
        options = replace(
            self._options,
            system=old.system,
            think=old.think,
            think_cache=old.think_cache,
            sampling=old.sampling,
        )
        backend = LocalBackend(old.model, options)
        backend.load_path(self._path)
        backend.open(on_progress)
        self._now = backend
        return backend


def _exchange(text: str, last: Outcome, backend: Backend) -> Exchange:
    made = Exchange(0, None, text, model=backend.info.name if backend.info is not None else backend.model)
    made.take(last)
    return made
