"""The model that is asked for, wherever it runs: one backend after another, with the settings carried over."""

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from queue import SimpleQueue

from chatterm.backends.backend import (
    Backend,
    ChatOptions,
    EngineError,
    Exchange,
    ModelError,
    OnProgress,
    Part,
    Progress,
    reading_text,
)
from chatterm.backends.exchange import Outcome
from chatterm.backends.forwarding import ForwardingBackend
from chatterm.backends.remote.address import Remote, found
from chatterm.terminal.sanitize import one_line

Here = Callable[[str, ChatOptions], Backend]
"""Makes a backend for a model on this machine."""


class BackendRouter(ForwardingBackend):
    """Implements Backend. No code of the remote backend is imported before a server is asked for, and none of the
    engine.
    """

    def __init__(self, model: str, options: ChatOptions, remotes: Mapping[str, Remote], here: Here) -> None:
        """Make the backend of `model`. Raises EngineError for an invalid address."""
        self.remotes = remotes
        self._here = here
        self._other: Backend | None = None
        """The other backend of a running comparison."""
        self._opening = ""
        """The loading progress of the other backend, until it is ready."""
        self._is_unwanted = False
        """Whether the comparison was stopped before the other backend was ready."""
        super().__init__(self._made(model, options))

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
        other = self._made(model, self._now.options)
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
        other = self._made(model, self._now.options)
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

    def close(self) -> None:
        if (other := self._other) is not None:
            other.stop()
        self._now.close()


def _opening(progress: Progress) -> str:
    """Say in a few words how far a model has been loaded."""
    verb = "downloading" if progress.stage == "download" else "loading"
    share = f" · {min(100 * progress.done // progress.total, 100)}%" if progress.total else ""
    return f"{verb} {one_line(progress.what, 40)}{share}"


def _at_once(
    sources: Sequence[Callable[[], Iterator[tuple[int, Part]]]], stop: Callable[[], None]
) -> Generator[tuple[int, Part], None, None]:
    """Yield the items of several sources, each followed in a thread of its own.

    An EngineError or ModelError is the last item of its source. Closing the generator stops all sources and waits for
    them to end.
    """
    came: SimpleQueue[tuple[int, Part | BaseException | None]] = SimpleQueue()

    def follow(index: int, source: Callable[[], Iterator[tuple[int, Part]]]) -> None:
        try:
            for _, part in source():
                came.put((index, part))
        except BaseException as error:  # noqa: BLE001 - yielded or raised where it is waited for
            came.put((index, error))
        came.put((index, None))

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
            if part is None:
                left -= 1
            elif isinstance(part, BaseException) and not isinstance(part, EngineError | ModelError):
                raise part
            else:
                yield index, part
    finally:
        if left:
            stop()
        for thread in threads:
            with suppress(RuntimeError):
                thread.join(5.0)
