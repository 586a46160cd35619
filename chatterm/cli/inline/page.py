"""The input and the output of a chat without a screen."""

import io
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO, TextIO

from chatterm.backends.backend import EngineError, TokenEvent
from chatterm.terminal.sanitize import is_safe, visible
from chatterm.terminal.spinner import has_colour

if TYPE_CHECKING:
    from chatterm.sessions.store import SessionStore

LINE_LIMIT = 16 * 1024 * 1024
"""The most bytes read of one line."""


class InlinePage:
    """Writes answers. Thinking is always marked by words, and dim if the output has colour."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._dim = has_colour(out)
        self.shows_thinking = out.isatty()
        self._is_open = False
        """Whether the last line has no end yet."""
        self._kind = "answer"
        self._began = False

    def write(self, event: TokenEvent) -> None:
        """Write one more piece of an answer."""
        if not event.text or (event.kind == "reasoning" and not self.shows_thinking):
            return
        if event.kind != self._kind or not self._began:
            self._turn_to(event.kind)
        text = visible(event.text)
        dim = self._dim and event.kind == "reasoning"
        self._put(f"\x1b[2m{text}\x1b[22m" if dim else text)
        self._is_open = not text.endswith("\n")

    def line(self, text: str) -> None:
        """Write a separate line."""
        self._close()
        self._put(visible(text) + "\n")

    def end(self) -> None:
        """End the answer with a blank line."""
        self._close()
        if self._began:
            self._put("\n")
        self._began, self._kind = False, "answer"

    def _turn_to(self, kind: str) -> None:
        self._close()
        if kind == "reasoning":
            self._put("(thinking)\n")
        elif self._kind == "reasoning":
            self._put("(answer)\n")
        self._kind, self._began = kind, True

    def _close(self) -> None:
        if self._is_open:
            self._put("\n")
        self._is_open = False

    def _put(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class LineInput:
    """Where messages come from: a person at a terminal, or a pipe."""

    def __init__(self, stream: BinaryIO | None, by_hand: bool) -> None:
        """Read from `stream`; if it is None, a person types at the terminal of this process."""
        self._stream = stream
        self.by_hand = by_hand

    def next(self, prompt: str) -> str | None:
        """Read the next line, without its end; return None at the end. Raises UnicodeError if it is not UTF-8."""
        if self._stream is None:
            try:
                text = input(prompt)
            except EOFError:
                return None
            text.encode()  # bytes that are no UTF-8 arrive as lone surrogates
            return text
        if self.by_hand:
            sys.stderr.write(prompt)  # standard output is a file
            sys.stderr.flush()
        data = self._stream.readline(LINE_LIMIT)
        return data.decode().rstrip("\r\n") if data else None


def standard_lines(store: "SessionStore", commands: Sequence[str]) -> LineInput:
    """Return the standard input; at a terminal with line editing that completes the `commands`."""
    if sys.stdin is None:  # as under some schedulers
        return LineInput(io.BytesIO(), by_hand=False)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return LineInput(sys.stdin.buffer, by_hand=sys.stdin.isatty())
    with suppress(ImportError):
        _use_readline(store, commands)
    return LineInput(None, by_hand=True)


def _use_readline(store: "SessionStore", commands: Sequence[str]) -> None:
    """Set up line editing for input(): earlier messages with Up and Down, commands with Tab. Raises ImportError."""
    import readline

    with suppress(EngineError):  # a database that cannot be read
        for text in store.prompts(500):
            if is_safe(text) and "\n" not in text:
                readline.add_history(text)

    def complete(begun: str, which: int) -> str | None:
        names = [f"/{name} " for name in commands if begun and f"/{name}".startswith(begun)]
        return names[which] if which < len(names) else None

    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")
