"""Whatever is sent, there is an answer, and it is never a mistake of ours. What is nearly right is made of the document
that the server has of itself."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.server.http.app import make_app
from chatterm.server.http.fields import Ignored
from chatterm.server.http.limits import Limits
from chatterm.server.http.ollama.models import SHOW
from chatterm.server.http.ollama.requests import CHAT, GENERATE, OPTIONS
from chatterm.server.http.openai import chat, completions, responses
from chatterm.server.http.openai.models import TOKENIZE
from chatterm.server.http.openapi import document
from chatterm.server.service import RequestError
from tests.chatterm.server.fake import FakeService
from tests.fresh import examples

MESSAGES = [{"role": "user", "content": "Hello"}]
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
VALID = {
    "/v1/chat/completions": (chat.TABLE, {"model": "tiny", "messages": MESSAGES}),
    "/v1/completions": (completions.TABLE, {"model": "tiny", "prompt": "Hello"}),
    "/v1/responses": (responses.TABLE, {"model": "tiny", "input": "Hello"}),
    "/tokenize": (TOKENIZE, {"model": "tiny", "prompt": "Hello"}),
    "/api/chat": (CHAT, {"model": "tiny", "messages": MESSAGES}),
    "/api/generate": (GENERATE, {"model": "tiny", "prompt": "Hello"}),
    "/api/show": (SHOW, {"model": "tiny"}),
}

words = st.sampled_from(
    [
        *(
            "tiny",
            "user",
            "assistant",
            "tool",
            "system",
            "text",
            "json_schema",
            "json_object",
            "function",
            "low",
        ),
        *(
            "message",
            "function_call",
            "function_call_output",
            "reasoning",
            "input_text",
            "required",
            "auto",
            "5m",
        ),
        *(
            "add",
            "",
            "\x00",
            "é\u2028",
            "x" * 300,
            "1e999",
            "../../etc/passwd",
            "<tool_call>",
            "/",
            "[",
            "1",
            "none",
        ),
    ]
)
names = st.sampled_from(
    [
        *("type", "role", "content", "text", "name", "function", "arguments", "parameters", "id", "call_id"),
        *("tool_calls", "tool_call_id", "output", "json_schema", "schema", "strict", "format", "effort"),
        *("include_usage", "regex", "choice", "enable_thinking", "messages", "summary", "$defs", "documents"),
    ]
) | st.sampled_from(sorted(OPTIONS.known.__struct_fields__))
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | words
    | st.just(TOOL)
    | st.just({"type": "function", "function": TOOL})
    | st.just(
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "add"}}]}
    )
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=8,
)


DOCUMENT = json.loads(document())


def schema_of(path):
    """Of the body of a POST."""
    body = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return resolved(body)


def resolved(schema):
    while "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def fitting(schema):
    """Values that the document allows: what is wrong with them is not their type."""
    schema = resolved(schema)
    if "anyOf" in schema:
        return st.one_of(*map(fitting, schema["anyOf"]))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "object":
            known, required = schema.get("properties", {}), schema.get("required", [])
            more = schema.get("additionalProperties", True)
            if not known:
                return st.dictionaries(names, fitting(more) if isinstance(more, dict) else values, max_size=3)
            fields = {name: fitting(kind) for name, kind in known.items()}
            return st.fixed_dictionaries(
                {name: fields[name] for name in required},
                optional={name: kind for name, kind in fields.items() if name not in required},
            )
        case "array":
            return st.lists(fitting(schema.get("items", {})), max_size=3)
        case "string":
            return words
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(max(-2, schema.get("minimum", -2)), 30)
        case "number":
            return st.floats(-1, 3)
        case "null":
            return st.none()
    return values


FITTING = {
    (path, name): fitting(kind) for path in VALID for name, kind in schema_of(path)["properties"].items()
}


@st.composite
def requests(draw):
    """A path and a body that is nearly right, or not at all."""
    path = draw(st.sampled_from(sorted(VALID)))
    table, body = VALID[path]
    changed = {}
    for name in draw(
        st.lists(st.sampled_from(sorted(schema_of(path)["properties"])), max_size=4, unique=True)
    ):
        fits = draw(st.integers(0, 4)) > 0 and (name != "model" or draw(st.booleans()))
        changed[name] = draw(FITTING[path, name] if fits else values)
    if not draw(st.integers(0, 5)):
        others = [*table.refused, "nonsense", "\ud800"]
        changed[draw(st.sampled_from(others))] = draw(values)
    text = json.dumps({**body, **changed}).encode()
    damage = draw(st.sampled_from(["none"] * 12 + ["cut", "noise", "raw"]))
    if damage == "cut":
        text = text[: draw(st.integers(0, len(text)))]
    elif damage == "noise":
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.binary(max_size=4)) + text[at:]
    elif damage == "raw":
        text = draw(
            st.binary(max_size=40) | st.sampled_from([b"[" * 5000, b'{"a":' * 5000, b"1" * 9000, b"null"])
        )
    return path, text


async def call(app, path, body, headers=(), method="POST"):
    """The status and the body of the response."""
    sent, status = [], None
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), *headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if not waiting:
            await asyncio.Event().wait()
        return waiting.pop()

    async def send(message):
        nonlocal status
        status = message.get("status", status)
        sent.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(sent)


@examples(60)
@given(request=requests())
def test_no_request_is_a_mistake_of_ours(request):
    path, body = request
    app = make_app(FakeService(), Limits(answers=4))
    status, answer = asyncio.run(call(app, path, body))
    assert status in (200, 400, 404, 413)
    if status != 200:
        error = json.loads(answer)["error"]
        message = error if path.startswith("/api/") else error["message"]
        assert message
        assert "\n" not in message
        assert len(message) < 1000
    elif answer.startswith((b"data:", b"event:")):
        lines = [
            line for event in answer.split(b"\n\n") for line in event.split(b"\n") if line[:6] == b"data: "
        ]
        events = [json.loads(line[6:]) for line in lines if line != b"data: [DONE]"]
        assert events
        assert not [event for event in events if event.get("error")]
    else:
        found = [json.loads(line) for line in answer.splitlines()]
        assert not [line for line in found if line.get("error")]


@pytest.mark.parametrize("path", sorted(VALID))
@pytest.mark.parametrize("stream", [False, True])
def test_the_requests_that_are_changed_are_right_at_first(path, stream):
    body = dict(VALID[path][1])
    if path not in ("/tokenize", "/api/show"):
        body["stream"] = stream
    status, _ = asyncio.run(call(make_app(FakeService()), path, json.dumps(body).encode()))
    assert status == 200


@pytest.mark.parametrize("path", sorted(VALID))
def test_the_document_has_the_fields_that_are_taken(path):
    table, schema = VALID[path][0], schema_of(path)
    known, refused = set(table.known.__struct_fields__), set(table.refused)
    assert not known & refused
    assert set(schema["properties"]) == known | refused
    assert set(schema["required"]) <= set(VALID[path][1])


@pytest.mark.parametrize("path", sorted(VALID))
@examples(10)
@given(data=st.data())
def test_what_the_document_allows_has_the_right_shape(path, data):
    """Values may be refused, types and names may not."""
    body = {name: value for name, value in data.draw(fitting(schema_of(path))).items() if value is not None}
    try:
        VALID[path][0].of(body, Ignored())
    except RequestError as error:
        pytest.fail(f"{error.message} {body}")


def test_the_document_has_every_path():
    app = make_app(FakeService())
    served = {route.path.replace(":path", ""): route.methods for route in app.routes}
    told = DOCUMENT["paths"]
    assert set(told) == set(served)
    assert all({"POST"} <= served[one] for one in told if "post" in told[one])
    assert all({"GET"} <= served[one] for one in told if "get" in told[one])
    status, answer = asyncio.run(call(app, "/openapi.json", b"", method="GET"))
    assert (status, json.loads(answer)) == (200, DOCUMENT)
