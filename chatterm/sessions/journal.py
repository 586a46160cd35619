"""The journal: the tokens of a running answer, on the disk within a moment.

When an answer begins (or goes on) its exchange is saved as it is then, with the seed of its random numbers. From then
on every batch of tokens is appended to the table `journal` as one record, in a transaction of its own; the end of the
answer saves the exchange whole and deletes its records. An answer without an end was cut off, and is what its exchange
and its records say together. Seed and number of tokens are the whole state of sampling, so it can go on from there,
as `Chat.resume` does.

A token is *committed* once the transaction with its record is: then it survives the end of this process, however that
comes. SQLite's write-ahead log is the file behind this: append-only, each of its frames with a checksum, a torn last
transaction is recognised and dropped. The disk is told to write for good only every half second
(`fallback_database.py`): a power cut may take that much.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from chatterm.backends.backend import Exchange, TokenEvent

_STATE = ("stats", "thinking_s", "ends_at")
"""Fields of an exchange that move with every token."""


@dataclass(slots=True)
class JournalRecord:
    """One record: some tokens of an answer, what they say, and the state after them."""

    ids: list[int]
    text: str
    reasoning: str
    state: Mapping[str, Any]

    def add_to(self, exchange: Exchange, at: int) -> None:
        """Go on with `exchange`, if the first of `ids` is its token number `at`."""
        if at != len(exchange.token_ids):
            return
        exchange.token_ids += self.ids
        exchange.text += self.text
        exchange.reasoning += self.reasoning
        for name in _STATE:
            if name in self.state:
                setattr(exchange, name, self.state[name])


@dataclass(slots=True)
class RunningAnswerJournal:
    """An answer that runs. One thread adds to it while another writes."""

    exchange: Exchange
    """As it was saved when the run began; a copy that nobody changes."""
    events: list[TokenEvent] = field(default_factory=list)
    """What has come since; it only grows."""
    state: Mapping[str, Any] = field(default_factory=dict)
    waits: bool = False
    """The store knows that there is something to write."""

    def add(self, events: Iterable[TokenEvent], now: Exchange) -> bool:
        """The next tokens, and the exchange after them. Whether the store has to be told."""
        self.state = {name: getattr(now, name) for name in _STATE} | {"stats": dict(now.stats)}
        self.events += events  # before the next line: `since` looks at the two the other way round
        told, self.waits = self.waits, True
        return not told

    def since(self, count: int) -> JournalRecord | None:
        """What comes after the first `count` tokens of the answer; None when nothing does."""
        self.waits = False
        state = self.state
        events = self.events[count - len(self.exchange.token_ids) :]
        if not events:
            return None
        text, reasoning = (
            "".join(event.text for event in events if event.kind == kind) for kind in ("answer", "reasoning")
        )
        return JournalRecord([event.token_id for event in events], text, reasoning, state)
