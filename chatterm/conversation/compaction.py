"""Ways to make room when the context is nearly full, the room that each makes, and the request for a summary.

Tokens are estimated from the current history, because only engines can count them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from chatterm.backends.backend import Compaction, EngineError, Exchange, Message, Request
from chatterm.conversation.attachments import attached_files, without_files
from chatterm.conversation.visible_history import seen, summarised, summary_exchange
from chatterm.terminal.sanitize import one_line
from models.units import counted

Kind = Literal["summary", "files", "start", "again", "edit"]

COMPACTED = {
    "start": "The model sees nothing above this line except what is pinned; /compact off changes that.",
    "files": "The model sees only the names of the files that were attached; /compact off changes that.",
    "off": "The model sees everything again.",
}
PINNED = {
    True: "The message is pinned with its answer: /compact leaves both whole.",
    False: "The message is no longer pinned.",
}
_FILES = "The model sees only their names: "
_KEPT = 0.3
"""Share of the context that the latest messages may take; a summary leaves those unchanged."""
_FULL = 0.9
_LEAST, _MOST = 64, 700
"""The smallest and the largest token limit of a summary."""
_USUAL = 0.25
"""Tokens per character, if nothing better is known."""


@dataclass(frozen=True, slots=True)
class Room:
    """A branch, and the part of the context that it takes."""

    path: Sequence[Exchange]
    system: str
    used: int
    """Tokens of the history as the model sees it."""
    context: int
    """Size of the context in tokens; 0 if unknown."""

    @property
    def rate(self) -> float:
        """Tokens per character."""
        characters = len(self.system) + count_characters(seen(self.path))
        return self.used / characters if self.used and characters else _USUAL

    def tokens(self, exchanges: Sequence[Exchange]) -> int:
        """Estimate the tokens of these exchanges."""
        return round(count_characters(exchanges) * self.rate)

    def of_text(self, text: str) -> int:
        """Estimate the tokens of a text."""
        return round(len(text) * self.rate)

    @property
    def default_count(self) -> int:
        """The number of exchanges to summarise by default: all but the latest ones, of which at least one stays."""
        kept, rate = 1, self.rate
        characters = count_characters(self.path[-1:])
        while kept < len(self.path):
            characters += count_characters(self.path[-kept - 1 : -kept])
            if round(characters * rate) > _KEPT * self.context:
                break
            kept += 1
        return min(max(len(self.path) - kept, self.least_count), len(self.path))

    @property
    def least_count(self) -> int:
        """The number of exchanges up to the first that is neither summarised nor pinned; 0 if there is none."""
        start = summarised(self.path)
        return next((n for n in range(start + 1, len(self.path) + 1) if not self.path[n - 1].is_pinned), 0)

    def replaced(self, count: int) -> list[Exchange]:
        """Return the exchanges that a summary of the first `count` would hide from the model."""
        return [exchange for exchange in seen(self.path[:count]) if not exchange.is_pinned]

    def check_pinned(self) -> None:
        """Raise EngineError if the pinned messages leave no room, whatever is done with the rest."""
        pinned = [exchange for exchange in self.path if exchange.is_pinned]
        tokens = self.tokens(pinned) + self.of_text(self.system)
        if pinned and self.context and tokens >= _FULL * self.context:
            raise EngineError(
                f"The system prompt and the pinned messages take about {tokens:,} of {counted(self.context, 'token')}; "
                "/pin unpins a message, a larger --context gives more room."
            )


@dataclass(frozen=True, slots=True)
class Way:
    """A way to make room."""

    kind: Kind
    label: str
    frees: int
    """Estimated tokens that it frees; below 0: tokens that it takes."""
    about: str


def ways(room: Room, count: int) -> list[Way]:
    """Return what can be done; a summary would replace the first `count` exchanges."""
    path, done = room.path, summarised(room.path)
    found: list[Way] = []
    if room.least_count:
        gain = room.tokens(room.replaced(count)) - summary_tokens(room.context)
        found.append(
            Way(
                "summary",
                f"Summarise the first {counted(count, 'message')}"
                if count > 1
                else "Summarise the first message",
                gain,
                "The model sums them up. You read and edit the summary before it is used.",
            )
        )
    whole = [exchange for exchange in seen(path) if not exchange.is_pinned]
    files = [name for exchange in whole for name in attached_files(exchange.user)]
    less = sum(len(exchange.user) - len(without_files(exchange.user)) for exchange in whole)
    if less > 0:
        label = f"Leave out {counted(len(files), 'attached file')}"
        found.append(Way("files", label, round(less * room.rate), _FILES + ", ".join(files) + "."))
    if path and done < len(path):
        gain = room.tokens(room.replaced(len(path)))
        found.append(
            Way(
                "start",
                "Start from here",
                gain,
                "The model sees nothing of the conversation so far except what is pinned.",
            )
        )
    latest = path[done - 1].compaction if done else None
    if latest is not None and latest.summary:
        found.append(Way("edit", "Edit the summary in use", 0, "It replaces the messages above its mark."))
    if any(exchange.compaction for exchange in path):
        gain = room.used - room.of_text(room.system) - room.tokens(path)
        found.append(Way("again", "Show the model everything again", gain, "Nothing has been deleted."))
    return found


def summary_tokens(context: int) -> int:
    """Return the token limit of a summary; a `context` of 0 is unknown."""
    return max(min(context // 6, _MOST), _LEAST) if context else _MOST


def summary_request(room: Room, count: int) -> Request:
    """Return a request for a summary of the first `count` exchanges, placed after them to reuse their cached KV."""
    most = summary_tokens(room.context)
    messages = [Message("system", room.system)] if room.system else []
    for exchange in seen(room.path[:count]):
        messages += [Message("user", exchange.user), Message("assistant", exchange.text)]
    asked = (
        "Sum up our conversation so far. Only your summary will be left of it, so keep what matters: facts, names, "
        "numbers, decisions, open questions, what I want and how I want it. Use the language of the conversation and "
        f"at most {most // 2} words. Write the summary and nothing else."
    )
    sampling = {"temperature": 0.0, "max_tokens": most, "constraint": None, "stop": ()}
    return Request([*messages, Message("user", asked)], sampling, "off")


def checked_summary(room: Room, count: int, text: str) -> Compaction:
    """Return `text` as the summary of the first `count` exchanges. Raises EngineError if that makes no room."""
    text = text.strip()
    if not text:
        raise EngineError("The summary is empty; write one, or press Esc.")
    before, after = count_characters(room.replaced(count)), count_characters([summary_exchange(text)])
    if after >= before:
        tokens = [round(characters * room.rate) for characters in (after, before)]
        raise EngineError(
            f"The summary takes about {counted(tokens[0], 'token')}, what it replaces takes {tokens[1]:,}; "
            "shorten it, or press Esc."
        )
    files = room.path[count - 1].compaction
    return Compaction(text, files.without_files if files else False)


def count_characters(exchanges: Sequence[Exchange]) -> int:
    return sum(len(exchange.user) + len(exchange.text) for exchange in exchanges)


def nth(path: Sequence[Exchange], number: str) -> Exchange:
    """Return the n-th exchange, from 1, or from the end if negative. Raises EngineError if there is none."""
    try:
        index = int(number)
    except ValueError:
        raise EngineError(
            f"{one_line(number, 40)!r} is not a number; messages are numbered from 1, or from the end with -1."
        ) from None
    if not path:
        raise EngineError("There is no message yet.")
    if not index or not -len(path) <= index <= len(path):
        raise EngineError(f"There is no message {index}; the conversation has {len(path)}.")
    return path[index - 1 if index > 0 else index]
