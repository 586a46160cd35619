"""One streamed answer of a server: stream events turned into pieces, the answer so far, and its figures."""

import time
from collections.abc import Iterable

from chatterm.backends.arrivals import Arrivals
from chatterm.backends.backend import FinishReason, Outcome, TokenEvent, TurnStats
from chatterm.backends.exchange import NO_TOKEN
from chatterm.backends.remote.client import Began
from chatterm.backends.remote.dialects.base import Dialect
from chatterm.backends.remote.stream_parser import AnswerReader
from chatterm.backends.remote.thinking import AnswerPiece


class RunningAnswer:
    """Times are measured here; tokens are those the server reports. Until it reports them, pieces are counted."""

    def __init__(
        self, dialect: Dialect, model: str, before: Outcome | None = None, *, has_tools: bool = False
    ) -> None:
        """`before` is the answer that is continued; with `has_tools`, the answer may call tools."""
        self._dialect = dialect
        self._before = before
        self.has_tools = has_tools
        self.model = model
        # Pieces: to add each to the text so far would copy all of that every time.
        self._text = [before.text] if before is not None else []
        self._reasoning = [before.reasoning] if before is not None else []
        self._ids: list[int] = []
        self._thought = 0
        self._began = time.monotonic()
        self._arrivals = Arrivals()
        self._reader = AnswerReader(dialect, is_middle=before is not None)
        self.is_stopped = False
        self.problem = ""
        """Why the answer ended abnormally, in one line; "" if it did not."""

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def has_begun(self) -> bool:
        return bool(self._ids)

    @property
    def is_complete(self) -> bool:
        """Whether the answer ended normally."""
        return self._reader.is_over and not self._reader.problem and not self.is_stopped

    @property
    def reader(self) -> AnswerReader:
        return self._reader

    def began(self, item: Began) -> None:
        """Handle the head of the reply."""
        if "application/json" in item.content_type.lower() and not self._dialect.is_lines:
            self._reader = AnswerReader(self._dialect, is_middle=self._before is not None, is_document=True)
        self._reader.kind = f"{item.packing} data" if item.packing else item.content_type

    def feed(self, data: bytes) -> list[TokenEvent]:
        """Return the events of the next bytes."""
        return self._events(self._reader.feed(data))

    def end(self) -> list[TokenEvent]:
        """Return the events held back, as no more bytes follow."""
        return self._events(self._reader.end())

    def _events(self, pieces: Iterable[AnswerPiece]) -> list[TokenEvent]:
        events = [TokenEvent(piece.text, NO_TOKEN, piece.kind) for piece in pieces if piece.text]
        if events:
            self._arrivals.add(time.monotonic(), len(events))
        return events

    def take(self, event: TokenEvent) -> None:
        """Add an event that was passed on to the answer."""
        self._ids.append(NO_TOKEN)
        if event.kind == "reasoning":
            self._reasoning.append(event.text)
            self._thought += 1
        elif event.kind == "answer":
            self._text.append(event.text)

    def outcome(self, reason: FinishReason | None = None) -> Outcome:
        return Outcome(self.text, self.reasoning, reason, self.stats, self._ids, model=self.model)

    def ended(self) -> Outcome:
        """Return the final answer."""
        finish = self._reader.finish
        reason = FinishReason.CANCELLED if self.problem or finish is None else finish
        # Discard calls that were cut off.
        calls = self._reader.calls.made() if self.has_tools and reason is FinishReason.EOS else ()
        return Outcome(self.text, self.reasoning, reason, self.stats, (), model=self.model, calls=calls)

    @property
    def stats(self) -> TurnStats:
        usage = self._reader.usage
        prompt = (usage.prompt if usage is not None else None) or 0
        told = usage.cached if usage is not None else None
        cached = min(told or 0, prompt)
        generated = usage.generated if usage is not None and usage.generated is not None else len(self._ids)
        thought = usage.reasoning if usage is not None and usage.reasoning else 0
        hidden = min(max(thought - self._thought, 0), generated)  # no piece shows when these arrived
        if not thought and self._thought and self._ids:
            # Most servers count all tokens together: estimate the share of thinking from the pieces.
            thought = max(round(generated * self._thought / len(self._ids)), 1)
        seen, seconds = self._arrivals.measured()
        if seen:  # a piece may be several tokens
            seen = round((generated - hidden) * seen / self._arrivals.count)
        first = self._arrivals.first
        return TurnStats(
            prompt_tokens=prompt,
            cached_tokens=cached,
            prefilled_tokens=prompt - cached if told is not None else 0,
            generated_tokens=generated,
            reasoning_tokens=min(thought, generated),
            ttft_s=first - self._began if first is not None else 0.0,
            decode_s=seconds,
            first_tokens=generated - seen,
        )
