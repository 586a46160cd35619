"""Finds the thinking and the answer in a token stream of several messages, each in a channel (the harmony format)."""

import re
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field

from engine.events import Kind
from models.text.tokenizer_parts import Channels

_RECIPIENT = re.compile(rb"[\s>]to=[^\s<>]")
_NAMED = b" to="
"""What a header begins with that names whom its message is for."""


@dataclass(slots=True)
class ChannelTracker:
    """Follows generated tokens through `HEADER thinking <|end|> HEADER answer`: what `ThinkTracker` is for one span.

    A header goes from `<|start|>` or `<|channel|>` to `<|message|>`. What is not in the channel of the answer is
    thinking, whatever its channel is called. The answer is one message: what a model writes after it is not taken. An
    answer that begins without a header is one. Where tools can be called, so is a message to one of them, and its
    header is part of it.
    """

    channels: Channels
    inside: bool = False
    """Whether the next token is one of a header or of the thinking; at first: whether the prompt ended within it."""
    spells: Callable[[int], bytes] | None = None
    """The bytes of a token; None: there are no tools to call."""
    given: bool = field(init=False)
    """What `inside` was at first."""
    count: int = 0
    """Tokens seen."""
    span: tuple[int, int] | None = None
    """First index of headers and thinking among the tokens seen, and the index after their last one (so far)."""
    markers: list[int] = field(default_factory=list)
    """Indexes of the tokens of headers, and of those that end messages, among the tokens seen."""
    answering: bool = False
    """The answer has begun."""
    breaks: bool = False
    """The latest token began another message of thinking: there is a gap between the two."""
    over: bool = False
    """The answer has ended: nothing may follow."""
    header: list[int] | None = None
    """The header that is being written, from what ended the message before it; None within a message."""
    said: list[int] = field(default_factory=list)
    """The tokens that the latest one has shown to be text of the answer, itself included: the header of a call."""
    _thoughts: int = 0

    def __post_init__(self) -> None:
        self.given = self.inside
        if self.inside:
            self.span, self._thoughts = (0, 0), 1

    @property
    def answer_start(self) -> int:
        """The index of the first token of the answer; 0 where nothing came before it."""
        return self.span[1] if self.span is not None else 0

    def copy(self) -> "ChannelTracker":
        """One that goes on from here on its own."""
        found = copy(self)
        found.markers = list(self.markers)
        found.header = None if self.header is None else list(self.header)
        return found

    def push(self, token_id: int) -> tuple[Kind, bool]:
        """The kind of this token, and whether it is no text."""
        index, known = self.count, self.channels
        self.count += 1
        self.breaks, self.said = False, []
        steers = token_id in known.steering
        begun = index > 0 or self.given
        if not self.inside and begun:
            ends = steers and not self.over
            if ends:
                self.markers.append(index)
                self.over = True
            return "answer", ends
        if not self.inside and not steers and not self._may_name([token_id]):
            return "answer", False
        named = [*(self.header or []), token_id]
        if self.header and not (steers or self.header[0] in known.steering or self._may_name(named)):
            return self._answers(named)
        if not self.inside and not steers:
            self.header = []
        self.inside = True
        self.span = (0, index + 1)
        if self.header is None and not steers:
            return "reasoning", False
        self.markers.append(index)
        self.header = [token_id] if token_id == known.end else [*(self.header or []), token_id]
        if token_id == known.message:
            if self._is_call(self.header):
                return self._answers(self._without_lead(self.header))
            self.inside = not self._is_answer(self.header)
            self.header = None
            self.breaks = self.inside and self._thoughts > 0
            self._thoughts += self.inside
        return "reasoning", True

    def closing(self) -> list[int]:
        """The tokens that end the thinking, and lead over to the answer."""
        known, header = self.channels, self.header
        if header is None:
            return list(known.closing)
        wanted = known.closing if header[0] == known.end else known.closing[-known.header :]
        if tuple(header) == wanted[: len(header)]:
            return list(wanted[len(header) :])
        return [known.message, *known.closing]

    def _answers(self, said: list[int]) -> tuple[Kind, bool]:
        """The answer has begun with these tokens."""
        start = self.count - len(said)
        self.said, self.inside, self.header = said, False, None
        self.span = (0, start) if start else None
        return "answer", False

    def _may_name(self, header: list[int]) -> bool:
        """Whether an answer that begins so may be a header that begins with whom its message is for."""
        if self.spells is None:
            return False
        text = b"".join(map(self.spells, header))
        return bool(text) and (text.startswith(_NAMED) or _NAMED.startswith(text))

    def _is_call(self, header: list[int]) -> bool:
        spells = self.spells
        return spells is not None and _RECIPIENT.search(b"".join(map(spells, header))) is not None

    def _without_lead(self, header: list[int]) -> list[int]:
        """A header without what ends the message before it, and says whose message this is."""
        lead = list(self.channels.closing[: -self.channels.header])
        return header[len(lead) :] if header[: len(lead)] == lead else header

    def _is_answer(self, header: list[int]) -> bool:
        known = self.channels
        if known.channel not in header:
            return True
        last = len(header) - 1 - header[::-1].index(known.channel)
        return tuple(header[last + 1 :][: len(known.answer)]) == known.answer
