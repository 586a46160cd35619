"""An answer while it runs: what the backend yields becomes an exchange, which is saved as it grows."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

from chatterm.backends.backend import Exchange, FinishReason, Outcome, TurnStats
from chatterm.backends.worker import Token
from chatterm.conversation.figures import OF_ANSWER
from chatterm.conversation.session_tree import SessionTree


@dataclass(eq=False)
class AnswerInProgress:
    """A running answer."""

    saved: SessionTree
    """Where the exchange is saved, whatever is opened meanwhile."""
    exchange: Exchange
    _: KW_ONLY
    fallback: int | None = None
    """The head to go back to if no text arrives."""
    is_retry: bool = False
    is_resumed: bool = False
    """Whether it continues an existing answer."""
    is_candidate: bool = False
    """Whether it is one of several simultaneous answers."""
    before: Outcome | None = field(default=None, init=False)
    """The answer without the tokens of this run, once they come."""
    problem: str = field(default="", init=False)
    """The error that ended it, in a line."""
    count: int = field(default=0, init=False)
    """The tokens of this run."""

    def __post_init__(self) -> None:
        self._stats_before = dict(self.exchange.stats)
        self._reasoning_tokens = int(self._stats_before.get("reasoning_tokens", 0))

    @property
    def has_begun(self) -> bool:
        return self.count > 0

    def begin(self, before: Outcome) -> None:
        """Note that the first token is there, and save the text that it follows: `before`, which is empty for a new
        answer.
        """
        self.before = before
        self.exchange.take(before)
        self._count(before)
        self.saved.save(self.exchange)

    def take(self, tokens: Sequence[Token], latest: Outcome | None) -> None:
        """Add and save tokens that have arrived, oldest first; `latest` has the figures, maybe of some more tokens."""
        events = [token.event for token in tokens]
        self.count += len(events)
        self._reasoning_tokens += sum(event.kind == "reasoning" for event in events)
        exchange = self.exchange
        exchange.add(events)
        if latest is not None:
            self._count(latest)
            exchange.stats["generated_tokens"] = self._stats_before.get("generated_tokens", 0) + self.count
            exchange.stats["reasoning_tokens"] = self._reasoning_tokens
            exchange.ends_at = latest.ends_at
        self.saved.say(exchange, events)

    def finish(self, outcome: Outcome | None) -> None:
        """Finish the exchange; None: what the backend has of it is unknown."""
        exchange = self.exchange
        if outcome is None:
            exchange.token_ids, exchange.shown = [], (0, 0)  # the known ones may belong to less text
        else:
            exchange.take(outcome)
            self._count(outcome)
        if exchange.finish_reason is None:
            exchange.finish_reason = str(FinishReason.CANCELLED)

    def _count(self, latest: Outcome) -> None:
        """Set the figures of the exchange; `latest` has those of its latest run."""
        exchange = self.exchange
        if self.is_resumed and self.problem and not self.has_begun:
            exchange.stats = dict(self._stats_before)  # it was refused: nothing is new
            return
        exchange.stats = dict(latest.stats.to_dict())
        if self.is_resumed and (before := self._stats_before):
            # Figures of the answer add up over all runs; those of the prompt are from the first.
            earlier = TurnStats.of(before).to_dict()
            added = {name: earlier[name] + exchange.stats[name] for name in OF_ANSWER}
            exchange.stats = {**before, **added}
            exchange.stats.pop("decode_tokens_per_s", None)
