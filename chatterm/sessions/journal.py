"""The journal: the tokens of a running answer, on the disk within a moment.

When an answer begins (or continues), its exchange is saved as it is then, with the seed of its random numbers. From
then on every batch of tokens is appended to the table `journal` as one record, in a transaction of its own; the end of
the answer saves the exchange whole and deletes its records. An answer without an end was cut off; its text is that of
its exchange and its records together. The seed and the number of tokens are the whole state of sampling, so
`Chat.resume` can continue from there.

A token is *committed* once the transaction with its record is: then it survives the end of this process, however that
happens. SQLite's write-ahead log ensures this: it is append-only, each of its frames has a checksum, and a torn last
transaction is recognised and dropped. The log is synced to the disk only every half second (`fallback_database.py`): a
power failure may lose that much.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from chatterm.backends.backend import Exchange, TokenEvent

_STATE = ("stats", "thinking_s", "ends_at")
"""Fields of an exchange that change with every token."""


@dataclass(slots=True)
class JournalRecord:
    """One record: some tokens of an answer, their text, and the state after them."""

    ids: list[int]
    text: str
    reasoning: str
    state: Mapping[str, Any]

    def add_to(self, exchange: Exchange, at: int) -> None:
        """Append this record to `exchange` if `at`, the index of its first token, is where the exchange ends."""
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
    """The journal of a running answer. One thread adds to it while another writes."""

    exchange: Exchange
    """The exchange as saved when the run began; a copy that is never changed."""
    events: list[TokenEvent] = field(default_factory=list)
    """The events since then; the list only grows."""
    state: Mapping[str, Any] = field(default_factory=dict)
    waits: bool = False
    """Whether the store knows that there is something to write."""

    def add(self, events: Iterable[TokenEvent], now: Exchange) -> bool:
        """Add the next tokens, with the exchange after them; return whether the store must be told."""
        self.state = {name: getattr(now, name) for name in _STATE} | {"stats": dict(now.stats)}
        self.events += events  # before `waits` is set: `since` uses the two in the opposite order
        told, self.waits = self.waits, True
        return not told

    def since(self, count: int) -> JournalRecord | None:
        """Return a record of what follows the first `count` tokens of the answer; None if nothing does."""
        self.waits = False
        state = self.state
        events = self.events[count - len(self.exchange.token_ids) :]
        if not events:
            return None
        text, reasoning = (
            "".join(event.text for event in events if event.kind == kind) for kind in ("answer", "reasoning")
        )
        return JournalRecord([event.token_id for event in events], text, reasoning, state)
