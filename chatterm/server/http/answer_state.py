"""Answer state, independent of the wire format: pieces of the engine become parts of answers."""

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from chatterm.server.service import Delta, Logprob, Piece, Reason, Started, Usage
from chatterm.tool_calls.literals import Schemas
from chatterm.tool_calls.parser import Parser
from chatterm.tool_calls.reader import AnswerText, CallArguments, CallBegan, CallEnded, Event


@dataclass(frozen=True, slots=True)
class Thought:
    """More thinking text."""

    text: str


@dataclass(frozen=True, slots=True)
class Likelihoods:
    """The logprobs of tokens of the answer, if they were requested."""

    tokens: tuple[Logprob, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete; its state says why."""


Part = AnswerText | Thought | CallBegan | CallArguments | CallEnded | Likelihoods | Finished


@dataclass(slots=True)
class AnswerItem:
    """Thinking, text or a tool call, as far as it has been received."""

    kind: Literal["reasoning", "message", "function_call"]
    text: str = ""
    """Of a call: its arguments."""
    name: str = ""
    """Of a call: the function's."""
    logprobs: list[Logprob] = field(default_factory=list)
    """Of a message, including those of calls before it."""
    is_over: bool = False
    """Whether it is complete: nothing more is added."""
    is_cut: bool = False
    """Whether a limit ended the answer within it."""

    @property
    def is_json(self) -> bool:
        """Whether the arguments of a call are complete JSON."""
        try:
            msgspec.json.decode(self.text or "{}")
        except msgspec.DecodeError:
            return False
        return True


@dataclass(slots=True)
class Totals:
    """Totals over all prompts of a request."""

    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_s: float = 0.0
    """Seconds in the queue of this server."""


@dataclass(slots=True)
class AnswerState:
    """One answer, as far as it has been received."""

    index: int
    items: list[AnswerItem] = field(default_factory=list)
    """In the order of their arrival."""
    logprobs: list[Logprob] = field(default_factory=list)
    tokens: int = 0
    reason: Reason | None = None
    usage: Usage | None = None
    lost_call: bool = False
    """Whether it was cut within a call of which nothing is left."""
    _given: int = 0
    """How many of `logprobs` have been assigned to items."""

    @property
    def text(self) -> str:
        """The text of all its messages."""
        return "".join(item.text for item in self.items if item.kind == "message")

    @property
    def reasoning(self) -> str:
        """The text of all its thinking."""
        return "".join(item.text for item in self.items if item.kind == "reasoning")

    @property
    def calls(self) -> list[AnswerItem]:
        """Its tool calls."""
        return [item for item in self.items if item.kind == "function_call"]

    @property
    def is_incomplete(self) -> bool:
        """Whether a limit ended it."""
        return self.reason in ("length", "context_full", "repetition")

    @property
    def open(self) -> AnswerItem | None:
        """The last item, unless it is complete."""
        return self.items[-1] if self.items and not self.items[-1].is_over else None

    def begin(self, item: AnswerItem) -> None:
        """Append an item; the one before it is complete."""
        if self.items:
            self.items[-1].is_over = True
        self.items.append(item)

    def think(self, text: str) -> None:
        """Add thinking text."""
        self._more("reasoning", text)

    def keep(self, event: Event) -> None:
        """Add an event of the answer's parser."""
        match event:
            case AnswerText(text):
                self._more("message", text)
                self.items[-1].logprobs += self.logprobs[self._given :]
                self._given = len(self.logprobs)
            case CallBegan(_, name):
                self.begin(AnswerItem("function_call", name=name))
            case CallArguments(number, text):
                self.calls[number].text += text
            case CallEnded(number):
                call = self.calls[number]
                call.is_over = True
                call.is_cut = self.is_incomplete  # one that is complete ends before its answer

    def _more(self, kind: Literal["reasoning", "message"], text: str) -> None:
        if self.open is None or self.open.kind != kind:
            self.begin(AnswerItem(kind))
        self.items[-1].text += text


class Collector:
    """Gathers the pieces of one generation, whose answers are numbered from `first`."""

    def __init__(self, count: int, tools: Schemas, is_forced: bool, first: int = 0) -> None:
        """`tools`: the functions that the model may call; `is_forced`: it can only call."""
        self.states = [AnswerState(first + number) for number in range(count)]
        self.started: Started | None = None
        self._tools, self._is_forced = tools, is_forced
        self._parsers = [Parser(None, {}) for _ in range(count)]

    def take(self, piece: Piece) -> tuple[AnswerState, list[Part]] | None:
        """Add a piece; return its answer and the new parts of that, or None if it concerns all answers."""
        if isinstance(piece, Started):
            self.started = piece
            format, tools = piece.tool_format, self._tools
            self._parsers = [Parser(format, tools, self._is_forced) for _ in self.states]
            return None
        state = self.states[piece.index]
        parser = self._parsers[piece.index]
        parts: list[Part] = []
        if isinstance(piece, Delta):
            state.tokens += len(piece.token_ids)
            if piece.kind == "reasoning":
                if not piece.text:
                    return state, []
                state.think(piece.text)
                return state, [Thought(piece.text)]
            if piece.logprobs:
                state.logprobs += piece.logprobs
                parts.append(Likelihoods(piece.logprobs))
            events = parser.push(piece.text)
            for event in events:
                state.keep(event)
            return state, [*parts, *events]
        state.reason, state.usage = piece.reason, piece.usage
        events = parser.end(piece.reason != "eos")
        state.lost_call = parser.lost_call
        for event in events:
            state.keep(event)
        if not state.items:
            state.begin(AnswerItem("message"))
        if state.open is not None:
            state.open.is_cut = state.is_incomplete
        return state, [*events, Finished()]

    @property
    def is_complete(self) -> bool:
        """Whether every answer has ended."""
        return all(state.reason is not None for state in self.states)
