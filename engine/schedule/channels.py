"""Finds the thinking and the answer in a token stream of several messages.

Each is in a channel (the harmony format), or has a recipient (Muse Glimmer): "self" for thinking, "user", or a tool.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from engine.events import Kind
from engine.schedule.reasoning import Tracker
from models.text.tokenizer_parts import Channels

_RECIPIENT = re.compile(rb"[\s>]to=([^\s<>]+)")
_NAMED = b" to="
"""The beginning of a header that starts with the recipient of its message."""


@dataclass(slots=True)
class ChannelTracker(Tracker):
    """Follows generated tokens through `HEADER thinking <|end|> HEADER answer`, as `ThinkTracker` does for one span.

    A header goes from `<|start|>` or `<|channel|>` to `<|message|>`. It counts as thinking, and so does a message
    outside the answer's channel, whatever its channel is called. The answer is one message; what a model writes after
    it is dropped. An answer that begins without a header counts as one. If tools can be called, a message to a tool is
    an answer, too, and its header is part of it.
    """

    channels: Channels
    spells: Callable[[int], bytes] | None = None
    """Returns the bytes of a token; None: headers need not be read, for there are no tools to call."""
    calls: bool = True
    """Whether there are tools to call, if `spells` is given."""
    header: list[int] | None = field(default=None, init=False)
    """The header being written, from the end of the message before it; None inside a message."""
    _thoughts: int = field(init=False)

    def __post_init__(self) -> None:
        Tracker.__post_init__(self)
        self._thoughts = int(self.inside)

    def copy(self) -> Self:
        """Return a copy as `Tracker.copy` does."""
        found = Tracker.copy(self)
        found.header = None if self.header is None else list(self.header)
        return found

    def push(self, token_id: int) -> tuple[Kind, bool]:
        """Return the kind of this token, and whether it is a control token rather than text."""
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
        """Return the tokens that end the thinking and lead to the answer."""
        known, header = self.channels, self.header
        if header is None:
            return list(known.closing)
        wanted = known.closing if header[0] == known.end else known.closing[-known.header :]
        if tuple(header) == wanted[: len(header)]:
            return list(wanted[len(header) :])
        return [known.message, *known.closing]

    def _answers(self, said: list[int]) -> tuple[Kind, bool]:
        """Note that the answer has begun with these tokens."""
        start = self.count - len(said)
        self.said, self.inside, self.header = said, False, None
        self.span = (0, start) if start else None
        return "answer", False

    def _may_name(self, header: list[int]) -> bool:
        """Return whether an answer with this beginning may be a header that starts with its recipient."""
        if self.spells is None:
            return False
        text = b"".join(map(self.spells, header))
        return bool(text) and (text.startswith(_NAMED) or _NAMED.startswith(text))

    def _recipient(self, header: list[int]) -> bytes:
        """Return to whom a message with this header goes; b"" if it does not say, or if nobody needs to know."""
        found = None if self.spells is None else _RECIPIENT.search(b"".join(map(self.spells, header)))
        return b"" if found is None else found[1]

    def _is_call(self, header: list[int]) -> bool:
        people = (b"",) if self.channels.channel is not None else (b"", b"self", b"user")
        return self.calls and self._recipient(header) not in people

    def _without_lead(self, header: list[int]) -> list[int]:
        """Return a header without the tokens that end the message before it and name the author of this one."""
        lead = list(self.channels.closing[: -self.channels.header])
        return header[len(lead) :] if header[: len(lead)] == lead else header

    def _is_answer(self, header: list[int]) -> bool:
        known = self.channels
        if known.channel is None:
            return self._recipient(header) in (b"", b"user")
        if known.channel not in header:
            return True
        last = len(header) - 1 - header[::-1].index(known.channel)
        return tuple(header[last + 1 :][: len(known.answer)]) == known.answer
