"""Conversations: turns, and what the next prompt is."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from threading import Thread
from typing import TYPE_CHECKING, Literal

from engine.blocks import OutOfBlocksError
from engine.errors import ContextFullError, EngineError
from engine.events import FinishReason, Kind, TokenEvent, TurnStats
from engine.params import SamplingParams
from engine.prompt import PromptFormat
from engine.rows import Rows
from engine.scheduler import MaskedRowsEvictedError
from engine.sequence import Priority, Sequence

if TYPE_CHECKING:
    from engine.engine import Engine

Think = Literal["auto", "on", "off"]
ThinkCache = Literal["exact", "mask"]


@dataclass(slots=True)
class Answer:
    """One answer, whole or as far as it has come (`finish_reason` is None while it runs)."""

    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Every token sampled, markers and end of turn included."""
    finish_reason: FinishReason | None = None
    stats: TurnStats = field(default_factory=TurnStats)
    shown: tuple[int, int] = (0, 0)
    """Which of `token_ids` the history shows: not the thinking, not the end of turn."""

    def add(self, text: str, kind: Kind) -> None:
        """One more piece of text."""
        if kind == "reasoning":
            self.reasoning += text
        else:
            self.text += text

    @property
    def content_ids(self) -> list[int]:
        """The sampled tokens that are part of the history."""
        return self.token_ids[self.shown[0] : self.shown[1]]


@dataclass(slots=True)
class Turn:
    """A message and its answer."""

    user: str
    answer: Answer
    opening: list[int]
    """What the generation prompt put before the answer and the history leaves out (an empty think span)."""


class Chat:
    """A conversation with an engine. One answer at a time; `stop` may be called from any thread.

    The history is always what the chat template renders (`exact`), or what was generated with the think spans
    masked out (`mask`): see `engine/rows.py`.
    """

    def __init__(
        self,
        engine: "Engine",
        system: str | None = None,
        think: Think = "auto",
        think_cache: ThinkCache = "exact",
    ) -> None:
        """Raises EngineError when the model has no chat template or an argument is none of its values."""
        if think_cache not in ("exact", "mask"):
            raise EngineError(f"think_cache is {think_cache!r}; it must be exact or mask.")
        self._engine = engine
        self._format = PromptFormat(engine.tokenizer)
        self.thinks = self._format.thinks()
        self.system = system
        self.think = think
        self.think_cache: ThinkCache = think_cache
        self.turns: list[Turn] = []
        self._running: Sequence | None = None
        self._stopped = False
        self._idle: Sequence | None = None

    @property
    def last(self) -> Answer | None:
        """The latest answer, also while it runs; None before the first."""
        return self.turns[-1].answer if self.turns else None

    @property
    def think(self) -> Think:
        """Whether to think; the next answer obeys. Setting it raises EngineError for any other value."""
        return self._think

    @think.setter
    def think(self, think: Think) -> None:
        if think not in ("auto", "on", "off"):
            raise EngineError(f"think is {think!r}; it must be auto, on or off.")
        self._think: Think = think

    @property
    def used_tokens(self) -> int:
        """Tokens of the context that the history takes."""
        return len(self._history(self.turns)) if self.turns or self.system else 0

    # -- the conversation

    def send(self, text: str, params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Ask, and yield the answer's tokens. Closing the generator cancels; what was produced is kept.

        On the first `next()`: ContextFullError when the prompt does not fit, EngineError for an empty message,
        ModelError when the template fails. The conversation is then as it was.
        """
        self._stopped = False  # what is stopped from now on is this answer
        return self._send(text, params)

    def retry(self, params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Answer the last message once more; the earlier answer is replaced. Raises as `send` does."""
        self._stopped = False
        return self._retry(params)

    def stop(self) -> None:
        """End the answer that was asked for last within one step; what was produced is kept."""
        self._stopped = True
        running = self._running
        if running is not None:
            self._engine.cancel(running)

    def undo(self) -> bool:
        """Drop the last message and its answer. False when there is none."""
        if not self.turns:
            return False
        self.turns = self.turns[:-1]
        return True

    def reset(self) -> None:
        """Forget every turn; the system prompt and the settings stay."""
        self._stop_idle()
        self.turns = []

    # -- idle work

    def settle(self, wait: bool = False) -> None:
        """Warm the history as the next turn will see it, in idle time. Returns at once unless told to `wait`."""
        self._warm_idle(self._history(self.turns), wait)

    def prepare(self, draft: str, wait: bool = False) -> None:
        """Warm a message that is still being typed, up to the last token that typing on cannot change."""
        if not draft.strip():
            return self.settle(wait)
        tails = [self._prompt(self.turns, draft + more) for more in ("", " ", "a", "\n", ".")]
        together = zip(*(rows.keys for rows in tails), strict=False)
        same = sum(1 for _ in takewhile(lambda keys: len(set(keys)) == 1, together))
        return self._warm_idle(tails[0].prefix(same), wait)

    # -- how it is done

    def _send(self, text: str, params: SamplingParams | None) -> Iterator[TokenEvent]:
        if not text.strip():
            raise EngineError("The message is empty; write something first.")
        yield from self._answer(self.turns, text, params)

    def _retry(self, params: SamplingParams | None) -> Iterator[TokenEvent]:
        if not self.turns:
            raise EngineError("There is no message to answer again; send one first.")
        yield from self._answer(self.turns[:-1], self.turns[-1].user, params)

    def _follow(self, sequence: Sequence) -> None:
        """From now on `stop` ends this sequence; if it was called already, it ends at once."""
        self._running = sequence
        if self._stopped:
            self._engine.cancel(sequence)

    def _answer(self, before: list[Turn], text: str, params: SamplingParams | None) -> Iterator[TokenEvent]:
        self._stop_idle()
        for exact in (False, False, True):
            sequence, turn = self._start(before, text, params or self._engine.default_params(), exact)
            try:
                return (yield from self._run(before, turn, sequence))
            except MaskedRowsEvictedError:
                if turn.answer.token_ids:
                    raise EngineError(
                        "The history left the KV cache in mid-answer; send a message to go on."
                    ) from None
        raise EngineError("The history could not be brought back into the KV cache; use /reset.")

    def _start(
        self, before: list[Turn], text: str, params: SamplingParams, exact: bool
    ) -> tuple[Sequence, Turn]:
        """Queue the prompt; rows of masked turns that were evicted are computed again first."""
        rows = self._prompt(before, text, exact)
        if rows.masked_until and not self._restore(before, self._follow):
            rows = self._prompt(before, text, exact=True)
        needed, available = len(rows) + 1, self._engine.context_length
        if needed > available:
            raise ContextFullError(
                f"This message does not fit: it would make the conversation {needed:,} tokens long, "
                f"{needed - available:,} more than the {available:,} of the context. "
                "Shorten it, drop turns with /undo or /reset, or start with a larger --context.",
                needed=needed,
                available=available,
            )
        sequence = self._engine.start(rows, params, inside_think=self._format.inside(self._thinking))
        return sequence, Turn(text, Answer(), self._format.opening(self._thinking))

    def _run(self, before: list[Turn], turn: Turn, sequence: Sequence) -> Iterator[TokenEvent]:
        answer = turn.answer
        self._follow(sequence)
        try:
            for event in self._engine.events(sequence):
                if not answer.token_ids:
                    self.turns = [*before, turn]
                answer.token_ids.append(event.token_id)
                answer.add(event.text, event.kind)
                answer.stats = sequence.stats()
                yield event
        finally:
            self._engine.cancel(sequence)
            if self._engine.on_loop_thread:  # collected as garbage there, where nobody may wait
                Thread(target=self._finish, args=(before, turn, sequence), name="finish").start()
            else:
                self._finish(before, turn, sequence)

    def _finish(self, before: list[Turn], turn: Turn, sequence: Sequence) -> None:
        self._engine.wait(sequence)
        self._running = None
        if not sequence.generated and (sequence.error is not None or len(self.turns) > len(before)):
            return  # nothing was said: a retry that was stopped so early leaves the earlier answer
        answer = turn.answer
        while not sequence.events.empty():  # what was produced but not taken any more
            if (event := sequence.events.get()) is not None:
                answer.add(event.text, event.kind)
        if sequence.output is not None:
            answer.add(sequence.tail, sequence.output.kind)
        answer.token_ids = list(sequence.generated)
        answer.finish_reason = sequence.finish_reason or FinishReason.CANCELLED
        answer.stats = sequence.stats()
        span = sequence.output.thinking.span if sequence.output else None
        start = span[1] if span else 0
        first, end = self._format.answer_span(answer.token_ids[start:], answer.text)
        answer.shown = (start + first, start + end)
        self.turns = [*before, turn]
        if self.think_cache == "mask":
            with suppress(EngineError):  # the answer is there; the next turn tries again
                self._hide_last()

    @property
    def _thinking(self) -> bool | None:
        return {"auto": None, "on": True, "off": False}[self.think]

    def _segments(self, turns: list[Turn], text: str | None) -> list[list[int]]:
        users = [turn.user for turn in turns]
        if text is None:
            return self._format.segments(self.system, users, generate=False)
        return self._format.segments(self.system, [*users, text], generate=True, think=self._thinking)

    def _prompt(self, turns: list[Turn], text: str, exact: bool = False) -> Rows:
        """The rows of the prompt that asks for an answer to `text`."""
        return self._rows(turns, self._segments(turns, text), exact)

    def _history(self, turns: list[Turn]) -> Rows:
        """The rows that the next prompt begins with, whatever is asked."""
        return self._rows(turns, self._segments(turns, None), False)

    def _rows(self, turns: list[Turn], segments: list[list[int]], exact: bool) -> Rows:
        if self.think_cache == "mask" and not exact:
            rows = self._masked(turns, segments)
            rows.extend(_after(rows, segments[-1]))
            if rows.next_position < self._engine.max_positions:
                return rows
        rows = Rows()
        for turn, segment in zip(turns, segments, strict=False):
            rows.extend(segment)
            rows.extend(turn.answer.content_ids)
        rows.extend(segments[-1])
        return rows

    def _masked(self, turns: list[Turn], segments: list[list[int]]) -> Rows:
        """The rows of `turns` with every think span hidden."""
        rows = Rows()
        for turn, segment in zip(turns, segments, strict=False):
            rows, start, end = _spoken(rows, turn, segment)
            rows = rows.hide(start, end) if end > start else rows
        return rows

    def _restore(self, turns: list[Turn], follow: Callable[[Sequence], None] | None = None) -> bool:
        """Make the rows of masked turns present, computing again what was evicted. False when that fails."""
        segments = self._segments(turns, None)
        masked = self._masked(turns, segments)
        if self._engine.cached_rows(masked) >= masked.masked_until:
            return True
        rows: Rows | None = Rows()
        for turn, segment in zip(turns, segments, strict=False):
            rows = self._hide(rows, turn, segment, follow) if rows is not None else None
        return rows is not None

    def _hide_last(self) -> None:
        """Hide the think span of the latest turn, unless turns before it would have to be computed for that."""
        *before, turn = self.turns
        segments = self._segments(self.turns, None)
        rows = self._masked(before, segments)
        if self._engine.cached_rows(rows) >= rows.masked_until:
            self._hide(rows, turn, segments[len(before)])

    def _hide(
        self, before: Rows, turn: Turn, segment: list[int], follow: Callable[[Sequence], None] | None = None
    ) -> Rows | None:
        """The rows up to and with `turn`, its think span hidden and present if it has one. None when that fails."""
        rows, start, end = _spoken(before, turn, segment)
        if start == end:
            return rows
        engine = self._engine
        if len(rows) > engine.context_length or rows.next_position >= engine.max_positions:
            return None
        try:
            return engine.hide(rows, start, end, follow)
        except (OutOfBlocksError, MaskedRowsEvictedError):
            return None

    def _warm_idle(self, rows: Rows, wait: bool) -> None:
        self._stop_idle()
        if not rows or len(rows) > self._engine.context_length:
            return
        self._idle = Sequence(rows, Priority.IDLE)
        self._engine.submit(self._idle)
        if wait:
            self._engine.wait(self._idle)

    def _stop_idle(self) -> None:
        idle, self._idle = self._idle, None
        if idle is not None:
            self._engine.cancel(idle)


def _spoken(before: Rows, turn: Turn, segment: list[int]) -> tuple[Rows, int, int]:
    """The rows of a turn as it was generated after `before`, and where the think span lies in them."""
    answer = turn.answer
    rows = before.copy()
    rows.extend(_after(before, segment))
    start = len(rows)
    rows.extend(turn.opening)
    end = len(rows) + answer.shown[0]
    ended = answer.finish_reason is FinishReason.EOS
    rows.extend(answer.token_ids if ended else answer.token_ids[: answer.shown[1]])
    return rows, start, end


def _after(rows: Rows, segment: list[int]) -> list[int]:
    """`segment` without the end of turn that it begins with, where the model has already written it."""
    if rows.token_ids and segment and rows.token_ids[-1] == segment[0]:
        return segment[1:]
    return segment
