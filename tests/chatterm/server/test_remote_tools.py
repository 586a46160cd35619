"""Tools of a chat whose model runs in the engine process."""

from pathlib import Path

import pytest

from chatterm.backends import tool_calls
from chatterm.backends.backend import ChatOptions, EngineError, Tool, ToolResult
from chatterm.backends.failover import attach
from tests.chatterm.server.agent_formats import FORMATS
from tests.chatterm.server.conftest import serving

ADD = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]})
HERMES = FORMATS[0]


def test_calls_go_over_the_channel_and_are_kept_once_the_server_has_ended(
    runtime: Path, roomy_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_calls.Calling, "constraint", lambda self, engine, given: given)
    with serving(roomy_checkpoint, tokenizer=HERMES.tokenizer()) as served:
        backend, why = attach("tiny", ChatOptions(sampling={"max_tokens": 200}))
        assert backend is not None, why
        backend.open()
        assert backend.info is not None
        assert backend.info.calls_tools
        backend.configure({"tools": (ADD,)})
        tokenizer = served.engine.tokenizer
        served.engine.scripted.script = tokenizer.encode("Well. " + HERMES.called("add", '{"a": 2}'))
        events = list(backend.send("What is 2 and 2?"))
        assert {event.kind for event in events} == {"answer", "call"}
        assert backend.last is not None
        assert [(call.name, call.arguments) for call in backend.last.calls] == [("add", '{"a": 2}')]
        assert backend.last.text == "Well."
        served.engine.scripted.script = tokenizer.encode(HERMES.answered("It is 4."))
        list(backend.tell([ToolResult("add", '{"a": 2}', "4")]))
        assert backend.last is not None
        assert (backend.last.text, list(backend.last.calls)) == ("It is 4.", [])
        assert backend.last.stats.prefilled_tokens < 60
        path = backend._path
        assert [len(exchange.results) for exchange in path] == [0, 1]
        assert path[0].calls[0].name == "add"
        backend.load_path(path[:1])
        served.engine.scripted.script = tokenizer.encode(HERMES.answered("Four."))
        list(backend.tell([ToolResult("add", '{"a": 2}', "4")]))
        with pytest.raises(EngineError, match="calls no tools"):
            list(backend.tell([ToolResult("add", "{}", "4")]))
        assert backend.options.tools == (ADD,)
        backend.close()
