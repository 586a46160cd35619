"""Parse the bytes of one answer into pieces, usage and the way it ended. No network here, and no input is trusted."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from chatterm.backends.backend import FinishReason
from chatterm.backends.remote.dialects.base import Dialect, ReportedUsage
from chatterm.backends.remote.dialects.calls import CallAssembler
from chatterm.backends.remote.sse import LONGEST, DocumentReader, EventReader, TooLongError
from chatterm.backends.remote.thinking import AnswerPiece, Splitter
from chatterm.terminal.sanitize import one_line

MOST_TEXT = 32 * 1024 * 1024
"""Longest answer, in characters."""
_SHOWN = 60
"""Characters shown of text that cannot be parsed."""
_STREAMS = ("event-stream", "json")
"""What the type of a streamed answer contains."""


class AnswerReader:
    """Never raises, whatever bytes arrive: what was read so far counts, and `problem` says what happened."""

    def __init__(self, dialect: Dialect, *, is_middle: bool = False, is_document: bool = False) -> None:
        """Parse a stream. `is_middle`: the answer already has text. `is_document`: it is a single JSON document."""
        self._dialect = dialect
        self._reader = DocumentReader() if dialect.is_lines else EventReader()
        self._whole = bytearray() if is_document and not dialect.is_lines else None
        self._splitter = Splitter(is_middle=is_middle)
        self._size = 0
        self._has_begun = False
        """Whether any message has arrived."""
        self.kind = ""
        """The type of data that the server claims to send."""
        self.is_over = False
        """Whether further bytes are ignored."""
        self.finish: FinishReason | None = None
        self.usage: ReportedUsage | None = None
        self.problem = ""
        """What went wrong, to follow the name of the server; "" if nothing has."""
        self.calls = CallAssembler()

    def feed(self, data: bytes) -> list[AnswerPiece]:
        """Return the pieces that `data` completes."""
        if self.is_over:
            return []
        try:
            if self._whole is not None:
                self._whole += data
                if len(self._whole) > LONGEST:
                    raise TooLongError
                return []
            return self._take(self._reader.feed(data))
        except TooLongError:
            return self._fail(f"sent a line of more than {LONGEST // 2**20} MiB")

    def end(self) -> list[AnswerPiece]:
        """Return the pieces held back, as no more bytes follow. Set `problem` if the answer did not end normally."""
        pieces: list[AnswerPiece] = []
        if not self.is_over:
            try:
                rest = self._reader.end()
                if self._whole is not None:
                    rest = [self._whole.decode("utf-8", "replace")]
                # Ignore a message that is cut off: the missing end is reported instead.
                rest = [text for text in rest if self._whole is not None or _parsed(text) is not None]
                pieces = self._take(rest)
            except TooLongError:
                pieces = []
        pieces += self._splitter.end()
        if self.finish is None and not self.problem:
            self.problem = self._cut()
        self.is_over = True
        return pieces

    def _take(self, texts: Sequence[str]) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = []
        for text in texts:
            if self.is_over:
                break
            if text.strip() == "[DONE]":
                self.is_over, self.finish = True, self.finish or FinishReason.EOS
                break
            message = _parsed(text)
            if message is None:
                shown = one_line(text, _SHOWN)
                return [*pieces, *self._fail(f"sent something that is not JSON: {shown!r}")]
            pieces += self._said(message)
        return pieces

    def _cut(self) -> str:
        """Explain why the answer has no end."""
        is_other = self.kind and not any(kind in self.kind.lower() for kind in _STREAMS)
        if is_other and not self._has_begun:
            return f"sent {one_line(self.kind, _SHOWN)} instead of an answer; check its address"
        return "ended the connection in the middle of the answer"

    def _said(self, message: Mapping[str, Any]) -> list[AnswerPiece]:
        self._has_begun = True
        heard = self._dialect.heard(message)
        pieces = [shown for piece in heard.pieces for shown in self._splitter.feed(piece)]
        self._size += sum(len(piece.text) for piece in heard.pieces)  # including text that is not shown
        self.finish = heard.finish or self.finish
        self.usage = heard.usage or self.usage
        pieces += [AnswerPiece(part, "call") for part in self.calls.take(heard.calls)]
        if heard.problem:
            return [*pieces, *self._fail(f"reports: {one_line(heard.problem, 300)}")]
        if self.calls.problem:
            return [*pieces, *self._fail(self.calls.problem)]
        if self._size > MOST_TEXT:
            return [
                *pieces,
                *self._fail(f"sent an answer that does not end: more than {MOST_TEXT // 2**20} MB"),
            ]
        self.is_over |= heard.is_last
        return pieces

    def _fail(self, problem: str) -> list[AnswerPiece]:
        self.problem, self.is_over = problem, True
        return self._splitter.end()


def _parsed(text: str) -> Mapping[str, Any] | None:
    """Return a JSON object; None for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
