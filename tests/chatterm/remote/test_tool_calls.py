"""Tools of models that run on servers: what is offered, what is called, what is told, and servers that lie."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.backends.backend import (
    ChatOptions,
    EngineError,
    Exchange,
    FinishReason,
    Outcome,
    Tool,
    ToolCall,
    ToolResult,
)
from chatterm.backends.remote.dialects.calls import MOST_CALLS, CallAssembler, CallPart, HistoryCall
from chatterm.backends.remote.history import history
from tests.chatterm.approving import asked
from tests.chatterm.driving import driven
from tests.chatterm.remote.rough_server import Handler, delta, document, events, rough, said, status, stream
from tests.chatterm.remote.test_app_remote import address, anywhere
from tests.chatterm.remote.test_backend import chat, last
from tests.fresh import examples

ADD = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]})
OFFERED = {"name": "add", "description": "Adds.", "parameters": dict(ADD.parameters)}


def part(index: Any = None, name: str = "", arguments: Any = "", **more: Any) -> dict[str, Any]:
    """An entry of `tool_calls`."""
    function = ({"name": name} if name else {}) | ({"arguments": arguments} if arguments != "" else {})
    return ({"index": index} if index is not None else {}) | more | {"function": function}


def called(*parts: dict[str, Any], text: str = "", finish: str = "tool_calls") -> Handler:
    """An answer that has these parts, one after the other."""
    before = [delta(text)] if text else []
    return stream(*events(*before, *(delta(tool_calls=[one]) for one in parts), delta(finish=finish)))


def made(*parts: dict[str, Any], **more: Any) -> list[ToolCall]:
    """What a client makes of it."""
    with rough(called(*parts, **more)) as server, chat(server) as backend:
        backend.configure({"tools": (ADD,)})
        list(backend.send("Hi"))
        return list(last(backend).calls)


# --- the whole way ---


def ollama(*calls: tuple[str, Any], text: str = "") -> Handler:
    made = [{"function": {"name": name, "arguments": given}} for name, given in calls]
    lines = [{"message": {"content": text, "tool_calls": made}, "done": False}, {"message": {}, "done": True}]
    return stream(*(json.dumps(line).encode() + b"\n" for line in lines))


def responses(*calls: tuple[str, str], text: str = "") -> Handler:
    output: list[Any] = [{"type": "message", "content": [{"type": "output_text", "text": text}]}]
    output += [{"type": "function_call", "name": name, "arguments": given} for name, given in calls]
    return document({"object": "response", "status": "completed", "output": output})


def test_calls_go_there_and_back_and_what_was_sent_stays_as_it_was() -> None:
    first = called(
        part(0, "add", id="x1"), part(0, arguments='{"a":'), part(0, arguments=" 2}"), text="Well."
    )
    both = called(part(0, "add", '{"a": 3}', id="x2"), part(1, "add", '{"a": 4}', id="x3"))
    with rough(first, both, said("Nine."), said("Bye.")) as server, chat(server) as backend:
        assert backend.info is not None
        assert backend.info.calls_tools
        backend.configure({"tools": (ADD,)})
        kinds = [(event.text, event.kind) for event in backend.send("Add.")]
        assert kinds == [("Well.", "answer"), ("add", "call"), ('{"a":', "call"), (" 2}", "call")]
        assert (last(backend).text, last(backend).calls) == ("Well.", [ToolCall("add", '{"a": 2}')])
        list(backend.tell([ToolResult("add", '{"a": 2}', "2 it is")]))
        assert last(backend).calls == [ToolCall("add", '{"a": 3}'), ToolCall("add", '{"a": 4}')]
        with pytest.raises(EngineError, match="does not call these tools"):
            backend.tell([ToolResult("add", '{"a": 3}', "3")])
        list(backend.tell([ToolResult("add", "", "3"), ToolResult("add", "", "4")]))
        list(backend.send("Thanks."))
        bodies = [request.json for request in server.requests]
    assert all(body["tools"] == [{"type": "function", "function": OFFERED}] for body in bodies)
    messages = bodies[3]["messages"]
    assert [message["role"] for message in messages] == [
        *("user", "assistant", "tool", "assistant", "tool", "tool", "assistant", "user")
    ]
    assert messages[1] == {
        "role": "assistant",
        "content": "Well.",
        "tool_calls": [
            {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
        ],
    }
    assert messages[2] == {"role": "tool", "tool_call_id": "call00000", "content": "2 it is"}
    assert [m["tool_call_id"] for m in messages[4:6]] == [call["id"] for call in messages[3]["tool_calls"]]
    for before, after in zip(server.requests, server.requests[1:], strict=False):
        head = json.dumps(before.json["messages"])[:-1].encode()
        assert after.body.count(head) == 1
        assert before.json["prompt_cache_key"] == after.json["prompt_cache_key"]


def test_the_same_results_are_answered_again_and_a_branch_has_its_own() -> None:
    calls = called(part(0, "add", '{"a": 2}'))
    with rough(calls, said("One."), said("Two."), said("Three.")) as server, chat(server) as backend:
        backend.configure({"tools": (ADD,)})
        list(backend.send("Add."))
        path = [Exchange(1, None, "Add.", calls=list(last(backend).calls), finish_reason="eos")]
        list(backend.tell([ToolResult("add", '{"a": 2}', "2")]))
        backend.load_path(path)
        list(backend.tell([ToolResult("add", '{"a": 2}', "2")]))
        one, two = (request.json["messages"] for request in server.requests[1:])
        assert one == two
        backend.load_path(path)
        list(backend.send("Never mind."))
        assert [m["role"] for m in server.requests[-1].json["messages"]] == [
            "user",
            "assistant",
            "tool",
            "user",
        ]
        assert server.requests[-1].json["messages"][2]["content"] == "This was not run."
        backend.configure({"tools": ()})
        list(backend.send("Never mind."))
        assert "tools" not in server.requests[-1].json


@pytest.mark.parametrize("scheme", ["responses", "ollama"])
def test_the_other_apis(scheme: str) -> None:
    given: Any = '{"a": 2}' if scheme == "responses" else {"a": 2}
    answer = (responses if scheme == "responses" else ollama)(("add", given), ("other", given), text="Well.")
    done = responses(text="Done.") if scheme == "responses" else ollama(text="Done.")
    with rough(answer, done) as server, chat(server, scheme) as backend:
        backend.configure({"tools": (ADD,)})
        list(backend.send("Add."))
        assert last(backend).calls == [ToolCall("add", '{"a": 2}'), ToolCall("other", '{"a": 2}')]
        list(backend.tell([ToolResult("add", "", "2"), ToolResult("other", "", "Error: none")]))
        assert last(backend).text == "Done."
        one, two = (request.json for request in server.requests)
    if scheme == "responses":
        assert one["tools"] == [{"type": "function", **OFFERED, "strict": False}]
        assert two["input"][1:] == [
            {"role": "assistant", "content": "Well."},
            {"type": "function_call", "call_id": "call00000", "name": "add", "arguments": '{"a": 2}'},
            {"type": "function_call", "call_id": "call00001", "name": "other", "arguments": '{"a": 2}'},
            {"type": "function_call_output", "call_id": "call00000", "output": "2"},
            {"type": "function_call_output", "call_id": "call00001", "output": "Error: none"},
        ]
    else:
        assert one["tools"] == [{"type": "function", "function": OFFERED}]
        calls = [{"function": {"name": name, "arguments": {"a": 2}}} for name in ("add", "other")]
        assert two["messages"][1:] == [
            {"role": "assistant", "content": "Well.", "tool_calls": calls},
            {"role": "tool", "content": "2", "tool_name": "add"},
            {"role": "tool", "content": "Error: none", "tool_name": "other"},
        ]


def test_a_server_that_takes_no_tools_says_so_in_one_line() -> None:
    refused = status(400, '"auto" tool choice requires --enable-auto-tool-choice to be set')
    with rough(refused, refused) as server, chat(server) as backend:
        with pytest.raises(EngineError, match="refuses") as plain:
            list(backend.send("Hi"))
        backend.configure({"tools": (ADD,)})
        with pytest.raises(EngineError, match=r"/tools off sends messages without tools\.$"):
            list(backend.send("Hi"))
        assert "/tools off" not in str(plain.value)


def test_thoughts_go_back_with_calls_to_servers_that_take_them() -> None:
    path = [Exchange(1, None, "A", reasoning="hm", calls=[ToolCall("add", "{}")], finish_reason="eos")]
    for owner, has in (("vllm", True), ("somebody", False)):
        listing = {"data": [{"id": "tiny", "owned_by": owner}]}
        with rough(said("x"), models=listing) as server, chat(server) as backend:
            backend.load_path(path)
            list(backend.tell([ToolResult("add", "{}", "1")]))
            assert ("reasoning_content" in server.requests[0].json["messages"][1]) is has


async def test_a_remote_call_asks_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("the notes\n")
    monkeypatch.chdir(tmp_path)
    asks = called(part(0, "read_file", '{"path": "notes.txt"}'), part(1, "no_such_tool", "{"))
    with rough(asks, said("Read."), said("Again.")) as server:
        async with driven(anywhere(address(server))) as driver:
            await driver.send("/tools read")
            await driver.send("What do they say?", wait=False)
            clock = await asked(driver)
            await clock.press("down", "enter")
            await driver.idle()
            assert driver.answers == ["", "Read."]
            told = [message["content"] for message in server.requests[1].json["messages"][2:]]
            assert told[0] == "the notes"
            assert told[1].startswith("Error: There is no tool 'no_such_tool'")
            assert "▸ read_file  notes.txt  done" in driver.text()
            await driver.send("/retry")
            assert server.requests[2].json["messages"] == server.requests[1].json["messages"]
            assert driver.answers == ["", "Again."]


# --- what servers send ---


@pytest.mark.parametrize(
    "parts",
    [
        [part(0, "add", '{"a": 2}'), part(1, "sub", '{"a": 3}')],
        [part(0, "add", '{"a"', id="p"), part(0, "add", ": 2}", id="p"), part(1, "sub", '{"a": 3}', id="q")],
        [part(0, "ad"), part(1, "sub"), part(0, "d", '{"a": 2}'), part(1, arguments='{"a": 3}')],
        [part(10**9, "add"), part(-1, "sub", '{"a": 3}'), part(10**9, arguments='{"a": 2}')],
        [part(None, "add"), part(None, arguments='{"a": 2}'), part(None, "sub", '{"a": 3}')],
        [part(0, "add", '{"a": 2}', id="p"), part(0, "sub", '{"a": 3}', id="q")],
        [part(0, "add", {"a": 2}), part(1, "sub", {"a": 3}, id=7)],
    ],
)
def test_parts_of_calls_as_servers_cut_them(parts: list[dict[str, Any]]) -> None:
    assert made(*parts) == [ToolCall("add", '{"a": 2}'), ToolCall("sub", '{"a": 3}')]


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([part(n, "add", "{}") for n in range(MOST_CALLS + 1)], "more than 64 tools"),
        ([part(0, "add"), *[part(0, arguments="x" * 200_001)] * 5], "more than 1,000,000 characters"),
    ],
)
def test_there_is_an_end_to_calls(parts: list[dict[str, Any]], why: str) -> None:
    with rough(called(*parts)) as server, chat(server) as backend:
        backend.configure({"tools": (ADD,)})
        with pytest.raises(EngineError, match=why):
            list(backend.send("Hi"))
        assert last(backend).calls == ()


def test_a_call_that_was_cut_off_or_never_offered_is_none() -> None:
    assert made(part(0, "add", '{"a": 2'), finish="length") == []
    with rough(called(part(0, "add", "{}"))) as server, chat(server) as backend:
        with pytest.raises(EngineError, match="called a tool, although none was offered"):
            list(backend.send("Hi"))
        assert last(backend).calls == ()
    unfinished = stream(*events(delta(tool_calls=[part(0, "add", "{}")]), done=False), ends=False)
    with rough(unfinished) as server, chat(server) as backend:
        backend.configure({"tools": (ADD,)})
        with pytest.raises(EngineError, match=r"middle of the answer|closed the connection"):
            list(backend.send("Hi"))
        assert last(backend).calls == ()


VALUES = (
    st.none() | st.integers(-3, 3) | st.text(max_size=4) | st.sampled_from(["\ud800", '{"a": 2}', "\x1b]0;"])
)
PARTS = st.fixed_dictionaries(
    {},
    optional={
        "index": VALUES,
        "id": VALUES,
        "function": VALUES | st.fixed_dictionaries({}, optional={"name": VALUES, "arguments": VALUES}),
    },
)


@examples(60)
@given(st.lists(st.lists(PARTS | VALUES, max_size=3) | VALUES, max_size=5))
def test_whatever_comes_as_calls_can_be_kept_and_sent_again(parts: list[Any]) -> None:
    with rough(
        stream(*events(*(delta(tool_calls=one) for one in parts), delta(finish="stop"))), said("x")
    ) as server:
        with chat(server) as backend:
            backend.configure({"tools": (ADD,)})
            list(backend.send("Hi"))
            calls = list(last(backend).calls)
            list(backend.tell([ToolResult(c.name, c.arguments, "r") for c in calls]) if calls else ())
        for request in server.requests[1:]:
            for call in request.json["messages"][1]["tool_calls"]:
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
                assert call["function"]["name"].replace("-", "_").replace("_", "a").isalnum()
                assert len(call["id"]) == 9


@given(st.lists(st.tuples(st.integers(0, 3), st.text(max_size=9)), max_size=30))
def test_arguments_are_put_together_however_they_are_cut(parts: list[tuple[int, str]]) -> None:
    calls, wanted = CallAssembler(), dict[int, str]()
    for key, text in parts:
        calls.take([CallPart(key, arguments=text)])
        wanted[key] = wanted.get(key, "") + text
    assert [call.arguments for call in calls.made()] == list(wanted.values())


# --- the history ---


def test_results_whose_calls_are_gone_are_told_as_a_message() -> None:
    results = [ToolResult("add", "{}", "4")]
    path = [Exchange(0, None, "A summary.", text="Understood."), Exchange(2, 1, "add {}\n4", results=results)]
    assert [message.content for message in history(None, path)] == ["A summary.", "Understood.", "add {}\n4"]


def test_calls_that_no_api_takes_are_mended_the_same_way_each_time() -> None:
    bad = ["", "{", "[]", '{"a": NaN}', "[" * 5000]
    path = [Exchange(1, None, "A", calls=[ToolCall("a b\x1b" + "x" * 99, text) for text in bad])]
    once = history(None, path)
    assert once == history(None, path)
    assert [call.arguments for call in once[1].calls] == ["{}"] * 5  # type: ignore[union-attr]
    assert {call.name for call in once[1].calls} == {"a_b_" + "x" * 60}  # type: ignore[union-attr]
    assert HistoryCall("call00000", "a", "{}").given == {}


def test_an_outcome_of_a_path_has_its_calls() -> None:
    calls = [ToolCall("add", "{}")]
    with rough(said("x")) as server, chat(server, options=ChatOptions(tools=(ADD,))) as backend:
        backend.load_path([Exchange(1, None, "A", calls=calls, finish_reason="eos")])
        assert isinstance(backend.last, Outcome)
        assert (backend.last.calls, backend.last.finish_reason) == (calls, FinishReason.EOS)
