"""A client's connection to the engine process: its calls and their output."""

import asyncio
from secrets import compare_digest
from typing import Any, Protocol

from msgspec import Raw

from chatterm.backends.backend import ContextFullError, EngineError, ModelError
from chatterm.backends.protocol import Hello
from chatterm.ipc.frames import FrameError, FrameReader
from chatterm.ipc.messages import (
    NOTHING,
    Call,
    Cancel,
    Done,
    Failed,
    Feed,
    Item,
    ToClient,
    from_client,
    pack,
    to_frame,
    unpack,
)
from chatterm.ipc.runtime import is_own
from chatterm.server.process.frame_batcher import FrameSource, Pump
from chatterm.server.service import RequestError
from chatterm.server.write_coalescing import GatheringTransport
from chatterm.terminal.error_log import error_line, write_down
from engine.errors import GpuLostError

ENDING = RequestError(503, "server_error", "The server is shutting down.", code="shutting_down")
MOST_CALLS = 4096
"""Maximum concurrent calls of one connection."""
_UNREAD = 256 * 1024
"""Bytes that a client may leave unread before its streams wait for it."""


class RunningCall(Protocol):
    """A call that continues in the background."""

    def cancel(self) -> None:
        """Cancel the call within one step. The final message is still sent."""

    def feed(self, body: Raw) -> None:
        """Accept input that the call requested from the client. Raises FrameError."""


class CallStream:
    """The output of one call to its client. On the event loop's thread."""

    def __init__(self, connection: "ClientConnection", id: int) -> None:
        self._connection = connection
        self._id = id
        self.is_over = False

    @property
    def client(self) -> "ClientConnection":
        return self._connection

    def blocked(self, source: FrameSource) -> bool:
        """Return whether the client is not reading; `source` is woken when it reads again."""
        return not self.is_over and self._connection.blocked(source)

    def item(self, value: Any) -> None:
        """Send an item."""
        if not self.is_over:
            self._connection.send(Item(self._id, pack(value)))

    def done(self, value: Any = None) -> None:
        """End the call with its result."""
        self._end(Done(self._id, NOTHING if value is None else pack(value)))

    def failed(self, error: Exception) -> None:
        """End the call with an error."""
        self._end(failure(self._id, error))

    def _end(self, message: Done | Failed) -> None:
        if not self.is_over:
            self.is_over = True
            self._connection.ended(self._id)
            self._connection.send(message)


def failure(id: int, error: Exception) -> Failed:
    """Return the message that reports an error to a client."""
    if isinstance(error, RequestError):
        names = ("status", "kind", "param", "code", "retry_after_s")
        return Failed(id, "request", error.message, {name: getattr(error, name) for name in names})
    if isinstance(error, ContextFullError):
        return Failed(id, "context", str(error), {"needed": error.needed, "available": error.available})
    if isinstance(error, ModelError):
        return Failed(id, "model", str(error), {})
    if isinstance(error, GpuLostError):  # the process ends, and another one can use the GPU
        return Failed(id, "gpu_lost", str(error), {})
    if isinstance(error, EngineError):
        return Failed(id, "engine", str(error), {})
    return Failed(id, "engine", f"{error_line(error)} {write_down(error)}", {})


class EngineCalls(Protocol):
    """Handles the calls of clients in the engine process."""

    agreed: str
    pump: Pump

    def joined(self, connection: "ClientConnection") -> bool:
        """Register a client; return False if there are too many."""

    def greeted(self, connection: "ClientConnection") -> Any:
        """Return the reply to a client that has introduced itself."""

    def begin(self, connection: "ClientConnection", call: Call, stream: CallStream) -> RunningCall | None:
        """Start a call without waiting; return the running call, if it continues. Raises if the call is invalid."""

    def left(self, connection: "ClientConnection") -> None:
        """Forget a client that is gone. Its calls have been cancelled."""


class ClientConnection(asyncio.Protocol):
    """Reads calls and writes their output. Disconnects a client that breaks the protocol, without effect on others."""

    def __init__(self, calls: EngineCalls, asked: bytes = b"", reply: bytes = b"") -> None:
        """`asked` are the first bytes that the client has to send, if any; `reply` those that it gets for them."""
        self._calls = calls
        self._asked, self._reply = asked, reply
        self._begun = b""
        self._reader = FrameReader()
        self._transport: GatheringTransport | None = None
        self._running: dict[int, RunningCall | None] = {}
        self._paused = False
        self._blocked: list[FrameSource] = []
        self.hello: Hello | None = None
        self.session: Any = None
        """The conversation of a terminal."""
        self.queued: dict[str, int] = {}
        """Answers queued in the client process, by model."""

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = GatheringTransport(transport)
        transport.set_write_buffer_limits(high=_UNREAD)
        peer = transport.get_extra_info("socket")
        own = peer is None or is_own(getattr(peer, "_sock", peer))
        if not own or not (self._asked or self._calls.joined(self)):
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._asked:
            data = self._introduced(data)
        try:
            for body in self._reader.feed(data):
                self._take(from_client(body))
        except FrameError as error:
            self._refuse(error)

    def _introduced(self, data: bytes) -> bytes:
        """Take the client's first bytes and return what follows them; disconnect if they are not what was asked."""
        assert self._transport is not None
        size = len(self._asked)
        self._begun += data
        if len(self._begun) < size:
            return b""
        if not compare_digest(self._begun[:size], self._asked) or not self._calls.joined(self):
            self._transport.abort()
            return b""
        self._transport.write(self._reply)
        self._asked = b""
        return self._begun[size:]

    def connection_lost(self, reason: Exception | None) -> None:
        self._transport = None
        for running in list(self._running.values()):
            if running is not None:
                running.cancel()
        self._running.clear()
        self._wake_blocked()  # they notice that the client is gone
        self._calls.left(self)

    def pause_writing(self) -> None:
        self._paused = True
        if self._transport is not None:  # accept no more calls while their answers would pile up
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        if self._transport is not None:
            self._transport.resume_reading()
        self._wake_blocked()

    def _wake_blocked(self) -> None:
        blocked, self._blocked = self._blocked, []
        for source in blocked:
            self._calls.pump.wake(source)

    # -- what streams use

    def blocked(self, source: FrameSource) -> bool:
        if self._paused and self._transport is not None and source not in self._blocked:
            self._blocked.append(source)
        return self._paused and self._transport is not None

    def send(self, message: ToClient) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(to_frame(message))

    def ended(self, id: int) -> None:
        self._running.pop(id, None)

    def end(self) -> None:
        """Cancel the running calls and tell the client that the server ends."""
        for id, running in list(self._running.items()):
            if running is not None:
                running.cancel()
            if id in self._running:
                self._running.pop(id, None)
                self.send(failure(id, ENDING))

    def close(self) -> None:
        """Send what is queued, then close the connection."""
        if self._transport is not None:
            self._transport.close()

    # -- calls

    def _take(self, message: Call | Feed | Cancel) -> None:
        if isinstance(message, Call):
            self._call(message)
            return
        running = self._running.get(message.id)
        if running is None:  # it ended before this arrived
            return
        if isinstance(message, Feed):
            running.feed(message.body)
        else:
            running.cancel()

    def _call(self, call: Call) -> None:
        if call.id in self._running:
            raise FrameError(f"There are two calls with the number {call.id}.")
        stream = CallStream(self, call.id)
        if self.hello is None:
            self._greet(call, stream)
            return
        if len(self._running) >= MOST_CALLS:
            stream.failed(RequestError(429, "rate_limit_error", "Too many requests at once; try again soon."))
            return
        self._running[call.id] = None
        try:
            running = self._calls.begin(self, call, stream)
        except FrameError:
            raise
        except Exception as error:  # noqa: BLE001 (whatever it is, only this call fails)
            stream.failed(error)
            return
        if running is not None and not stream.is_over:
            self._running[call.id] = running

    def _greet(self, call: Call, stream: CallStream) -> None:
        if call.method != "hello" or not call.body:
            raise FrameError("A client must first introduce itself.")
        hello = unpack(call.body, Hello)
        # A command may end a server of another version.
        if hello.agreed != self._calls.agreed and hello.kind != "command":
            stream.failed(
                EngineError(
                    "The running server is another version of chatterm; restart it with chatterm stop and "
                    "chatterm serve."
                )
            )
            self.close()
            return
        self.hello = hello
        stream.done(self._calls.greeted(self))

    def _refuse(self, error: FrameError) -> None:
        """Report a protocol error and disconnect: nothing after it can be parsed."""
        self.send(failure(0, error))
        self.close()
        self._reader = FrameReader(0)
