"""The conversation as rows of the KV cache, which are computed in idle time."""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any, Literal

from engine.cache.offload import common_prefix
from engine.cache.rows import Rows
from engine.conversation.masked import hide_last, restore
from engine.conversation.prompt import PromptFormat
from engine.conversation.template_prompt import Rendering
from engine.conversation.thinking_visibility import Views
from engine.conversation.tools import ToolUse, has_calls, to_messages
from engine.conversation.turns import Turn
from engine.core import EngineCore, Follow
from engine.errors import EngineError
from engine.events import FinishReason
from engine.params import SamplingParams
from engine.schedule.output import Output
from engine.schedule.sequence import Owner, Priority, Sequence

ThinkCache = Literal["exact", "mask"]

_LONG_DRAFT = 5000
"""From this many characters on, fewer continuations of a draft are tried, because each one is tokenised."""


class History:
    """Makes rows of turns: what the chat template renders (`exact`), or what was generated with think spans hidden."""

    def __init__(
        self, engine: EngineCore, format: PromptFormat, system: str | None, policy: ThinkCache
    ) -> None:
        self._engine = engine
        self._format = format
        self.system = system
        self.policy = policy
        self.think: bool | None = None
        """The thinking setting: some templates write another system prompt for each."""
        self.tools: ToolUse | None = None
        """What the model knows of tools; None: nothing."""
        self._views = Views()

    def is_rendered(self, turns: Items[Turn], results: Items[str] = ()) -> bool:
        """Return whether a prompt is rendered as a whole, because there are tools or calls in it."""
        return self.tools is not None and (bool(self.tools.functions) or has_calls(turns, results))

    def prompt(
        self, turns: Items[Turn], text: str, think: bool | None, exact: bool = False, results: Items[str] = ()
    ) -> Rows:
        """Return the rows of the prompt that asks for an answer to `text`, or to the `results` of the last answer's
        calls. `exact`: use the `exact` policy, whatever is set."""
        return self._rendered(*self._messages(turns, text, results), think, exact)

    def typed(self, turns: Items[Turn], draft: str, think: bool | None) -> tuple[Rows, int]:
        """Return the rows of a prompt that further typing cannot change, and the row where its last message begins."""
        # The draft itself comes last, because a message's tokens are remembered until the next one.
        is_short = len(draft) < _LONG_DRAFT and not self.is_rendered(turns)
        typed_on = (" ", "a", "\n", ".", "") if is_short else ("a", "")
        tails = [self.prompt(turns, draft + more, think) for more in typed_on]
        last = tails[-1]
        return last.prefix(min(common_prefix(last.keys, rows.keys) for rows in tails)), last.message_start

    def rows(self, turns: Items[Turn]) -> Rows:
        """Return the rows with which the next prompt begins, whatever its message."""
        return self._before_next(turns) if turns or not self.is_rendered(turns) else self._beginning()

    def begun_with(self, system: str | None) -> Rows:
        """Return the rows with which every conversation with this system prompt begins."""
        other = History(self._engine, self._format, system, self.policy)
        other.tools, other.think = self.tools, self.think
        return other.rows([])

    def _beginning(self) -> Rows:
        """Return the rows that prompts with different first messages have in common."""
        one, other = (
            self._rendered(*self._messages([], text), self.think, exact=True) for text in ("a", "1")
        )
        return one.prefix(common_prefix(one.keys, other.keys))

    def hide_last(self, turns: Items[Turn]) -> None:
        """Hide what leaves the view after the latest turn, unless that requires computing earlier turns.

        If the answer may continue, its original rows stay in the cache as well. Raises EngineError if hiding fails.
        """
        if said := self._before_next(turns).said:
            hide_last(self._engine, said, keep_rows=not turns[-1].answer.is_complete)

    def _rendered(
        self,
        messages: Items[Mapping[str, Any]],
        answers: Mapping[int, Turn],
        think: bool | None,
        exact: bool = False,
        before_next: bool = False,
    ) -> Rows:
        functions = self.tools.functions if self.tools is not None else ()
        masks = self.policy == "mask" and not exact
        rendering = Rendering(self._format, think, functions, self._views, masks, self._engine.max_positions)
        return rendering.rows(messages, answers, before_next)

    def _messages(
        self, turns: Items[Turn], text: str | None = None, results: Items[str] = ()
    ) -> tuple[list[Mapping[str, Any]], dict[int, Turn]]:
        messages, answers = to_messages(self.system, turns, text, results, self.tools is not None)
        if not self.is_rendered(turns, results):
            return messages, answers
        fitted = self._format.with_system(messages)
        left_out = len(messages) - len(fitted)
        return fitted, {index - left_out: turn for index, turn in answers.items() if turn.answer.content_ids}

    def _before_next(self, turns: Items[Turn]) -> Rows:
        """Return the rows with which the prompt after these turns begins."""
        return self._rendered(*self._messages(turns), self.think, before_next=True)


@dataclass(slots=True)
class _IdleTask:
    """A piece of idle work, and the sequence that does it."""

    rows: Rows = field(default_factory=Rows)
    draft_start: int = 0
    """The first row of a draft; the rows from it on are forgotten unless the next draft uses them."""
    sequence: Sequence | None = None
    cancelled: bool = False
    asked: object = None
    """What the first token is drawn for, sampling included; None if rows are only warmed."""


class IdleWork:
    """Warms rows while no request waits. It does one thing at a time: new work cancels the previous work."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self._task = _IdleTask()
        self._reached = 0
        self._is_short = False
        """Whether the last answer was stopped during its prompt, when `_reached` rows were present."""
        self.pause = engine.new_pause()
        """The number of the current pause, which began when the last answer ended."""

    @property
    def present(self) -> int | None:
        """How many of the rows to be warmed are present; None: all, or a request waits for them."""
        sequence = self._task.sequence
        if sequence is None or self._task.cancelled:
            return self._reached if self._is_short else None
        short = (FinishReason.CANCELLED, FinishReason.CONTEXT_FULL)
        if sequence.finished.is_set() and sequence.error is None and sequence.finish_reason not in short:
            return None
        if sequence.admitted:  # until then the number of the draft before is shown
            self._reached = sequence.computed or sequence.reached
        return self._reached

    def warm(self, rows: Rows, wait: bool, draft_start: int | None = None) -> None:
        """Make `rows` present. Returns at once unless `wait` is set.

        The rows from `draft_start` on belong to a message that is being typed.
        """
        self.stop()
        engine = self._engine
        if not rows or len(rows) > engine.context_length:
            return
        task = self._begin(_IdleTask(rows, len(rows) if draft_start is None else draft_start))
        if rows.masked_until and engine.cached_rows(rows) < rows.masked_until:
            # Masked turns are restored one after the other, and a thread has to wait for each.
            thread = Thread(target=self._restore, args=(task, rows), name="restore", daemon=True)
            thread.start()
            if wait:
                thread.join()
            return
        sequence = Sequence(rows, Priority.IDLE, origin=self.pause)
        self._follow(task, sequence)
        engine.submit(sequence)
        if wait:
            sequence.finished.wait()

    def draw(self, asked: object, rows: Rows, params: SamplingParams, output: Output, wait: bool) -> None:
        """Make the prompt `rows` present and draw the first token of its answer, for `take` with the same `asked`.

        Returns at once unless `wait` is set. Only for prompts without masked turns.
        """
        task = self._task
        if task.asked == asked and not task.cancelled:
            if wait and task.sequence is not None:
                task.sequence.finished.wait()
            return
        self.stop()
        engine = self._engine
        if len(rows) + 1 >= engine.context_length or rows.next_position + 1 >= engine.max_positions:
            return
        sequence = Sequence(rows, Priority.IDLE, replace(params, max_tokens=1), output, origin=self.pause)
        self._begin(_IdleTask(rows, rows.message_start, sequence, asked=asked))
        engine.submit(sequence)
        if wait:
            sequence.finished.wait()

    def take(self, asked: object, follow: Follow) -> tuple[Sequence, int] | None:
        """Return the sequence that drew for `asked`, and the number of its rows that were still to be computed.

        Return None if there is none; idle work has then ended, as with `stop`.
        """
        task, sequence = self._task, self._task.sequence
        if sequence is None or task.cancelled or task.asked is None or task.asked != asked:
            self.stop()
            return None
        self._task = _IdleTask()
        is_done, is_admitted, computed = sequence.finished.is_set(), sequence.admitted, sequence.computed
        if not is_done:
            self._engine.promote(sequence)
        follow(sequence)
        sequence.finished.wait()
        left = 0 if is_done else sequence.prompt_tokens - (computed if is_admitted else sequence.hit.rows)
        if sequence.finish_reason is not FinishReason.LENGTH or sequence.error is not None:
            return None  # cancelled, or the answer ends with its first token: rare enough to start over
        return sequence, left

    def begin_pause(self, rows: int | None = None) -> None:
        """Begin a pause after an answer. `rows`: the rows present if it was stopped during its prompt; else None."""
        self.pause = self._engine.new_pause()
        self._is_short = rows is not None
        self._reached = rows or 0

    def stop(self) -> None:
        """End the work within one step. Returns at once."""
        task = self._task
        task.cancelled = True
        if task.sequence is not None:
            task.sequence.cancelled = True

    def _begin(self, task: _IdleTask) -> _IdleTask:
        """Make `task` the current work; forget the rows of the draft before that are not part of it."""
        before, self._task = self._task, task
        self._is_short = self._is_short and task.sequence is None
        if before.sequence is not None:
            self._engine.supersede(before.sequence, before.rows, before.draft_start, task.rows)
        self._engine.pin(task.rows)
        return task

    def _restore(self, task: _IdleTask, rows: Rows) -> None:
        def follow(sequence: Sequence) -> None:
            self._follow(task, sequence)

        with suppress(EngineError):  # the next message tries again and reports the error
            owner = Owner(follow, Priority.IDLE, self.pause)
            if restore(self._engine, rows, owner) and not task.cancelled:
                self._engine.warm_rows(rows, owner)

    def _follow(self, task: _IdleTask, sequence: Sequence) -> None:
        task.sequence = sequence
        self._is_short = False
        if task.cancelled:
            sequence.cancelled = True
