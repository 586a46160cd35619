"""Schemas with constraints that no grammar can express: the answer is checked, and everybody is told."""

import json
import logging
from typing import Any

import httpx
import pytest

from chatterm.server.http.schema_check import SchemaChecker
from tests.chatterm.server.fake import FakeService, serving
from tests.counting import until

SET = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SET}}
CALL = '<tool_call>{"name": "f", "arguments": {"v": ["a", "a"]}}</tool_call>'
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"v": SET}}}


@pytest.mark.parametrize(
    ("said", "fields", "kept"),
    [
        ('["a", "b"]', {"response_format": FORMAT}, True),
        ('["a", "a"]', {"response_format": FORMAT}, False),
        (CALL, {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}, False),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_checked_for_what_could_not_be_enforced(
    caplog: pytest.LogCaptureFixture, said: str, fields: dict[str, Any], kept: bool, stream: bool
) -> None:
    caplog.set_level(logging.INFO, "chatterm.server")
    service = FakeService(say=lambda request, index: [("answer", said)])
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": stream, **fields}

    def told() -> list[Any]:
        return [one.fields for one in caplog.records if one.message == "constraints not enforced"]  # type: ignore[attr-defined]

    with serving(service) as running:
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=body)
        until(lambda: bool(told()))
    assert answer.status_code == 200
    result = "" if stream else "; kept" if kept else "; broken"
    assert answer.headers["x-chatterm-not-enforced"] == f"uniqueItems{result}"
    assert [(one["names"], one["kept"]) for one in told()] == [(["uniqueItems"], kept)]
    assert "uniqueItems" not in service.asked[-1].constraint.text  # type: ignore[union-attr]


def test_what_is_strict_is_left_as_it_is() -> None:
    service = FakeService()
    strict = {**FORMAT, "json_schema": {**FORMAT["json_schema"], "strict": True}}  # type: ignore[dict-item]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "response_format": strict}
    with serving(service) as running:
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=body)
    assert "x-chatterm-not-enforced" not in answer.headers
    assert json.loads(service.asked[-1].constraint.text) == SET  # type: ignore[union-attr]


async def test_a_check_that_takes_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatterm.server.http.schema_check._PATIENCE", 0.5)
    bomb = {"pattern": "^(a+)+$", "uniqueItems": True}
    assert await SchemaChecker().fits([(bomb, json.dumps("a" * 40 + "b"))]) is None
