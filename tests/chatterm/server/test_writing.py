"""How streams are written."""

import asyncio
import json
from typing import Any

import pytest

from chatterm.server.http.answer_state import AnswerState, Finished, Totals
from chatterm.server.http.openai.chat import ChatRenderer
from chatterm.server.service import Usage
from chatterm.server.write_coalescing import GatheringTransport
from chatterm.tool_calls.reader import AnswerText


@pytest.mark.parametrize("with_usage", [False, True])
@pytest.mark.parametrize("running", [False, True])
def test_every_event_is_a_whole_document(with_usage: bool, running: bool) -> None:
    renderer = ChatRenderer(
        model='a "name"', id="chatcmpl-1", logprobs=False, with_usage=with_usage, running_usage=running
    )
    renderer.begin(Totals("m", 7))
    state = AnswerState(1, tokens=3, reason="eos", usage=Usage(completion_tokens=3))
    events = renderer.piece(state, [AnswerText('}]," \n'), Finished()])
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
