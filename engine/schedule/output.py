"""Turns sampled tokens into the events of a stream: text, kind, stop strings."""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.events import Kind, TokenEvent
from engine.schedule.channel_guide import ChannelGuide
from engine.schedule.channels import ChannelTracker
from engine.schedule.guide import Guide
from engine.schedule.reasoning import ThinkTracker
from models.text.tokenizer import TextStream


@dataclass(slots=True)
class Output:
    """Turns the tokens of one answer into events.

    Line breaks around the think markers belong to the template, not to the text, and are left out, and so does the
    label of the thinking. A stop string
    ends the answer and is not part of it; text that may still become one is held back. Only the answer is searched
    for stop strings, not the reasoning.
    """

    stream: TextStream
    thinking: ThinkTracker | ChannelTracker
    stop: tuple[str, ...] = ()
    stopped: bool = False
    """Whether a stop string was found."""
    cut: int = 0
    """How many characters at the end of the tokens' text the stop string took away, with what follows it."""
    guide: Guide | ChannelGuide | None = None
    """Which tokens may be sampled, if the answer has to match a constraint."""
    reasoning_tokens: int = 0
    kind: Kind = "answer"
    """The kind of the latest token, and so of the text held back."""
    _held: str = ""
    _fresh: bool = False
    _label: str = ""
    """The rest of the label that may come next."""

    def __post_init__(self) -> None:
        self._fresh = self.thinking.inside

    def push(self, token_id: int) -> TokenEvent:
        """Return the event of this token. Push no more once `stopped` is true."""
        kind, marker = self.thinking.push(token_id)
        self.kind = kind
        self.reasoning_tokens += kind == "reasoning"
        if self.thinking.said:
            self._fresh, self.thinking.answering = False, True
            return TokenEvent(
                self._until_stop("".join(map(self.stream.push, self.thinking.said))), token_id, kind
            )
        if marker:
            self._fresh = True
            self._label = self.thinking.label if self.thinking.inside else ""
            text = self._until_stop(self.stream.flush()) if kind == "answer" else self.stream.flush()
            if self.thinking.over:
                text += self.flush()
                self.stopped = True
            return TokenEvent(f"{text}\n\n" if self.thinking.breaks else text, token_id, kind)
        text = self.stream.push(token_id)
        if self._label:
            text = self._after_label(text)
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        if kind == "reasoning":
            return TokenEvent(text, token_id, kind)
        self.thinking.answering = self.thinking.answering or bool(text.strip())
        return TokenEvent(self._until_stop(text), token_id, kind)

    def replay(self, token_ids: Iterable[int]) -> list[TokenEvent]:
        """Push earlier tokens, so that the output continues after them; they do not count as new."""
        events = [self.push(token_id) for token_id in token_ids]
        self.reasoning_tokens = 0
        return events

    def end(self, token_id: int) -> TokenEvent:
        """Return the event of the token that ends the turn: its text is whatever was held back."""
        return TokenEvent(self.flush(), token_id, self.kind)

    def flush(self) -> str:
        """Return the text held back, with incomplete characters as replacement characters. Push no more after it."""
        held, self._held = self._held, ""
        return "" if self.stopped else held + self.stream.flush()

    def _after_label(self, text: str) -> str:
        """Return what of the thinking's first text is not its label; hold back what may be a part of that."""
        whole = self.thinking.label.removesuffix(self._label) + text
        self._label = self.thinking.label.removeprefix(whole) if self.thinking.label.startswith(whole) else ""
        return "" if self._label else whole.removeprefix(self.thinking.label)

    def _until_stop(self, text: str) -> str:
        if not self.stop:
            return text
        held = self._held + text
        found = [at for stop in self.stop if (at := held.find(stop)) >= 0]
        if found:
            self.stopped, self._held, self.cut = True, "", len(held) - min(found)
            return held[: min(found)]
        keep = max((_overlap(held, stop) for stop in self.stop), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
