"""How streams are written: short ways give the same bytes as the long ones."""

import asyncio
import json
from typing import Any

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.calls.parser import Text
from chatterm.server.http.answers import AnswerState, Finished, Totals
from chatterm.server.http.gathered import GatheringTransport
from chatterm.server.http.openai.chat import ChatRenderer
from chatterm.server.http.web import ChunkingConnection
from chatterm.server.service import Usage

ASKED = b"%b / HTTP/%b\r\nhost: here\r\n\r\n"


def answered(connection: h11.Connection, asked: bytes, headers: Any, pieces: list[bytes]) -> bytes:
    """All bytes of a response."""
    connection.receive_data(asked)
    while not isinstance(connection.next_event(), h11.EndOfMessage):
        pass
    events = [h11.Response(status_code=200, headers=headers), *(h11.Data(data=piece) for piece in pieces)]
    return b"".join(connection.send(event) or b"" for event in (*events, h11.EndOfMessage()))


@given(st.lists(st.binary(max_size=40), max_size=8), st.sampled_from([b"1.0", b"1.1"]), st.booleans())
def test_chunks_are_those_of_h11(pieces: list[bytes], version: bytes, is_sized: bool) -> None:
    size = str(sum(map(len, pieces))).encode()
    headers = [(b"content-type", b"text/plain"), *([(b"content-length", size)] if is_sized else [])]
    given_to = (ASKED % (b"GET", version), headers, pieces)
    made = ChunkingConnection(1000)
    assert answered(made, *given_to) == answered(h11.Connection(h11.SERVER, 1000), *given_to)
    if made.our_state is h11.DONE and made.their_state is h11.DONE:  # another request on it
        made.start_next_cycle()
        whole = [(b"content-length", b"2")]
        assert answered(made, ASKED % (b"GET", b"1.1"), whole, [b"ab"]).endswith(b"\r\n\r\nab")


@pytest.mark.parametrize("with_usage", [False, True])
@pytest.mark.parametrize("running", [False, True])
def test_every_event_is_a_whole_document(with_usage: bool, running: bool) -> None:
    renderer = ChatRenderer(
        model='a "name"', id="chatcmpl-1", logprobs=False, with_usage=with_usage, running_usage=running
    )
    renderer.begin(Totals("m", 7))
    state = AnswerState(1, tokens=3, reason="eos", usage=Usage(completion_tokens=3))
    events = renderer.piece(state, [Text('}]," \n'), Finished()])
    found = [json.loads(event.removeprefix(b"data: ").removesuffix(b"\n\n")) for event in events]
    assert all(event.count(b"\n") == 2 for event in events)
    assert [one["choices"][0]["delta"] for one in found[1:]] == [{"content": '}]," \n'}, {}]
    for one in found:
        assert (one["id"], one["model"], one["object"]) == ("chatcmpl-1", 'a "name"', "chat.completion.chunk")
        assert [choice["index"] for choice in one["choices"]] == [1]
        counted = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        assert one.get("usage", "none") == (counted if running else None if with_usage else "none")


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[bytes | str] = []

    def write(self, data: Any) -> None:
        self.said.append(bytes(data))

    def close(self) -> None:
        self.said.append("closed")

    def abort(self) -> None:
        self.said.append("aborted")

    def is_closing(self) -> bool:
        return any(isinstance(one, str) for one in self.said)


async def test_a_turn_of_the_event_loop_is_one_write() -> None:
    wire = Wire()
    made = GatheringTransport(wire)
    made.write(b"a")
    made.write(b"b")
    assert not wire.said
    await asyncio.sleep(0)
    assert wire.said == [b"ab"]
    made.write(b"c")
    made.close()
    await asyncio.sleep(0)
    assert wire.said == [b"ab", b"c", "closed"]


async def test_nothing_is_written_after_an_abort() -> None:
    wire = Wire()
    made = GatheringTransport(wire)
    made.write(b"a")
    made.abort()
    await asyncio.sleep(0)
    assert wire.said == ["aborted"]
