"""Finds the think span in a token stream."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

from engine.events import Kind


@dataclass(slots=True)
class ThinkTracker:
    """Follows generated tokens through `<think> ... </think>`.

    `inside` says whether the prompt ended within an open span (some templates open it themselves). Without ids
    for the two markers (`start`, `end` None) every token is answer. Only one span counts, before the answer: a
    marker that an answer writes later is text like any other.
    """

    start: int | None
    end: int | None
    inside: bool = False
    given: bool = field(init=False)
    """What `inside` was at first."""
    count: int = 0
    """Tokens seen."""
    span: tuple[int, int] | None = None
    """First index of the span among the tokens seen, and the index after its last one (so far)."""

    markers: list[int] = field(default_factory=list)
    """Indexes of the markers among the tokens seen."""
    answering: bool = False
    """The answer has begun: no span may open any more."""
    breaks: bool = False
    over: bool = False
    said: tuple[int, ...] = ()
    """As in `ChannelTracker`: nothing of that happens."""

    def __post_init__(self) -> None:
        self.given = self.inside
        if self.inside:
            self.span = (0, 0)

    def thought(self, said: Sequence[int]) -> Sequence[int]:
        """What of the tokens `said` stands in the span after its opening marker."""
        first = self.span[0] if self.span is not None else 0
        return said[first + (said[first : first + 1] == [self.start]) :]

    @property
    def answer_start(self) -> int:
        """The index of the first token behind the span; 0 where there is none."""
        return self.span[1] if self.span is not None else 0

    def copy(self) -> "ThinkTracker":
        """One that goes on from here on its own."""
        found = copy(self)
        found.markers = list(self.markers)
        return found

    def push(self, token_id: int) -> tuple[Kind, bool]:
        """The kind of this token, and whether it is one of the two markers."""
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
