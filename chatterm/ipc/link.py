"""A client's connection, for threads: calls of it run side by side, and a thread reads what comes of them."""

import itertools
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from msgspec import Raw

from chatterm.ipc.frames import FrameError, FrameReader
from chatterm.ipc.messages import (
    Call,
    Cancel,
    Done,
    Failed,
    Feed,
    Item,
    ToServer,
    from_server,
    pack,
    to_frame,
    unpack,
)
from engine.errors import ContextFullError, EngineError
from models.errors import ModelError

T = TypeVar("T")
_CHUNK = 256 * 1024


class ServerGoneError(EngineError):
    """The server has ended, or was ended, while it was asked something."""

    def __init__(self, why: str = "") -> None:
        super().__init__(f"The chatterm server has ended{why and f': {why}'}.")
        self.why = why


Then = Callable[[Item | Done | Failed | None], None]
"""Gets what comes of a call, in the link's own thread; None where the connection is lost."""


class Link:
    """One connection. From any thread."""

    def __init__(self, peer: socket.socket) -> None:
        """Takes over a connected socket."""
        self._peer = peer
        self._numbers = itertools.count(1)
        self._calls: dict[int, Then] = {}
        self._state = threading.Lock()
        self._sending = threading.Lock()
        self.is_lost = False
        threading.Thread(target=self._read, name="link", daemon=True).start()

    def begin(self, method: str, body: Any, then: Then) -> int:
        """Have something done. Returns at once, with the number of the call. Raises ServerGoneError."""
        frame_of, id = pack(body), next(self._numbers)
        with self._state:
            if self.is_lost:
                raise ServerGoneError
            self._calls[id] = then
        self.send(Call(id, method, frame_of))
        return id

    def call(self, method: str, body: Any = None) -> "Answers":
        """Have something done, and wait for what comes of it. Raises ServerGoneError."""
        return Answers(self, method, body)

    def ask(self, method: str, body: Any, kind: type[T], timeout: float | None = None) -> T:
        """Call, and return the result. `timeout` in seconds.

        Raises ServerGoneError, what the server says went wrong, and EngineError where it does not answer in time.
        """
        answers = self.call(method, body)
        while answers.next(timeout) is not None:
            pass
        return unpack(answers.result, kind)

    def send(self, message: ToServer) -> None:
        """What the other side does not get is told by the thread that reads."""
        frame = to_frame(message)
        with self._sending, suppress(OSError):
            self._peer.sendall(frame)

    def close(self) -> None:
        """Part. Closing twice is fine."""
        with suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        reader = FrameReader()
        try:
            while data := self._peer.recv(_CHUNK):
                for body in reader.feed(data):
                    self._take(from_server(body))
        except (OSError, FrameError):
            pass
        with self._state:
            self.is_lost = True
            calls, self._calls = self._calls, {}
        self._peer.close()
        for then in calls.values():
            then(None)

    def _take(self, message: Item | Done | Failed) -> None:
        if isinstance(message, Item):
            then = self._calls.get(message.id)
        else:
            with self._state:
                then = self._calls.pop(message.id, None)
        if then is not None:
            then(message)


class Answers:
    """What comes of one call, for the thread that waits for it."""

    def __init__(self, link: Link, method: str, body: Any) -> None:
        self._link = link
        self._came: SimpleQueue[Item | Done | Failed | None] = SimpleQueue()
        self.result = Raw(b"\xc0")
        self.is_over = False
        self._id = link.begin(method, body, self._came.put)

    def next(self, timeout: float | None = None) -> Raw | None:
        """The body of the next item; None at the end. Raises ServerGoneError, and what the server says went wrong."""
        if self.is_over:
            return None
        try:
            message = self._came.get(timeout=timeout)
        except Empty:
            raise EngineError("The chatterm server does not answer; see chatterm ps.") from None
        if isinstance(message, Item):
            return message.body
        self.is_over = True
        if message is None:
            raise ServerGoneError
        if isinstance(message, Failed):
            raise to_error(message)
        self.result = message.body
        return None

    def feed(self, body: Any) -> None:
        """What the call has asked for."""
        self._link.send(Feed(self._id, pack(body)))

    def cancel(self) -> None:
        """Nobody wants the rest; the end comes all the same."""
        if not self.is_over:
            self._link.send(Cancel(self._id))


def to_error(failed: Failed) -> EngineError | ModelError:
    """The error that the server told of."""
    if failed.fields.get("code") == "shutting_down":
        return ServerGoneError()
    if failed.kind == "gpu_lost":
        return ServerGoneError("the GPU was lost")
    if failed.kind == "model":
        return ModelError(failed.message)
    if failed.kind == "context":
        needed, available = failed.fields.get("needed", 0), failed.fields.get("available", 0)
        return ContextFullError(failed.message, needed=needed, available=available)
    return EngineError(failed.message)
