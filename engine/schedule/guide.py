"""The tokens that may be sampled next in an answer that has to match a constraint."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from engine.sampling.sampler import Words
from engine.schedule.reasoning import Tracker
from models.text.pieces import PromptPiece
from models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.sampling.grammar import Matcher


@dataclass(slots=True)
class Guide:
    """Follows the tokens of an answer through its thinking, which is free, and then through its grammar.

    It belongs to the loop thread once its sequence is queued. During thinking, only tokens that end a turn are
    forbidden. The template's text between thinking and answer is forced, and is not part of what has to match.
    """

    start: "Matcher"
    """A matcher at the beginning of an answer."""
    track: Callable[[], Tracker]
    """Makes a tracker at the beginning of an answer."""
    stop_ids: tuple[int, ...]
    opener: int | None
    """The token that begins the thinking, if the prompt has not begun it and the answer may."""
    lead: tuple[int, ...]
    """The template's tokens between thinking and answer."""
    breaks: frozenset[int]
    """Tokens that consist of line breaks only."""
    count: int = 0
    """The number of tokens followed."""
    _matcher: "Matcher" = field(init=False)
    _tracker: Tracker = field(init=False)
    _due: list[int] = field(default_factory=list)
    """The rest of `lead`."""
    _thought: bool = False
    """Whether the thinking has just ended and the answer has not begun."""

    def __post_init__(self) -> None:
        self._restart()

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, start: "Matcher", track: Callable[[], Tracker], thinks: bool = True
    ) -> "Guide":
        """Return a guide for an answer of this tokenizer's model. With `thinks`, it may begin with thinking."""
        stops, opener, lead = tuple(sorted(tokenizer.stop_ids)), tokenizer.think_start, list[int]()
        if (channels := tokenizer.channels) is not None:
            opener = channels.closing[-channels.header]
        elif (markers := tokenizer.think_markers) is not None:
            lead = tokenizer.encode_pieces(
                [PromptPiece(markers.after_close, typed=False)], tokenizer.think_end
            )
        breaks = (
            [[PromptPiece("\n" * count, typed=False)] for count in (1, 2, 3)] if opener is not None else []
        )
        known = frozenset(id for pieces in breaks for id in tokenizer.encode_pieces(pieces, opener))
        return cls(start, track, stops, opener if thinks else None, tuple(lead), known)

    def follow(self, tokens: Items[int]) -> None:
        """Move to the place right after these tokens of the answer. Raises EngineError if one is not allowed there."""
        if len(tokens) < self.count:
            self._restart()
        for token in tokens[self.count :]:
            self.push(token)

    def push(self, token: int) -> None:
        """Move past this token. Raises EngineError if it may not follow."""
        self.count += 1
        tracker, before = self._tracker, self._tracker.inside
        tracker.push(token)
        if before or tracker.inside:
            if not tracker.inside:
                self._due, self._thought = list(self.lead), True
            return
        if self._thought and token in self.breaks:
            self._due = self._due[1:] if self._due[:1] == [token] else []
            return
        self._due, self._thought = [], False
        tracker.answering = True
        if token not in self.stop_ids:
            self._matcher.push(token)

    def copy(self) -> "Guide":
        """Return a copy that can move on independently."""
        found = copy(self)
        found._matcher, found._tracker, found._due = (
            self._matcher.copy(),
            self._tracker.copy(),
            list(self._due),
        )
        return found

    def allows(self, token: int) -> bool:
        """Return whether `fill` would allow this token."""
        if self._tracker.inside:
            return token not in self.stop_ids
        if self._due:
            return token == self._due[0]
        return self._matcher.allows(token) or (self._may_think and token == self.opener)

    def fill(self, words: Words) -> None:
        """Write which tokens may follow. Raises EngineError if the grammar is too complex to decide."""
        if self._tracker.inside:
            free(words, self.stop_ids)
        elif self._due:
            only(words, self._due[0])
        else:
            self._matcher.fill(words)
            if self._may_think and self.opener is not None:
                allow(words, self.opener)

    def forced(self) -> list[int]:
        """Return the tokens that must follow, in order; more may be forced after them."""
        if self._tracker.inside or self._may_think:
            return []
        return list(self._due) or self._matcher.forced()

    @property
    def _may_think(self) -> bool:
        return self.count == 0 and self.opener is not None

    def _restart(self) -> None:
        self.count, self._due, self._thought = 0, [], False
        self._matcher, self._tracker = self.start.copy(), self.track()


def free(words: Words, stop_ids: Items[int]) -> None:
    """Allow every token except these."""
    words.fill(-1)
    for stop in stop_ids:
        if stop // 32 < len(words):
            words[stop // 32] &= ~_bit(stop)


def allow(words: Words, token: int) -> None:
    """Allow this token, too."""
    words[token // 32] |= _bit(token)


def only(words: Words, token: int) -> None:
    """Allow this token and no other."""
    words.fill(0)
    words[token // 32] = _bit(token)


def _bit(token: int) -> np.int32:
    return np.uint32(1 << token % 32).astype(np.int32)
