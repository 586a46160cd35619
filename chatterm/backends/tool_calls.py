"""Tool calls of a local model: the tools it is offered, and the calls found in its answers."""

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from chatterm.backends.backend import EngineError, TokenEvent, Tool, ToolCall
from chatterm.tool_calls.constraint import AnswerConstraint, ToolFormat
from chatterm.tool_calls.format import call_marks, said_by, tool_format
from chatterm.tool_calls.grammar import calls_or, free_calls, spell_marks
from chatterm.tool_calls.parser import Parser
from chatterm.tool_calls.reader import AnswerText, CallArguments, CallBegan, CallEnded
from engine.params import Constraint

if TYPE_CHECKING:
    from engine.conversation.tools import ToolUse
    from engine.engine import Engine
    from models.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Calling:
    """The tool format of one model, with the tools on offer."""

    tokenizer: "Tokenizer"
    format: ToolFormat
    tools: tuple[Tool, ...] = ()

    @classmethod
    def of(cls, tokenizer: "Tokenizer", tools: Sequence[Tool] = ()) -> "Calling | None":
        """Return the tool format of a model; None if the model does not support tools."""
        format = tool_format(tokenizer)
        return cls(tokenizer, format, tuple(tools)) if format is not None else None

    @property
    def use(self) -> "ToolUse":
        """The tools in the form that the engine needs."""
        from engine.conversation.tools import ToolUse

        marks = call_marks(self.tokenizer)
        return ToolUse(
            tuple(tool.as_function() for tool in self.tools), marks if self.tools else frozenset(), self._read
        )

    def constraint(self, engine: "Engine", given: Constraint | None) -> Constraint | None:
        """Return a constraint under which no call is malformed; `given` constrains answers that call nothing.

        Arguments match their schemas, except of tools whose schema no grammar can express. Raises EngineError if
        `given` cannot be enforced along with calls.
        """
        if not self.tools:
            return given
        names = [tool.name for tool in self.tools]
        with suppress(EngineError):
            return self._enforced(engine, given, names)
        try:
            loosest = self._enforced(engine, given, [])
        except EngineError:
            if given is None:
                return None
            raise EngineError(
                "Answers in this format and tools cannot be combined; switch one of them off."
            ) from None
        fine = []
        for name in names:
            with suppress(EngineError):
                self._enforced(engine, given, [name])
                fine.append(name)
        with suppress(EngineError):  # they may be too large together
            return self._enforced(engine, given, fine)
        return loosest

    def _enforced(
        self, engine: "Engine", given: Constraint | None, strict: Collection[str]
    ) -> Constraint | None:
        """Return the constraint if it can be enforced, with arguments that fit for the tools named in `strict`.

        None if there is nothing to enforce. Raises EngineError.
        """
        tools = [tool.as_function() for tool in self.tools]
        made: AnswerConstraint | None
        if given is not None:
            made = calls_or(AnswerConstraint(given.kind, given.text), self.format, tools, True, strict)
        else:
            made = free_calls(self.format, tools, strict, True)
        if made is None:
            return None
        constraint = Constraint("lark", spell_marks(made.text, self.tokenizer.token_id))
        engine.output(engine.default_params(constraint=constraint))
        return constraint

    def _read(self, text: str) -> tuple[str, list[tuple[str, Any]]]:
        prose, calls = said_by(
            text, self.format, [tool.as_function() for tool in self.tools] or [_lenient_any()]
        )
        return prose.strip() if calls else text, calls


class CallFilter:
    """The text of an answer without its calls, while it streams."""

    def __init__(self, calling: Calling, before: str = "") -> None:
        """`before` is the part of the answer that was already produced, calls included."""
        self._parser = Parser(calling.format, {tool.name: tool.parameters for tool in calling.tools})
        self.text = ""
        self._in_call = False
        self._take(before)

    def taken(self, event: TokenEvent) -> TokenEvent:
        """Return the event with only the text that is certain by now not to be part of a call."""
        if event.kind == "reasoning":
            return event
        was_calling = self._in_call or self._parser.is_calling
        prose = self._take(event.text)
        if prose:
            return replace(event, text=prose)
        calling = was_calling or self._in_call or self._parser.is_calling
        return replace(event, text=event.text if calling else "", kind="call" if calling else "answer")

    def _take(self, text: str) -> str:
        prose = ""
        for event in self._parser.push(text):
            match event:
                case AnswerText(more):
                    prose += more
                case CallBegan() | CallArguments():
                    self._in_call = True
                case CallEnded():
                    self._in_call = False
        self.text += prose
        return prose


def to_tool_calls(calls: Sequence[tuple[str, Any]]) -> list[ToolCall]:
    """Convert the engine's calls to ToolCalls."""
    return [
        ToolCall(name, given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))
        for name, given in calls
    ]


def _lenient_any() -> dict[str, Any]:
    """Return an arbitrary function, so that calls are found whatever their function is called."""
    return {"type": "function", "function": {"name": "any", "parameters": {"type": "object"}}}
