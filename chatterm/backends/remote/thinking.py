"""Texts of an answer as they come, thinking apart from answer where a server leaves it in `<think>` tags."""

from dataclasses import dataclass

from engine.events import Kind

_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of an answer."""

    text: str
    kind: Kind = "answer"


class Splitter:
    """Cuts what comes into pieces that can be shown: no half of a tag, no half of a character."""

    def __init__(self, *, is_middle: bool = False) -> None:
        """`is_middle`: it goes on with an answer that has text already, so no thinking begins."""
        self._place = "answer" if is_middle else "start"
        """start, opening (behind the tag), thinking, gap (behind the thinking), or answer."""
        self._held = {"answer": "", "reasoning": ""}

    def feed(self, piece: Piece) -> list[Piece]:
        """What of the text so far can be shown."""
        text = whole(self._held[piece.kind] + piece.text)
        if piece.kind == "reasoning":  # the server has told them apart
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

    def end(self) -> list[Piece]:
        """What was held back."""
        kind: Kind = "reasoning" if self._place == "thinking" else "answer"
        held = {name: whole(text, is_end=True) for name, text in self._held.items()}
        self._held = {"answer": "", "reasoning": ""}
        return [*_pieces(held["reasoning"], "reasoning"), *_pieces(held["answer"], kind)]

    def _answer(self, text: str) -> tuple[list[Piece], str]:
        """Pieces of the text, and what is to be seen again with what comes next."""
        found: list[Piece] = []
        if self._place == "start":
            begun = text.lstrip()
            if len(begun) < len(_OPEN) and _OPEN.startswith(begun):
                return found, text
            self._place = "answer"
            if begun.startswith(_OPEN):
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


def _pieces(text: str, kind: Kind) -> list[Piece]:
    return [Piece(text, kind)] if text else []


def _split_half(text: str) -> tuple[str, str]:
    """`text` and the first half of a surrogate pair at its end."""
    return (text[:-1], text[-1]) if text and "\ud800" <= text[-1] <= "\udbff" else (text, "")


def whole(text: str, *, is_end: bool = False) -> str:
    """Halves of surrogate pairs joined; those that have lost their other half are replaced."""
    if not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    body, half = (text, "") if is_end else _split_half(text)
    return body.encode("utf-16", "surrogatepass").decode("utf-16", "replace") + half
