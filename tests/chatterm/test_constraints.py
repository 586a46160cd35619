"""Answers that have to match something: the options, a batch's response_format, and the local engine."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatterm.backends.backend import ChatOptions, EngineError, FinishReason, Message, Outcome, Request
from chatterm.backends.local import LocalBackend
from chatterm.cli.constraints import constraint_from_format, parse_constraint
from chatterm.cli.requests import parse_request, read_lines
from chatterm.cli.usage import WrongUsage
from engine import Constraint
from engine.schedule import repetition

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}},
    "required": ["name"],
    "additionalProperties": False,
}


def test_the_options(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(SCHEMA).encode())
    assert parse_constraint(None, False, None) is None
    assert parse_constraint(str(path), False, None) == Constraint("json_schema", json.dumps(SCHEMA))
    assert parse_constraint(None, True, None) == Constraint("json_object")
    assert parse_constraint(None, False, "^a+$") == Constraint("regex", "^a+$")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        (b"", "JSON schema is empty"),
        (b"\xff\xfe", "not UTF-8"),
        (b"{", "cannot be used: Expecting property name"),
        (b'{"type": "frob\\u001b[2J"}', "cannot be used: Invalid type"),
        (b" " * 300_000 + b"{}", "may have at most 262,144"),
    ],
)
def test_a_schema_that_cannot_be_used_is_wrong_usage(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = tmp_path / "schema.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(WrongUsage) as caught:
        parse_constraint(str(path), False, None)
    assert said in str(caught.value)
    assert str(caught.value).isprintable()


def test_one_format_at_a_time() -> None:
    with pytest.raises(WrongUsage, match="--json-object and --regex cannot be combined"):
        parse_constraint(None, True, "a")
    with pytest.raises(WrongUsage, match="unclosed group"):
        parse_constraint(None, False, "(")


def test_a_response_format() -> None:
    assert constraint_from_format({"type": "text"}) is None
    assert constraint_from_format({"type": "json_object"}) == Constraint("json_object")
    inner = {"name": "a", "strict": True, "schema": SCHEMA}
    found = constraint_from_format({"type": "json_schema", "json_schema": inner})
    assert found is not None
    assert (found.kind, json.loads(found.text)) == ("json_schema", SCHEMA)


@pytest.mark.parametrize(
    "value",
    [
        1,
        "json_object",
        [],
        {},
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "schema": {}},
    ],
)
def test_another_response_format_is_an_error_of_its_line(value: Any) -> None:
    with pytest.raises(EngineError, match="response_format must be"):
        constraint_from_format(value)
    (line,) = asked([{"prompt": "x", "response_format": value}])
    assert "response_format must be" in line.problem


def asked(requests: list[dict[str, Any]]) -> list[Any]:
    data = b"".join(json.dumps(request).encode() + b"\n" for request in requests)
    return [parse_request(line) for line in read_lines(io.BytesIO(data), b"")]


def test_a_line_of_a_batch() -> None:
    one, two = asked(
        [
            {"prompt": "x", "response_format": {"type": "json_object"}, "frequency_penalty": 0.5},
            {"prompt": "x", "response_format": {"type": "text"}},
        ]
    )
    assert one.request.sampling == {"frequency_penalty": 0.5, "constraint": Constraint("json_object")}
    assert two.request.sampling == {"constraint": None}


@pytest.fixture(scope="module")
def backend(smollm2: Path) -> Iterator[LocalBackend]:
    options = ChatOptions(
        context=512,
        sampling={"temperature": 0.0, "max_tokens": 40},
        constraint=Constraint("regex", "(yes|no), [a-z]+"),
    )
    backend = LocalBackend(str(smollm2), options)
    backend.open()
    yield backend
    backend.close()


def test_every_answer_of_a_chat_matches(backend: LocalBackend) -> None:
    for message in ("Is it raining?", "Do you like tea?"):
        backend.prepare(message)
        list(backend.send(message))
        assert backend.last is not None
        assert re.fullmatch("(yes|no), [a-z]+", backend.last.text)
        backend.configure({"sampling": {"temperature": 0.0, "max_tokens": 30}})


def test_a_request_has_its_own_format_and_one_that_is_wrong_fails_alone(backend: LocalBackend) -> None:
    messages = [Message("user", "Name a person.")]
    schema, wrong = (
        Constraint("json_schema", json.dumps(SCHEMA)),
        Constraint("json_schema", '{"type": "frob"}'),
    )
    asking = [
        Request(messages, {"constraint": schema}),
        Request(messages, {"constraint": wrong}),
        Request(messages),
    ]
    parts = list(backend.answers(asking))
    ends = {index: part for index, part in parts if not isinstance(part, Outcome) or part.finish_reason}
    first, second, third = (ends[index] for index in range(3))
    assert isinstance(first, Outcome)
    assert list(json.loads(first.text)) == ["name"]
    assert isinstance(second, EngineError)
    assert isinstance(third, Outcome)
    assert re.fullmatch("(yes|no), [a-z]+", third.text)


def test_an_answer_in_a_loop_is_stopped_unless_it_is_in_a_format(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repetition, "FEWEST_TOKENS", repetition.STRIDE)
    backend = LocalBackend(str(smollm2), ChatOptions(context=512))
    backend.open()
    always = {"temperature": 0.0, "max_tokens": 70, "logit_bias": {28: 100.0}}
    messages = [Message("user", "Go on.")]
    off, form = {"stop_repetition": False}, {"constraint": Constraint("regex", "(.|\n)+")}
    requests = [Request(messages, always | more) for more in ({}, off, form)]
    reasons = [part.finish_reason for _, part in backend.answers(requests) if isinstance(part, Outcome)]
    backend.close()
    ends = [reason for reason in reasons if reason is not None]
    assert sorted(ends) == [FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.REPETITION]
