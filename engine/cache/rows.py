"""The rows of a sequence: the token of each, its position, and what was in view when it was computed.

Usually row i is token i at position i, and its key in the prefix index is the token id. The `mask` policy takes a
think span out of the table, so the rows after it keep later positions, and marks show where it was:

    stream     p0 p1 <t> r0 </t> a0 a1 | u0         (the answer a0 a1 was computed with the think span in view,
    rows       p0 p1             a0 a1   u0          the next turn u0 is computed without it)
    positions   0  1              5  6    7
    keys       p0 p1       (a0, think) a1 (u0, ())

With the two marks, the keys say as much as the whole stream and its mask. So a prompt without marks, which is what
the `exact` policy sends, never matches such rows. If several spans leave the view at once (those of all calls that
lead to an answer), each is marked where it was, and the mark at the end closes all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.cache.block import Key

Span = tuple[int, int]
"""The first row of a span, and the row after its last."""


@dataclass(frozen=True, slots=True)
class AnswerRows:
    """An answer as it was generated, and the tokens before it."""

    before: Sequence[int]
    """The tokens since the previous answer."""
    thought: Sequence[int]
    """The tokens generated before `ids`, which leave the view in the end."""
    ids: Sequence[int]
    leaves: bool
    """Whether nothing after this answer sees its thinking or that of the answers before it."""


@dataclass(slots=True)
class Rows:
    """Parallel lists with one entry per row."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    next_position: int = 0
    mark: tuple[int, ...] | None = None
    """The mark for the key of the next row: the tokens hidden right before it."""
    edges: list[int] = field(default_factory=list, compare=False)
    """Where the parts of a prompt end: the first message with the template's text around it, the answer to it, the
    next message, ..."""
    masked_until: int = 0
    """Rows before this one belong to turns with a hidden think span, so prefill cannot compute them again."""
    said: Sequence[AnswerRows] = field(default=(), compare=False)
    """The answers from which the masked rows were made, so that they can be made again."""

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> "Rows":
        """Return the rows of a plain prompt, with nothing hidden."""
        rows = cls()
        rows.extend(token_ids)
        return rows

    def __len__(self) -> int:
        return len(self.token_ids)

    def append(self, token_id: int) -> None:
        """Add a token that everything after it sees."""
        self.token_ids.append(token_id)
        self.positions.append(self.next_position)
        self.keys.append(token_id if self.mark is None else (token_id, self.mark))
        self.next_position += 1
        self.mark = None

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens that everything after them sees."""
        if not token_ids:
            return
        self.append(token_ids[0])  # the first token gets the mark
        rest = token_ids[1:]
        self.token_ids += rest
        self.keys += rest
        self.positions += range(self.next_position, self.next_position + len(rest))
        self.next_position += len(rest)

    def rewind(self, count: int) -> list[int]:
        """Remove the rows that `append` added after the first `count`. Return their tokens."""
        taken = self.token_ids[count:]
        if taken:
            key = self.keys[count]
            self.mark = key[1] if isinstance(key, tuple) else None
            self.next_position = self.positions[count]
            del self.token_ids[count:], self.positions[count:], self.keys[count:]
        return taken

    @property
    def message_start(self) -> int:
        """The row at which the last message of a prompt begins, including the template's text before it."""
        return self.edges[-1] if self.edges else 0

    def copy(self) -> "Rows":
        """Return a copy that can grow independently."""
        return Rows(
            self.token_ids.copy(),
            self.positions.copy(),
            self.keys.copy(),
            self.next_position,
            self.mark,
            self.edges.copy(),
            self.masked_until,
            self.said,
        )

    def prefix(self, count: int) -> "Rows":
        """Return the first `count` rows, to be warmed; the result is not meant to grow."""
        return Rows(
            self.token_ids[:count],
            self.positions[:count],
            self.keys[:count],
            edges=[edge for edge in self.edges if edge <= count],
            masked_until=self.masked_until,
            said=self.said,
        )

    def hide(self, spans: Sequence[Span]) -> "Rows":
        """Return these rows as later turns see them: without those in `spans`, which must be in order.

        Raises ValueError if there is no valid span, or if a span reaches into rows that are already masked.
        """
        count = len(self)
        bounds = [bound for span in spans for bound in span]
        if not bounds or bounds[0] <= 0 or bounds[-1] > count or sorted(set(bounds)) != bounds:
            raise ValueError(f"{[*spans]} are no spans within {count} rows")
        first = bounds[0]
        if self.masked_until > first:
            raise ValueError("the span reaches into an earlier masked turn")
        hidden = Rows(self.token_ids[:first], self.positions[:first], self.keys[:first])
        for (start, end), stop in zip(spans, [*bounds[2::2], count], strict=True):
            hidden.mark = tuple(self.token_ids[start:end])
            hidden.next_position = self.positions[end] if end < count else self.next_position
            hidden.extend(self.token_ids[end:stop])
        start, end = spans[-1]
        # Without an answer, no row saw the span; there is only a gap in the positions.
        hidden.mark = () if end < count else (start - end,)
        hidden.masked_until = len(hidden)
        return hidden
