"""Finds the think span in a token stream."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

from engine.events import Kind


@dataclass(slots=True)
class ThinkTracker:
    """Follows generated tokens through `<think> ... </think>`.

    `inside` says whether the prompt ended inside an open span (some templates open it themselves). Without ids
    for the two markers (`start` and `end` None), every token belongs to the answer. Only one span counts, and only
    before the answer: a marker that the answer contains later is ordinary text.
    """

    start: int | None
    end: int | None
    inside: bool = False
    given: bool = field(init=False)
    """The initial value of `inside`."""
    count: int = 0
    """Tokens seen."""
    span: tuple[int, int] | None = None
    """The index of the span's first token among the tokens seen, and the index after its last one so far."""

    markers: list[int] = field(default_factory=list)
    """The indices of the markers among the tokens seen."""
    answering: bool = False
    """Whether the answer has begun, so that no span can open any more."""
    breaks: bool = False
    over: bool = False
    said: tuple[int, ...] = ()
    """As in `ChannelTracker`; never set here."""

    def __post_init__(self) -> None:
        self.given = self.inside
        if self.inside:
            self.span = (0, 0)

    def thought(self, said: Sequence[int]) -> Sequence[int]:
        """Return the tokens of `said` that are in the span, without its opening marker."""
        first = self.span[0] if self.span is not None else 0
        return said[first + (said[first : first + 1] == [self.start]) :]

    @property
    def answer_start(self) -> int:
        """The index of the first token after the span; 0 without a span."""
        return self.span[1] if self.span is not None else 0

    def copy(self) -> "ThinkTracker":
        """Return a copy that can move on independently."""
        found = copy(self)
        found.markers = list(self.markers)
        return found

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
