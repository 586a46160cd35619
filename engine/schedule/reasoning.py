"""Finds the think span in a token stream."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Self

from engine.events import Kind


@dataclass(slots=True)
class Tracker:
    """Follows generated tokens through the thinking to the answer."""

    inside: bool = field(default=False, kw_only=True)
    """Whether the next token belongs to the thinking; at first, whether the prompt ended there."""
    label: str = field(default="", kw_only=True)
    """The text after the opening marker that is no thinking yet."""
    given: bool = field(init=False)
    """The initial value of `inside`."""
    count: int = field(default=0, init=False)
    """Tokens seen."""
    span: tuple[int, int] | None = field(default=None, init=False)
    """The range of the thinking among the tokens seen: its first index, and the index after its last one so far."""
    markers: list[int] = field(default_factory=list, init=False)
    """The indices, among the tokens seen, of control tokens around the thinking."""
    answering: bool = field(default=False, init=False)
    """Whether the answer has begun, so that no thinking can follow."""
    breaks: bool = field(default=False, init=False)
    """Whether the latest token began another message of thinking, which is separated from the one before by a gap."""
    over: bool = field(default=False, init=False)
    """Whether the answer has ended, so that nothing may follow."""
    said: Sequence[int] = field(default=(), init=False)
    """Tokens that the latest one has shown to be text of the answer, itself included: the header of a call."""

    def __post_init__(self) -> None:
        self.given = self.inside
        if self.inside:
            self.span = (0, 0)

    @property
    def answer_start(self) -> int:
        """The index of the first token of the answer; 0 if nothing precedes it."""
        return self.span[1] if self.span is not None else 0

    def copy(self) -> Self:
        """Return a copy that can move on independently."""
        found = copy(self)
        found.markers = list(self.markers)
        return found

    def push(self, token_id: int) -> tuple[Kind, bool]:
        """Return the kind of this token, and whether it is a control token rather than text."""
        raise NotImplementedError


@dataclass(slots=True)
class ThinkTracker(Tracker):
    """Follows generated tokens through `<think> ... </think>`.

    `inside` says whether the prompt ended inside an open span (some templates open it themselves). Without ids
    for the two markers (`start` and `end` None), every token belongs to the answer. Only one span counts, and only
    before the answer: a marker that the answer contains later is ordinary text.
    """

    start: int | None
    end: int | None

    def thought(self, said: Sequence[int]) -> Sequence[int]:
        """Return the tokens of `said` that are in the span, without its opening marker."""
        first = self.span[0] if self.span is not None else 0
        return said[first + (said[first : first + 1] == [self.start]) :]

    def push(self, token_id: int) -> tuple[Kind, bool]:
        """Return the kind of this token, and whether it is one of the two markers."""
        index = self.count
        self.count += 1
        if self.inside:
            assert self.span is not None
            self.span = (self.span[0], index + 1)
            self.inside = token_id != self.end
            if not self.inside:
                self.markers.append(index)
            return "reasoning", not self.inside
        if token_id == self.start and self.start is not None and self.span is None and not self.answering:
            self.inside = True
            self.span = (index, index + 1)
            self.markers.append(index)
            return "reasoning", True
        return "answer", False
