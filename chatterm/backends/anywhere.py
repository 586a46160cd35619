"""The model that is asked for, wherever it runs: one backend after the other, with what was chosen so far."""

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, cast

from chatterm.backends.backend import (
    Backend,
    ChatOptions,
    EngineError,
    Exchange,
    ModelChoice,
    ModelError,
    OnProgress,
    Part,
    Progress,
    reading_text,
)
from chatterm.backends.exchange import Outcome
from chatterm.backends.remote.address import Remote, found
from chatterm.terminal.sanitize import one_line

Here = Callable[[str, ChatOptions], Backend]
"""A backend for a model of this machine."""


class Anywhere:
    """Implements Backend. Nothing of a server is imported before one is asked for, and nothing of the engine."""

    def __init__(self, model: str, options: ChatOptions, remotes: Mapping[str, Remote], here: Here) -> None:
        """Raises EngineError for an address that cannot be one."""
        self.remotes = remotes
        self._here = here
        self._other: Backend | None = None
        """What a comparison asks, while it does."""
        self._opening = ""
        """How far that is with its model, until it is there."""
        self._is_unwanted = False
        """The comparison was stopped before that."""
        self._now = self._made(model, options)

    def __getattr__(self, name: str) -> Any:
        """What is not said here is done by the backend of now."""
        return getattr(self._now, name)

    def _made(self, model: str, options: ChatOptions) -> Backend:
        address = found(model, self.remotes)
        if address is None:
            return self._here(model, options)
        from chatterm.backends.remote.backend import RemoteBackend

        return RemoteBackend(address, options, self.remotes)

    @property
    def _is_remote(self) -> bool:
        return found(self._now.model, self.remotes) is not None

    def switch(self, model: str, on_progress: OnProgress | None = None) -> None:
        if not self._is_remote and found(model, self.remotes) is None:
            self._now.switch(model, on_progress)
            return
        other = self._made(model, self._chosen())
        try:
            other.open(on_progress)
        except BaseException:
            other.close()
            raise
        before, self._now = self._now, other
        before.close()

    def stop(self, but: int | None = None) -> None:
        other = self._other
        if other is None:
            self._now.stop(but)
            return
        if but != 0:
            self._now.stop()
        if but != 1:
            self._is_unwanted = True
            other.stop()

    def waiting(self, index: int = 0) -> str:
        other = self._other
        if other is None or index == 0:
            return self._now.waiting(index)
        return self._opening or other.waiting() or reading_text(other.figures())

    def compare(self, text: str, model: str, path: Sequence[Exchange]) -> Iterator[tuple[int, Part]]:
        other = self._made(model, self._chosen())
        self._other, self._is_unwanted = other, False

        def tell(progress: Progress) -> None:
            if self._is_unwanted:
                raise EngineError("It was stopped before its model was loaded.")
            self._opening = _opening(progress)

        def elsewhere() -> Iterator[tuple[int, Part]]:
            try:
                other.open(tell)
            finally:
                self._opening = ""
            other.load_path(path)
            name = other.info.name if other.info is not None else other.model
            for _, part in other.candidates(text, 1):
                yield 1, replace(part, model=name) if isinstance(part, Outcome) else part

        def here() -> Iterator[tuple[int, Part]]:
            for _, part in self._now.candidates(text, 1):
                yield 0, part

        try:
            with closing(_at_once([here, elsewhere], self.stop)) as parts:
                yield from parts
        finally:
            self._other = None
            other.close()

    def models(self) -> list[str]:
        return [*self._now.models(), *self.remotes]

    def catalogue(self) -> list[ModelChoice]:
        return self._now.catalogue()

    def close(self) -> None:
        if (other := self._other) is not None:
            other.stop()
        self._now.close()

    def _chosen(self) -> ChatOptions:
        """The options as they are by now."""
        return cast("ChatOptions", cast("Any", self._now).options)


def _opening(progress: Progress) -> str:
    """How far a model is that is not there yet, in a few words."""
    verb = "downloading" if progress.stage == "download" else "loading"
    share = f" · {min(100 * progress.done // progress.total, 100)}%" if progress.total else ""
    return f"{verb} {one_line(progress.what, 40)}{share}"


@dataclass(frozen=True, slots=True)
class _Failed:
    """Something nobody foresaw ended a source."""

    error: BaseException


def _at_once(
    sources: Sequence[Callable[[], Iterator[tuple[int, Part]]]], stop: Callable[[], None]
) -> Generator[tuple[int, Part], None, None]:
    """What comes of several, each followed in a thread of its own. An error a person can cause is the last part of
    its own. Closing it stops all of them, and waits for their ends."""
    came: SimpleQueue[tuple[int, Part | _Failed | None]] = SimpleQueue()

    def follow(index: int, source: Callable[[], Iterator[tuple[int, Part]]]) -> None:
        try:
            for _, part in source():
                came.put((index, part))
            came.put((index, None))
        except (EngineError, ModelError) as error:
            came.put((index, error))
            came.put((index, None))
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            came.put((index, _Failed(error)))

    threads = [
        threading.Thread(target=follow, args=pair, name="chatterm-compare", daemon=True)
        for pair in enumerate(sources)
    ]
    for thread in threads:
        thread.start()
    left = len(threads)
    try:
        while left:
            index, part = came.get()
            if isinstance(part, _Failed):
                raise part.error
            if part is None:
                left -= 1
            else:
                yield index, part
    finally:
        if left:
            stop()
        for thread in threads:
            with suppress(RuntimeError):
                thread.join(5.0)
