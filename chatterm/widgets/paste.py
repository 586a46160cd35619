"""Long pasted texts: the composer shows each as a label, the message sent contains the text."""

import re

_LINES = 10
_CHARACTERS = 2000
"""Lines and characters up to which a paste is shown in full."""
_LABEL = re.compile(r"\[pasted [\d,]+ (?:lines|characters)(?:, no\. \d+)?\]")


def is_long(text: str, lines: int = _LINES, characters: int = _CHARACTERS) -> bool:
    return len(text) > characters or text.count("\n") > lines


class Pastes:
    """The folded texts by label. Labels are plain text: they can be moved, cut and undone like any other."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def fold(self, text: str) -> str:
        """Store `text` under a new label and return the label."""
        lines = text.count("\n") + (not text.endswith("\n"))
        size = f"{lines:,} lines" if lines > 1 else f"{len(text):,} characters"
        label, number = f"[pasted {size}]", 2
        while self._texts.get(label, text) != text:
            label, number = f"[pasted {size}, no. {number}]", number + 1
        self._texts[label] = text
        return label

    def unfold(self, text: str) -> str:
        """Return `text` with every label replaced by its paste. Labels inside pasted text stay."""
        if not self._texts:
            return text
        return _LABEL.sub(lambda match: self._texts.get(match[0], match[0]), text)

    def text_of(self, label: str) -> str:
        return self._texts[label]

    def spans(self, line: str) -> list[tuple[int, int]]:
        """Return the spans of the labels in `line`."""
        if not self._texts or "[pasted " not in line:
            return []
        return [match.span() for match in _LABEL.finditer(line) if match[0] in self._texts]

    def copy(self) -> "Pastes":
        """Return a copy for use in another thread."""
        pastes = Pastes()
        pastes._texts = self._texts.copy()
        return pastes

    def clear(self) -> None:
        self._texts.clear()
