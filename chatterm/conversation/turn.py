"""A message and its answer on a screen while that runs: the worker's reports become an entry and figures."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from chatterm.backends.backend import (
    Backend,
    Exchange,
    Figures,
    FinishReason,
    Outcome,
    TurnStats,
    reading_text,
)
from chatterm.backends.worker import Token
from chatterm.conversation.answer_in_progress import AnswerInProgress
from chatterm.conversation.ending import describe_ending
from chatterm.conversation.entries import AnswerEntry, UserEntry
from chatterm.conversation.figures import Live, Speedometer, decode_rate, has_gained, rate_text, seconds_text
from chatterm.markdown.lines import Line
from models.units import counted

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


@dataclass(eq=False)
class RunningTurn(AnswerInProgress):
    """A running answer on a screen. Times are by `time.monotonic()`."""

    prompt: UserEntry
    answer: AnswerEntry
    started: float
    is_stopping: bool = field(default=False, init=False)
    is_dropped: bool = field(default=False, init=False)
    """Whether it was taken off the screen while it ran."""
    is_undone: bool = field(default=False, init=False)
    """Whether to undo this turn once it stops."""
    doing: str = field(default="reading", init=False)
    """What it does before its first token, in a few words."""
    stats: TurnStats | None = field(default=None, init=False)
    """The backend's figures, once the answer is over."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.speed = Speedometer()
        self._thought_s = self.answer.thinking_s
        self._thinking_since: float | None = None
        self._called = 0
        """Characters of calls so far."""
        self._is_calling = False

    @property
    def phase(self) -> str:
        if not self.has_begun:
            return "reading"
        return "thinking" if self.answer.is_thinking else "answering"

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first token, as the user saw them."""
        return None if self.speed.first is None else self.speed.first - self.started

    def begin(self, before: Outcome) -> None:
        """Show the text that the first token follows: half a character or a stop string shown at its end may turn out
        differently now.
        """
        if before.reasoning != self.exchange.reasoning:
            self.answer.settle_thinking(before.reasoning)
        self.answer.settle_text(before.text)
        super().begin(before)

    def take(self, tokens: Sequence[Token], latest: Outcome | None) -> None:
        """Show tokens that have arrived, too."""
        answer = self.answer
        pieces: list[tuple[tuple[bool, bool], list[str]]] = []
        for token in tokens:
            self.speed.add(token.time)
            reasoning = token.event.kind == "reasoning"
            if reasoning:
                answer.thinking_tokens += 1
                answer.is_thinking = True
                self._thinking_since = self._thinking_since or token.time
            elif answer.is_thinking:
                self._end_thinking(token.time)
            self._is_calling = token.event.kind == "call"
            if self._is_calling:
                self._called += len(token.event.text)
                continue
            if not pieces or pieces[-1][0] != (reasoning, token.event.guessed):
                pieces.append(((reasoning, token.event.guessed), []))
            pieces[-1][1].append(token.event.text)
        for (reasoning, guessed), texts in pieces:
            answer.add("".join(texts), reasoning=reasoning, guessed=guessed)
        self.exchange.thinking_s = answer.thinking_s
        super().take(tokens, latest)

    def tick(self, now: float, figures: Figures | None, waiting: str = "") -> bool:
        """Update the clock and the progress; return whether anything changed. `waiting` is as in Backend."""
        answer = self.answer
        self.doing = waiting or reading_text(figures)
        if answer.is_thinking and self._thinking_since is not None:
            answer.thinking_s = self._thought_s + now - self._thinking_since
            answer.activity = ""
        elif answer.body.is_empty or self._is_calling or (self.is_resumed and not self.has_begun):
            what = "stopping" if self.is_stopping else "reading" if not self.has_begun else "writing"
            if what == "writing" and self._is_calling:
                what = f"calling a tool · {self._called:,} characters"
            if what == "reading" and waiting:
                what = waiting
            elif what == "reading" and figures is not None and figures.prefill_total:
                what += f" · {figures.prefill_done:,} of {counted(figures.prefill_total, 'token')}"
            activity = f"{SPINNER[int((now - self.started) * 10) % len(SPINNER)]} {what}"
            if activity == answer.activity:
                return False
            answer.activity = activity
        elif answer.activity:
            answer.activity = ""
        else:
            return False
        answer.changed()
        return True

    def end(self, outcome: Outcome | None, now: float) -> None:
        """Finish the answer, and show its figures and why it ended."""
        answer, exchange = self.answer, self.exchange
        answer.source = ["".join(answer.source)]  # thousands of short strings take ten times as much memory
        if answer.is_thinking:
            self._end_thinking(now)
        exchange.thinking_s = answer.thinking_s
        self.finish(outcome)
        if outcome is not None:
            answer.settle_text(outcome.text)
        answer.settle()
        silent = answer.body.is_empty and not answer.has_thought and not exchange.calls
        answer.activity = "The model gave no text." if silent and outcome is not None else ""
        self.stats = outcome.stats if outcome is not None else None
        unfinished = (
            FinishReason.CANCELLED if self.has_begun else None
        )  # an error, which is reported elsewhere
        reason = outcome.finish_reason if outcome is not None else unfinished
        if reason == FinishReason.CANCELLED and not self.has_begun:
            answer.activity = ""
        answer.footer = footer_line(exchange_stats(exchange) if self.stats is not None else None)
        answer.ending = describe_ending(reason)
        if exchange.calls and reason in (FinishReason.EOS, FinishReason.STOP):
            answer.footer = []  # the figures are shown below the answer after the calls
        answer.changed()

    def _end_thinking(self, now: float) -> None:
        if self._thinking_since is not None:
            self.answer.thinking_s = self._thought_s + now - self._thinking_since
        self.answer.is_thinking = False


def live_figures(
    idle: Live,
    backend: Backend,
    running: RunningTurn | None,
    ended: RunningTurn | None,
    saved: TurnStats | None,
    now: float,
) -> Live:
    """Return `idle` with the figures of the running turn, otherwise of the current answer: those of the turn that
    `ended` with it, or only those `saved` with it.
    """
    turn = running or ended
    common = replace(
        idle,
        used=backend.used_tokens,
        context=idle.info.context_length if idle.info else 0,
        figures=backend.figures(),
    )
    if turn is None:
        return _with_saved(common, saved) if saved is not None else common
    latest = (
        (running.before if running.is_candidate else backend.last) if running and running.has_begun else None
    )
    over = (
        exchange_stats(turn.exchange) if turn.stats is not None else None
    )  # of all its runs, as below the answer
    stats = latest.stats if latest is not None else over
    count = turn.speed.count
    average = decode_rate(over) if over is not None else turn.speed.average
    if stats is not None:
        common = _with_counts(common, stats)
    return replace(
        common,
        phase=idle.phase if running is None else running.phase,
        speed=average if running is None else turn.speed.now(now),
        average=average,
        history=turn.speed.history(),
        ttft_s=(stats.ttft_s if stats is not None else 0.0) or turn.ttft_s,
        waited_s=0.0 if running is None or running.has_begun else round(now - running.started, 1),
        generated=count if running is not None or stats is None else stats.generated_tokens,
        prefill_rate=(stats.prefill_tokens_per_s or None)
        if stats is not None and stats.split_tokens
        else None,
        used=max(common.used, stats.prompt_tokens + count)
        if running and stats is not None and stats.prompt_tokens
        else common.used,
    )


def _with_saved(live: Live, stats: TurnStats) -> Live:
    """Return `live` with the figures that were saved with an answer."""
    return replace(
        _with_counts(live, stats),
        speed=decode_rate(stats),
        average=decode_rate(stats),
        ttft_s=stats.ttft_s or None,
        is_saved=True,
    )


def _with_counts(live: Live, stats: TurnStats) -> Live:
    """Return `live` with the numbers of tokens of an answer."""
    is_known = stats.split_tokens > 0
    guesses = stats if has_gained(stats) else TurnStats()
    return replace(
        live,
        cached=stats.cached_tokens if is_known else None,
        computed=stats.prefilled_tokens if is_known else None,
        generated=stats.generated_tokens,
        guessed=guesses.guessed_tokens,
        accepted=guesses.accepted_tokens,
        drafted=guesses.drafted_tokens,
        accepted_drafts=guesses.accepted_drafts,
    )


def finished_answer_entry(exchange: Exchange, *, show_thinking: bool | None) -> AnswerEntry:
    """Make the entry of a finished answer."""
    entry = AnswerEntry(show_thinking=show_thinking)
    entry.thinking_s = exchange.thinking_s
    entry.thinking_tokens = int(exchange.stats.get("reasoning_tokens", 0))
    if exchange.reasoning:
        entry.add(exchange.reasoning, reasoning=True)
    entry.add(exchange.text, reasoning=False)
    entry.settle()
    known = set(FinishReason)
    reason = (
        FinishReason(exchange.finish_reason) if exchange.finish_reason in known else FinishReason.CANCELLED
    )
    if not exchange.calls:
        entry.footer, entry.ending = footer_line(exchange_stats(exchange)), describe_ending(reason)
    return entry


def exchange_stats(exchange: Exchange) -> TurnStats | None:
    """Return the figures of an answer; None if none were saved."""
    return TurnStats.of(exchange.stats) if exchange.stats else None


def footer_line(stats: TurnStats | None) -> Line:
    """Return the line of figures below an answer."""
    parts: list[str] = []
    if stats is not None and stats.generated_tokens:
        parts.append(counted(stats.generated_tokens, "token"))
        if tokens_per_s := decode_rate(stats):
            parts.append(rate_text(tokens_per_s))
        if stats.ttft_s:
            parts.append(f"first token after {seconds_text(stats.ttft_s)}")
    return [(" · ".join(parts), "muted")] if parts else []
