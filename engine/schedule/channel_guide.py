"""A guide for grammars that include the headers of their messages (calls, in the harmony format)."""

from collections.abc import Sequence as Items
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.errors import EngineError
from engine.sampling.sampler import Words
from engine.schedule.guide import allow, free, only
from models.text.tokenizer import Tokenizer
from models.text.tokenizer_parts import Channels

if TYPE_CHECKING:
    from engine.sampling.grammar import Matcher


@dataclass(slots=True)
class ChannelGuide:
    """Follows messages of thinking, which are free, and then a message that the grammar describes, header included.

    It does the work of `Guide`, whose grammars begin after the answer's header. Both kinds of message begin alike.
    """

    start: "Matcher"
    channels: Channels
    stop_ids: tuple[int, ...]
    thought: tuple[int, ...]
    """The header of a thinking message."""
    between: tuple[int, ...]
    """The tokens between the end of a message and the next header."""
    thinks: bool = True
    """Whether thinking is allowed."""
    count: int = 0
    _matcher: "Matcher | None" = field(init=False)
    """None: the grammar does not allow the header so far."""
    _header: list[int] | None = field(init=False)
    """The header so far, while it may still become one of thinking; otherwise None."""
    _due: list[int] = field(init=False)
    _thinks: bool = field(init=False)

    def __post_init__(self) -> None:
        self._restart()

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, start: "Matcher", channels: Channels, thinks: bool = True
    ) -> "ChannelGuide":
        """Return a guide for an answer of this tokenizer's model."""
        name = tokenizer.encode("analysis")
        header = (channels.closing[-channels.header], *name, channels.message)
        between = channels.closing[1 : -channels.header]
        return cls(start, channels, tuple(sorted(tokenizer.stop_ids)), header, between, thinks)

    def follow(self, tokens: Items[int]) -> None:
        """Do what `Guide.follow` does."""
        if len(tokens) < self.count:
            self._restart()
        for token in tokens[self.count :]:
            self.push(token)

    def push(self, token: int) -> None:
        """Do what `Guide.push` does."""
        self.count += 1
        if self._thinks:
            if token == self.channels.end:
                self._thinks, self._due = False, list(self.between)
        elif self._due:
            self._due = self._due[1:]
        elif self._header is not None:
            self._push_header(token, self._header)
        elif token not in self.stop_ids and self._matcher is not None:
            self._matcher.push(token)

    def _push_header(self, token: int, header: list[int]) -> None:
        before, self._matcher = self._matcher, None
        header.append(token)
        thinks = tuple(header) == self.thought[: len(header)]
        if before is not None:
            tried = before.copy()
            try:
                tried.push(token)
                self._matcher = tried
            except EngineError:
                if not thinks:
                    raise
        if not thinks:
            self._header = None
        elif len(header) == len(self.thought):
            self._thinks, self._header, self._matcher = True, [], self.start.copy()

    def copy(self) -> "ChannelGuide":
        """Return a copy as `Guide.copy` does."""
        found = copy(self)
        found._matcher = None if self._matcher is None else self._matcher.copy()
        found._header = None if self._header is None else list(self._header)
        return found

    def allows(self, token: int) -> bool:
        """Return what `Guide.allows` does."""
        if self._thinks:
            return token not in self._unthinkable
        if self._due:
            return token == self._due[0]
        if self._header is not None and token == self.thought[len(self._header)]:
            return True
        return self._matcher is not None and self._matcher.allows(token)

    def fill(self, words: Words) -> None:
        """Do what `Guide.fill` does."""
        if self._thinks:
            return free(words, self._unthinkable)
        if self._due:
            return only(words, self._due[0])
        if self._matcher is not None:
            self._matcher.fill(words)
        else:
            words.fill(0)
        if self._header is not None:
            allow(words, self.thought[len(self._header)])
        return None

    def forced(self) -> list[int]:
        """Return what `Guide.forced` does."""
        if self._thinks or self._matcher is None:
            return []
        return list(self._due) or ([] if self._header is not None else self._matcher.forced())

    @property
    def _unthinkable(self) -> tuple[int, ...]:
        """The tokens that may not be in a message of thinking: only its end leads to a message of the grammar."""
        known = self.channels
        return (*self.stop_ids, *known.steering[:-1])

    def _restart(self) -> None:
        self.count, self._due, self._thinks = 0, [], False
        self._header, self._matcher = [] if self.thinks else None, self.start.copy()
