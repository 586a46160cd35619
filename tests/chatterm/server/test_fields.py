"""Fields that clients send and no model needs: ignored where they change nothing, refused by name where they would."""

import asyncio
import json
import logging

import pytest

from chatterm.server.http.app import make_app
from chatterm.server.http.fields import json_object
from chatterm.server.http.request_log import RequestLog
from chatterm.server.logs import _Lines
from tests.chatterm.server.fake import FakeService
from tests.chatterm.server.test_fuzz import call

CHAT = "/v1/chat/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "Hello there"}]}
FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALLED = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def ask(path, body, service=None, **options):
    """The status and the parsed answer."""
    app = make_app(service or FakeService(thinks=False), **options)
    status, answer = asyncio.run(call(app, path, json.dumps(body).encode()))
    return status, json.loads(answer)


def with_message(**fields):
    return {"messages": [{"role": "user", "content": "Hi", **fields}]}


def with_call(**fields):
    said = {"role": "assistant", "content": None, "tool_calls": [{**CALLED, **fields}]}
    return {
        "messages": [*HELLO["messages"], said, {"role": "tool", "tool_call_id": "1", "content": "x"}],
        "tools": [{"type": "function", "function": FUNCTION}],
    }


def with_tool(**fields):
    return {"tools": [{"type": "function", "function": FUNCTION, **fields}]}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"nonsense": 1, "cache_prompt": True}, {"nonsense", "cache_prompt"}),
        ({"skip_special_tokens": True, "best_of": 1}, {"skip_special_tokens", "best_of"}),
        ({"store": True, "verbosity": "low"}, {"store", "verbosity"}),
        ({"reasoning_effort": "medium"}, {"reasoning_effort"}),
        ({"stream_options": {"include_usage": True}}, {"stream_options"}),
        (
            with_message(id="x", cache_control={"type": "ephemeral"}),
            {"messages[].id", "messages[].cache_control"},
        ),
        (with_call(extra_content={}), {"messages[].tool_calls[].extra_content"}),
        (with_tool(cache_control={}), {"tools[].cache_control"}),
        ({"tools": [{"type": "web_search"}]}, {"tools[web_search]"}),
    ],
)
def test_what_changes_nothing_is_ignored_and_logged_once_a_client(caplog, fields, names):
    caplog.set_level(logging.INFO, "chatterm.server")
    app = make_app(FakeService(thinks=False))
    body = json.dumps({**HELLO, **fields}).encode()
    assert [asyncio.run(call(app, CHAT, body))[0] for _ in range(2)] == [200, 200]
    told = [record.fields for record in caplog.records if record.message == "fields ignored"]
    assert [(one["client"], set(one["fields"])) for one in told] == [("127.0.0.1", names)]
    status, answer = ask(CHAT, {**HELLO, **fields}, is_strict=True)
    assert (status, answer["error"]["code"]) == (400, "unknown_parameter")
    assert answer["error"]["param"] in names


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({"max_tokens": -1}, {}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"stop": ["", "x"]}, {"stop": ("x",)}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
    ],
)
def test_values_of_other_servers_mean_the_same_here(fields, sampling):
    service = FakeService()
    assert ask(CHAT, {**HELLO, **fields}, service)[0] == 200
    assert service.asked[-1].sampling == sampling


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": False},
        {"thinking": {"type": "disabled", "budget_tokens": 1}},
        {"reasoning": {"effort": "none", "exclude": True}},
        {"reasoning": {"enabled": False}},
    ],
)
def test_every_way_to_turn_thinking_off_does(fields):
    service = FakeService()
    assert ask(CHAT, {**HELLO, **fields}, service)[0] == 200
    assert service.asked[-1].think == "off"


def test_a_schema_of_any_object_as_llama_server_takes_it():
    service = FakeService()
    schema = {"type": "object", "required": ["a"]}
    assert (
        ask(CHAT, {**HELLO, "response_format": {"type": "json_object", "schema": schema}}, service)[0] == 200
    )
    assert json.loads(service.asked[-1].constraint.text) == schema


def test_arguments_of_the_history_may_be_an_object():
    service = FakeService()
    assert (
        ask(CHAT, {**HELLO, **with_call(function={"name": "add", "arguments": {"a": 1}})}, service)[0] == 200
    )
    assert json.loads(service.asked[-1].messages[1].tool_calls[0].arguments) == {"a": 1}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"best_of": 2}, "best_of"),
        (CHAT, {"grammar": "root ::= x"}, "grammar"),
        (CHAT, {"skip_special_tokens": False}, "skip_special_tokens"),
        ("/v1/responses", {"input": "Hi", "previous_response_id": "x"}, "previous_response_id"),
        ("/v1/completions", {"prompt": "Hi", "echo": True}, "echo"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(path, fields, param):
    status, answer = ask(path, {**({} if path != CHAT else HELLO), "model": "tiny", **fields})
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (r"a\ud83d", "a\ufffd"),
        (r"\uDE00b", "\ufffdb"),
        (r"\ud83d\ude00", "\U0001f600"),
        (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (r"\\ud83d", r"\ud83d"),
        (r"\\\ud83d", "\\\ufffd"),
    ],
)
def test_half_a_character_is_replaced(written, text):
    found = json_object(b'{"a": "%b", "b": "\\ud800"}' % written.encode())
    assert found == {"a": text, "b": "\ufffd"}


LONG = "x " * 60_000


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/v1/responses", {"input": LONG}, "input"),
        ("/api/chat", {**HELLO, "options": {"repeat_penalty": -1}}, "repeat_penalty is -1"),
        (CHAT, {**HELLO, "repetition_penalty": -1}, "repetition_penalty"),
    ],
)
def test_errors_of_the_engine_name_the_fields_of_the_client(path, body, named):
    status, answer = ask(path, {"model": "tiny", **body})
    error = answer["error"]
    assert status == 400
    assert error.startswith(named) if path.startswith("/api/") else error["param"] == named


def test_a_coding_agent_by_responses():
    """As Codex asks."""
    service = FakeService(thinks=False)
    body = {
        "model": "tiny",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Hi"}]}
        ],
        "tools": [
            {"type": "function", **FUNCTION, "strict": False},
            {"type": "namespace", "name": "mcp", "tools": [{"type": "function", **FUNCTION}]},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "low"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "prompt_cache_key": "k",
        "client_metadata": {"id": "x"},
    }
    status, answer = ask("/v1/responses", body, service)
    assert status == 200
    assert [tool["function"]["name"] for tool in service.asked[-1].tools] == ["add"]
    assert [tool["name"] for tool in answer["tools"]] == ["add"]


def test_options_of_ollama_that_are_about_the_machine():
    service = FakeService(thinks=False)
    options = {"num_ctx": 10**6, "num_thread": 4, "mirostat": 2, "nonsense": 1, "temperature": 0.5}
    body = {**HELLO, "stream": False, "options": options, "max_output_tokens": 5, "think": True}
    assert ask("/api/chat", body, service)[0] == 200
    assert service.asked[-1].sampling == {"temperature": 0.5}


@pytest.mark.parametrize("has_prompts", [False, True])
@pytest.mark.parametrize("format", ["text", "json"])
def test_a_request_is_one_line_with_its_prompt_only_where_that_is_wanted(caplog, format, has_prompts):
    caplog.set_level(logging.INFO, "chatterm.server")
    app = make_app(FakeService(), log=RequestLog(has_prompts))
    asyncio.run(call(app, CHAT, json.dumps(HELLO).encode()))
    asyncio.run(call(app, CHAT, json.dumps({**HELLO, "model": "no\nbody"}).encode()))
    lines = [_Lines(format, False).format(record) for record in caplog.records]
    assert [len(line.splitlines()) for line in lines] == [1, 1]
    assert ("Hello there" in lines[0]) is has_prompts
    if format == "json":
        done, refused = map(json.loads, lines)
        shown = [done[name] for name in ("client", "model", "status", "prompt_tokens", "answer_tokens")]
        assert shown == ["127.0.0.1", "tiny", 200, 2, 2]
        assert done["cached_tokens"] == 1
        assert 0 <= done["first_token_ms"] <= done["total_ms"]
        assert (refused["status"], refused["why"][:13]) == (404, "Unknown model")
    else:
        assert " INFO request client=127.0.0.1 method=POST path=/v1/chat/completions status=200" in lines[0]


def test_the_journal_gets_priorities_instead_of_times(caplog):
    caplog.set_level(logging.INFO, "chatterm.server")
    asyncio.run(call(make_app(FakeService()), "/v1/models", b"", method="GET"))
    assert _Lines("text", True).format(caplog.records[0]).startswith("<6>request client=127.0.0.1 method=GET")
