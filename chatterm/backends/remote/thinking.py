"""Separate thinking from answer as the text streams, for servers that leave thinking in `<think>` tags."""

from dataclasses import dataclass

from engine.events import Kind

_OPEN, _CLOSE = "<think>", "</think>"
_MOST_BEFORE = 1_000
"""Characters of white space that may precede `<think>`: they are held back, and read again with every piece."""


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A piece of an answer."""

    text: str
    kind: Kind = "answer"


class Splitter:
    """Cuts the stream into pieces that can be shown: no partial tag, no partial character."""

    def __init__(self, *, is_middle: bool = False) -> None:
        """Split a new stream; with `is_middle` it continues an answer that already has text, so no thinking starts."""
        self._place = "answer" if is_middle else "start"
        """One of start, opening (after the tag), thinking, gap (after the thinking), answer."""
        self._held = {"answer": "", "reasoning": ""}

    def feed(self, piece: AnswerPiece) -> list[AnswerPiece]:
        """Return the pieces that can be shown so far."""
        text = whole(self._held[piece.kind] + piece.text)
        if piece.kind == "reasoning":  # the server has separated them
            text, self._held["reasoning"] = _split_half(text)
            if self._place == "start" and text:
                self._place = "answer"
                before, self._held["answer"] = self._held["answer"], ""
                return [*_pieces(before, "answer"), *_pieces(text, "reasoning")]
            return _pieces(text, "reasoning")
        text, half = _split_half(text)
        found, rest = self._answer(text)
        self._held["answer"] = rest + half
        return found

    def end(self) -> list[AnswerPiece]:
        """Return the text that was held back."""
        kind: Kind = "reasoning" if self._place == "thinking" else "answer"
        held = {name: whole(text, is_end=True) for name, text in self._held.items()}
        self._held = {"answer": "", "reasoning": ""}
        return [*_pieces(held["reasoning"], "reasoning"), *_pieces(held["answer"], kind)]

    def _answer(self, text: str) -> tuple[list[AnswerPiece], str]:
        """Return the pieces of the text, and the rest to be read again with the next text."""
        found: list[AnswerPiece] = []
        if self._place == "start":
            begun = text.lstrip()
            may_think = len(text) - len(begun) <= _MOST_BEFORE
            if may_think and len(begun) < len(_OPEN) and _OPEN.startswith(begun):
                return found, text
            self._place = "answer"
            if may_think and begun.startswith(_OPEN):
                self._place, text = "opening", begun.removeprefix(_OPEN)
        if self._place == "opening":
            text = text.lstrip()
            self._place = "thinking" if text else "opening"
        if self._place == "thinking":
            thought, tag, rest = text.partition(_CLOSE)
            if not tag:
                size = next((n for n in range(len(_CLOSE) - 1, 0, -1) if text.endswith(_CLOSE[:n])), 0)
                cut = len(text) - size
                return _pieces(text[:cut], "reasoning"), text[cut:]
            found += _pieces(thought, "reasoning")
            self._place, text = "gap", rest
        if self._place == "gap":
            text = text.lstrip()
            self._place = "answer" if text else "gap"
        return [*found, *_pieces(text, "answer")], ""


def _pieces(text: str, kind: Kind) -> list[AnswerPiece]:
    return [AnswerPiece(text, kind)] if text else []


def _split_half(text: str) -> tuple[str, str]:
    """Split off the first half of a surrogate pair at the end of `text`."""
    return (text[:-1], text[-1]) if text and "\ud800" <= text[-1] <= "\udbff" else (text, "")


def whole(text: str, *, is_end: bool = False) -> str:
    """Join halves of surrogate pairs; replace halves whose other half is lost."""
    if not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    body, half = (text, "") if is_end else _split_half(text)
    return body.encode("utf-16", "surrogatepass").decode("utf-16", "replace") + half
