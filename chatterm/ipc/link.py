"""A client's connection, for threads: its calls run concurrently, and one thread reads their results."""

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
    """The server exited, or was stopped, before it answered a call."""

    def __init__(self, why: str = "") -> None:
        super().__init__(f"The chatterm server has ended{why and f': {why}'}.")
        self.why = why


Then = Callable[[Item | Done | Failed | None], None]
"""Receives the messages of a call, on the link's own thread; None when the connection is lost."""


class Link:
    """One connection to the server. Its methods may be called from any thread."""

    def __init__(self, peer: socket.socket) -> None:
        """Take over a connected socket."""
        self._peer = peer
        self._numbers = itertools.count(1)
        self._calls: dict[int, Then] = {}
        self._state = threading.Lock()
        self._sending = threading.Lock()
        self.is_lost = False
        threading.Thread(target=self._read, name="link", daemon=True).start()

    def begin(self, method: str, body: Any, then: Then) -> int:
        """Start a call and return its number at once. Raises ServerGoneError."""
        frame_of, id = pack(body), next(self._numbers)
        with self._state:
            if self.is_lost:
                raise ServerGoneError
            self._calls[id] = then
        self.send(Call(id, method, frame_of))
        return id

    def call(self, method: str, body: Any = None) -> "Answers":
        """Start a call and return its answers, to be waited for. Raises ServerGoneError."""
        return Answers(self, method, body)

    def ask(self, method: str, body: Any, kind: type[T], timeout: float | None = None) -> T:
        """Call, and return the result. `timeout` is in seconds, for each message.

        Raises ServerGoneError, the error that the server reports, and EngineError if it does not answer in time.
        """
        answers = self.call(method, body)
        while answers.next(timeout) is not None:
            pass
        return unpack(answers.result, kind)

    def send(self, message: ToServer) -> None:
        """Send a message. If the connection is lost, the reading thread notices it; nothing is raised here."""
        frame = to_frame(message)
        with self._sending, suppress(OSError):
            self._peer.sendall(frame)

    def close(self) -> None:
        """Close the connection. Closing twice is fine."""
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
    """The answers to one call, for the thread that waits for them."""

    def __init__(self, link: Link, method: str, body: Any) -> None:
        self._link = link
        self._came: SimpleQueue[Item | Done | Failed | None] = SimpleQueue()
        self.result = Raw(b"\xc0")
        self.is_over = False
        self._id = link.begin(method, body, self._came.put)

    def next(self, timeout: float | None = None) -> Raw | None:
        """Return the body of the next item; None at the end. Raises ServerGoneError and errors the server reports."""
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
        """Send the input that the running call has asked for."""
        self._link.send(Feed(self._id, pack(body)))

    def cancel(self) -> None:
        """Cancel the call unless it is over; its final message still arrives."""
        if not self.is_over:
            self._link.send(Cancel(self._id))


def to_error(failed: Failed) -> EngineError | ModelError:
    """Return the exception for an error that the server reported."""
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
