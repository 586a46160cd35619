"""Why no more of a prompt was reused: where and why it diverges from what the cache held."""

from bisect import bisect_right
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from engine.cache.block import Key
from engine.cache.prefix_hit import PrefixHit
from engine.cache.rows import Rows
from engine.conversation.turns import Turn
from engine.events import Cause, Parting, TurnStats


@dataclass(frozen=True, slots=True)
class Question:
    """The parts of which a prompt was made."""

    before: tuple[Turn, ...]
    text: str
    system: str | None = None
    policy: str = "exact"
    draft: str = ""
    """The part of `text` that had been typed when it was last warmed; "" if it never was."""

    @property
    def users(self) -> list[str]:
        """Every user message."""
        return [*(turn.user for turn in self.before), self.text]


class Explainer:
    """Compares the prompts of a chat, one after the other, with what the cache held of them."""

    def __init__(self) -> None:
        self._previous: Question | None = None
        self._known: set[int] = set()
        """Hashes of the turns in earlier prompts, whose rows have been computed."""

    def add(self, turns: Items[Turn]) -> None:
        """Note that the rows of these turns have been computed."""
        self._known.update(map(_hash, turns))

    def explain(self, stats: TurnStats, question: Question, rows: Rows, hit: PrefixHit) -> TurnStats:
        """Return `stats` of an answer with the reasons added. `rows` are those of the prompt, and possibly more."""
        keys = rows.keys[: stats.prompt_tokens]
        explained = replace(
            stats,
            parting=self._history(question, keys, rows.edges, bool(rows.masked_until), hit),
            draft_parting=_draft(question, keys, hit),
        )
        self._previous = question
        self.add(question.before)
        return explained

    def _history(
        self, question: Question, keys: Items[Key], edges: Items[int], masked: bool, hit: PrefixHit
    ) -> Parting | None:
        row, held = hit.reused, hit.beside
        if row >= len(keys) - 1:  # the last row is computed for every answer
            return None
        place = bisect_right(edges, row)
        message, in_answer = divmod(place, 2)
        start = edges[place - 1] if place else 0
        cached = _token(held)
        if hit.known > hit.rows:
            return Parting(row, message + 1, bool(in_answer), -1, _token(keys[row]), Cause.STATE)
        if not in_answer:
            cause = self._in_message(question, message, row == start, held)
        elif held is None and row == edges[-1] - 1 and _ends_uncomputed(question.before[message], masked):
            cause = None
        else:
            cause, cached = self._in_answer(question, message, row - start, keys[row], held, masked)
        if cause is None:
            return None
        wanted = _token(keys[row])
        cached = cached if cached != wanted else -1  # the same token, computed with other rows in view
        if cause is Cause.SYSTEM:
            return Parting(row, 0, False, cached, wanted, cause)
        if cause is Cause.TRIMMED:  # the row is the template's, but belongs to the answer before it
            return Parting(row, message, True, cached, wanted, cause)
        return Parting(row, message + 1, bool(in_answer), cached, wanted, cause)

    def _in_answer(
        self, question: Question, message: int, offset: int, wanted: Key, held: Key | None, masked: bool
    ) -> tuple[Cause, int]:
        """Return the cause for a row of the answer to a message, and the token that the cache held."""
        turn = question.before[message]
        if _hash(turn) not in self._known:
            return Cause.OPENED, _token(held)
        if self._is_switched(question):
            return Cause.POLICY, _token(held)
        said = [*turn.opening, *turn.answer.token_ids]
        thought = len(turn.opening) + turn.answer.shown[0]
        if not masked and offset < thought and said[offset] != wanted:
            return Cause.THINKING, said[offset]
        return (Cause.BRANCH if held is not None else Cause.EVICTED), _token(held)

    def _in_message(self, question: Question, message: int, at_start: bool, held: Key | None) -> Cause | None:
        """Return the cause for a row of a message, or of the template's text around it."""
        previous, users = self._previous, question.users
        is_new = message == len(question.before)
        if held is not None and previous is not None:
            if message == 0 and previous.system != question.system:
                return Cause.SYSTEM
            if at_start and message and held in _unseen(question.before[message - 1]):
                return Cause.TRIMMED
            pairs = enumerate(zip(previous.users, users, strict=False))
            if message == next((index for index, (before, now) in pairs if before != now), None):
                return Cause.EDITED
        if is_new:
            return None  # the message had never been sent
        if _hash(question.before[message]) not in self._known:
            return Cause.OPENED
        if self._is_switched(question):
            return Cause.POLICY
        return Cause.BRANCH if held is not None else Cause.EVICTED

    def _is_switched(self, question: Question) -> bool:
        return self._previous is not None and self._previous.policy != question.policy


def _ends_uncomputed(turn: Turn, masked: bool) -> bool:
    """Return whether the history shows an answer's very last token, whose row only the next prompt computes."""
    return masked or turn.answer.shown[1] == len(turn.answer.token_ids)


def _unseen(turn: Turn) -> list[int]:
    """Return the token generated right after the shown part of an answer, in a list; empty if there is none."""
    end = turn.answer.shown[1]
    return turn.answer.token_ids[end : end + 1]


def _draft(question: Question, keys: Items[Key], hit: PrefixHit) -> Parting | None:
    changed = question.draft and not question.text.startswith(question.draft)
    if not changed or hit.beside_warm is None or hit.rows >= len(keys):
        return None
    message = len(question.before) + 1
    cached, wanted = _token(hit.beside_warm), _token(keys[hit.rows])
    return Parting(hit.rows, message, False, cached, wanted, Cause.DRAFT)


def _token(key: Key | None) -> int:
    """Return the token of a key (see `engine/cache/rows.py`); -1 for none."""
    token = key[0] if isinstance(key, tuple) else key
    return token if isinstance(token, int) else -1


def _hash(turn: Turn) -> int:
    return hash((turn.user, tuple(turn.answer.token_ids)))
