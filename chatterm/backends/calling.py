"""How the model of an engine calls tools: what it is offered, and its calls in what it says."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from chatterm.backends.backend import EngineError, TokenEvent, Tool, ToolCall
from chatterm.calls.constraint import Constraint as Asked
from chatterm.calls.constraint import ToolFormat
from chatterm.calls.format import json_value, marks_of, said_by, tool_format
from chatterm.calls.grammar import calls_or, free_calls, spelled
from chatterm.calls.parser import CallArguments, CallBegan, CallEnded, Parser, Text
from engine.params import Constraint

if TYPE_CHECKING:
    from engine.conversation.tools import ToolUse
    from engine.engine import Engine
    from models.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Calling:
    """What one model knows of tools."""

    tokenizer: "Tokenizer"
    format: ToolFormat
    tools: tuple[Tool, ...] = ()

    @classmethod
    def of(cls, tokenizer: "Tokenizer", tools: Sequence[Tool] = ()) -> "Calling | None":
        """None where the model knows none."""
        format = tool_format(tokenizer)
        return cls(tokenizer, format, tuple(tools)) if format is not None else None

    @property
    def use(self) -> "ToolUse":
        """The same for the engine."""
        from engine.conversation.tools import ToolUse

        marks = marks_of(self.tokenizer)
        return ToolUse(tuple(_functions(self.tools)), marks if self.tools else frozenset(), self._read)

    def constraint(self, engine: "Engine", given: Constraint | None) -> Constraint | None:
        """What an answer has to match so that no call is malformed; `given`: what one has to match that calls nothing.

        Arguments fit their schemas where a grammar can say these. Raises EngineError where `given` cannot be kept to.
        """
        if not self.tools:
            return given
        functions = _functions(self.tools)
        names = [tool.name for tool in self.tools]
        for strict in (names, []):
            known = functions if strict else [_lenient(function) for function in functions]
            if given is not None:
                asked = Asked(given.kind, given.text)
                made: Asked | None = calls_or(asked, self.format, known, True)
            else:
                made = free_calls(self.format, known, strict, True)
            if made is None:
                return None
            try:
                constraint = Constraint("lark", spelled(made.text, self.tokenizer.token_id))
                engine.output(engine.default_params(constraint=constraint))
            except EngineError:
                continue
            return constraint
        if given is not None:
            raise EngineError("Answers in this format and tools cannot be combined; switch one of them off.")
        return None

    def _read(self, text: str) -> tuple[str, list[tuple[str, Any]]]:
        prose, calls = said_by(text, self.format, _functions(self.tools) or [_lenient_any()])
        return prose.strip() if calls else text, calls


class Said:
    """An answer without its calls, while it comes."""

    def __init__(self, calling: Calling, before: str = "") -> None:
        """`before`: what was said of it already, calls and all."""
        self._parser = Parser(calling.format, [tool.name for tool in calling.tools])
        self.text = ""
        self._in_call = False
        self._take(before)

    def taken(self, event: TokenEvent) -> TokenEvent:
        """The token, with that text which is certain now."""
        if event.kind == "reasoning":
            return event
        was_in_call = self._in_call
        prose = self._take(event.text)
        if prose:
            return replace(event, text=prose)
        in_call = was_in_call or self._in_call
        return replace(event, text=event.text if in_call else "", kind="call" if in_call else "answer")

    def _take(self, text: str) -> str:
        prose = ""
        for event in self._parser.push(text):
            match event:
                case Text(more):
                    prose += more
                case CallBegan() | CallArguments():
                    self._in_call = True
                case CallEnded():
                    self._in_call = False
        self.text += prose
        return prose


def calls_of(calls: Sequence[tuple[str, Any]]) -> list[ToolCall]:
    """Calls as a backend tells them."""
    return [
        ToolCall(name, given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))
        for name, given in calls
    ]


def engine_calls(calls: Sequence[ToolCall]) -> list[tuple[str, Any]]:
    """Calls as the engine knows them."""
    return [(call.name, json_value(call.arguments)) for call in calls]


def _functions(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
            },
        }
        for tool in tools
    ]


def _lenient(function: dict[str, Any]) -> dict[str, Any]:
    made = {**function["function"], "parameters": {"type": "object"}}
    return {"type": "function", "function": made}


def _lenient_any() -> dict[str, Any]:
    """Some function: calls are found whatever it is called."""
    return {"type": "function", "function": {"name": "any", "parameters": {"type": "object"}}}
