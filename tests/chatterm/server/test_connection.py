"""A connection seen from the engine process: what one turn of the event loop says is written at once, and in order."""

import asyncio
import socket
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from chatterm.backends.protocol import Hello
from chatterm.ipc.frames import FrameReader
from chatterm.ipc.messages import Call, Done, Failed, Item, from_server, pack, to_frame, unpack
from chatterm.server.process.connection import CallStream, ClientConnection
from chatterm.server.process.frame_batcher import Pump
from chatterm.server.write_coalescing import GatheringTransport
from tests.counting import until_true


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_closed = self.is_read = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return None

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is ever full here."""

    def write(self, data: Any) -> None:
        assert not self.is_closed
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    @property
    def messages(self) -> list[Any]:
        return [from_server(body) for body in FrameReader().feed(b"".join(self.writes))]


@dataclass(eq=False)
class Speaker:
    """A stream that has something to say; what it cannot say now it says when it is woken."""

    stream: CallStream
    left: list[Any]
    waits: bool = False
    due: float = 0.0
    cancelled: bool = False

    def send(self) -> bool:
        if self.stream.blocked(self):
            return True
        while self.left:
            self.stream.item(self.left.pop(0))
        return False

    def fail(self, error: Exception) -> None:
        raise error

    def cancel(self) -> None:
        self.cancelled = True

    def feed(self, body: Any) -> None:
        """It asks for nothing."""


@dataclass
class Calls:
    """Each call makes a Speaker, which says nothing by itself."""

    pump: Pump
    agreed: str = "same"
    speakers: list[Speaker] = field(default_factory=list)
    gone: int = 0

    def joined(self, connection: ClientConnection) -> bool:
        return True

    def greeted(self, connection: ClientConnection) -> Any:
        return "welcome"

    def begin(self, connection: ClientConnection, call: Call, stream: CallStream) -> Speaker:
        self.speakers.append(Speaker(stream, unpack(call.body, list[int])))
        return self.speakers[-1]

    def left(self, connection: ClientConnection) -> None:
        self.gone += 1


@dataclass
class Client:
    """A connection that has said who it is, and has begun two calls."""

    calls: Calls
    wire: Wire
    connection: ClientConnection

    @property
    def speakers(self) -> list[Speaker]:
        return self.calls.speakers


@pytest.fixture
async def client() -> Client:
    calls = Calls(Pump(asyncio.get_running_loop()))
    made, wire = ClientConnection(cast(Any, calls)), Wire()
    made.connection_made(wire)
    made.data_received(to_frame(Call(1, "hello", pack(Hello("same", "web", 1, "")))))
    for id in (2, 3):
        made.data_received(to_frame(Call(id, "say", pack([10 * id, 10 * id + 1]))))
    await turn()
    wire.writes.clear()
    return Client(calls, wire, made)


async def turn() -> None:
    """One turn of the event loop, and what it has begun."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def said_all(*speakers: Speaker) -> None:
    """The pump may let some milliseconds pass before it wakes somebody again."""
    await until_true(lambda: not any(speaker.left for speaker in speakers))
    await turn()


async def test_what_one_turn_says_is_one_write_in_order(client: Client) -> None:
    one, other = client.speakers
    one.stream.item("a")
    other.stream.item("b")
    one.stream.done("end")
    other.stream.item("c")
    assert not client.wire.writes
    await turn()
    assert len(client.wire.writes) == 1
    said = [(type(message), message.id, unpack(message.body, str)) for message in client.wire.messages]
    assert said == [(Item, 2, "a"), (Item, 3, "b"), (Done, 2, "end"), (Item, 3, "c")]
    other.stream.item("d")
    await turn()
    assert [unpack(message.body, str) for message in client.wire.messages][4:] == ["d"]


async def test_what_was_said_before_the_end_is_written_before_it(client: Client) -> None:
    client.speakers[0].stream.item("a")
    client.connection.close()
    assert client.wire.is_closed
    assert [message.id for message in client.wire.messages] == [2]
    client.speakers[0].stream.item("too late")
    await turn()  # Wire refuses what is written once it is closed
    assert len(client.wire.messages) == 1


async def test_the_end_of_the_server_is_told_to_every_call(client: Client) -> None:
    client.connection.end()
    client.connection.close()
    assert [(type(message), message.id) for message in client.wire.messages] == [(Failed, 2), (Failed, 3)]
    assert all(speaker.cancelled for speaker in client.speakers)


async def test_nothing_is_written_to_a_client_that_has_gone(client: Client) -> None:
    client.speakers[0].stream.item("a")
    client.wire.close()  # as asyncio closes a transport before it tells of it
    client.connection.connection_lost(None)
    await turn()
    client.speakers[1].stream.item("b")
    await turn()
    assert not client.wire.writes
    assert all(speaker.cancelled for speaker in client.speakers)
    assert client.calls.gone == 1


async def test_a_client_that_does_not_read_is_told_the_rest_once_it_does(client: Client) -> None:
    one, other = client.speakers
    client.connection.pause_writing()
    assert not client.wire.is_read
    for speaker in (one, other, one):
        client.calls.pump.wake(speaker, at_once=True)
        await turn()
    assert not client.wire.writes
    client.connection.resume_writing()
    assert client.wire.is_read
    await said_all(one, other)
    said = [(message.id, unpack(message.body, int)) for message in client.wire.messages]
    assert sorted(said, key=lambda each: each[0]) == [(2, 20), (2, 21), (3, 30), (3, 31)]  # each in its order


async def test_a_stream_that_waits_for_a_client_ends_when_it_goes(client: Client) -> None:
    client.connection.pause_writing()
    client.calls.pump.wake(client.speakers[0])
    await turn()
    client.connection.connection_lost(None)
    await said_all(client.speakers[0])  # it is woken, and nobody is there
    assert not client.wire.writes


async def test_what_is_no_frame_is_answered_after_what_was_said_before(client: Client) -> None:
    client.speakers[0].stream.item("a")
    client.connection.data_received(b"\xff" * 64)
    assert client.wire.is_closed
    first, last = client.wire.messages
    assert (first.id, last.id) == (2, 0)
    assert isinstance(last, Failed)


@pytest.mark.parametrize("behind", ["connection", "gathered"])
async def test_a_killed_client_is_written_to_no_more(caplog: pytest.LogCaptureFixture, behind: str) -> None:
    """Its streams are cancelled at once; what they still say goes nowhere, and the log says nothing of it."""
    loop, calls = asyncio.get_running_loop(), Calls(Pump(asyncio.get_running_loop()))
    made = ClientConnection(cast(Any, calls))
    ours, theirs = socket.socketpair()
    transport, _ = await loop.connect_accepted_socket(lambda: made, ours)
    ids = range(2, 258)
    theirs.sendall(to_frame(Call(1, "hello", pack(Hello("same", "web", 1, "")))))
    theirs.sendall(b"".join(to_frame(Call(id, "say", pack([id]))) for id in ids))
    await until_true(lambda: len(calls.speakers) == len(ids))
    theirs.close()
    gathering = GatheringTransport(transport)
    for number in range(20):  # the first of them finds out, before the event loop has told anybody
        for speaker in calls.speakers:
            if behind == "connection":
                speaker.stream.item(number)
            else:
                gathering.write(b"more")
        await turn()
    assert all(speaker.cancelled for speaker in calls.speakers)
    assert calls.gone == 1
    assert not caplog.records


async def test_on_a_port_a_client_begins_with_what_was_asked() -> None:
    for begun, is_let_in in ((b"k" * 32, True), (b"w" * 32, False)):
        calls = Calls(Pump(asyncio.get_running_loop()))
        made, wire = ClientConnection(cast(Any, calls), b"k" * 32, b"r" * 32), Wire()
        made.connection_made(wire)
        said = begun + to_frame(Call(1, "hello", pack(Hello("same", "web", 1, ""))))
        for byte in range(len(said)):
            if not wire.is_closing():
                made.data_received(said[byte : byte + 1])
        await turn()
        assert bool(wire.writes) == (made.hello is not None) == is_let_in
        assert wire.is_closing() != is_let_in
        if is_let_in:
            assert b"".join(wire.writes).startswith(b"r" * 32)
