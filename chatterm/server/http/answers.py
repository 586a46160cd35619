"""What comes of a request, told apart from how it is written: pieces of the engine become parts of answers."""

from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from chatterm.calls.parser import CallArguments, CallBegan, CallEnded, Event, Parser, Text
from chatterm.server.service import Delta, Logprob, Piece, Reason, Started, ToolFormat, Usage


@dataclass(frozen=True, slots=True)
class Thought:
    """More of the thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class Likelihoods:
    """Of tokens of the answer, where they were asked for."""

    tokens: tuple[Logprob, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete; its state says why."""


Part = Text | Thought | CallBegan | CallArguments | CallEnded | Likelihoods | Finished


@dataclass(slots=True)
class MadeCall:
    """A call as far as it has come."""

    name: str
    arguments: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether its arguments are JSON."""
        try:
            msgspec.json.decode(self.arguments or "{}")
        except msgspec.DecodeError:
            return False
        return True


@dataclass(slots=True)
class Totals:
    """Of all prompts of a request."""

    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_s: float = 0.0
    """In the queue of this server."""


@dataclass(slots=True)
class AnswerState:
    """One answer as far as it has come."""

    index: int
    text: str = ""
    reasoning: str = ""
    calls: list[MadeCall] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    tokens: int = 0
    reason: Reason | None = None
    usage: Usage | None = None


class Collector:
    """Gathers the pieces of one generation, whose answers are numbered from `first`."""

    def __init__(self, count: int, tools: Collection[str], first: int = 0) -> None:
        """`tools`: names of the functions that the model may call."""
        self.states = [AnswerState(first + number) for number in range(count)]
        self.started: Started | None = None
        self._tools = tools
        self._parsers = [Parser(None, ()) for _ in range(count)]

    def take(self, piece: Piece) -> tuple[AnswerState, list[Part]] | None:
        """What a piece brings to an answer; None for one that is about all of them."""
        if isinstance(piece, Started):
            self.started = piece
            self._parsers = [self._parser(piece.tool_format) for _ in self.states]
            return None
        state = self.states[piece.index]
        parser = self._parsers[piece.index]
        parts: list[Part] = []
        if isinstance(piece, Delta):
            state.tokens += len(piece.token_ids)
            if piece.kind == "reasoning":
                state.reasoning += piece.text
                return state, [Thought(piece.text)] if piece.text else []
            if piece.logprobs:
                state.logprobs += piece.logprobs
                parts.append(Likelihoods(piece.logprobs))
            return state, [*parts, *_kept(state, parser.push(piece.text))]
        parts += _kept(state, parser.end())
        state.reason, state.usage = piece.reason, piece.usage
        return state, [*parts, Finished()]

    @property
    def is_complete(self) -> bool:
        """Whether every answer has ended."""
        return all(state.reason is not None for state in self.states)

    def _parser(self, format: ToolFormat | None) -> Parser:
        return Parser(format, self._tools)


def _kept(state: AnswerState, events: list[Event]) -> list[Event]:
    for event in events:
        match event:
            case Text(text):
                state.text += text
            case CallBegan(_, name):
                state.calls.append(MadeCall(name))
            case CallArguments(number, text):
                state.calls[number].arguments += text
            case CallEnded():
                pass
    return events
