"""The text of a line without decoration: only that is copied."""

from chatterm.conversation.entries import INDENT
from chatterm.markdown.lines import Line

_DRAWN = frozenset(
    {
        *("user-bar", "quote-bar", "rule", "code-label", "code-copy"),
        *("notice-mark", "error-mark", "branch", "edited", "picture"),
    }
)
"""Styles of decoration, which is no part of the text."""


def said(line: Line, start: int, end: int | None) -> tuple[str, str] | None:
    """Return the text of a line between two columns without decoration, and the separator before the next line.

    Return None if the line consists of decoration only.
    """
    column, text, joint, has_words, is_drawn = 0, "", "\n", False, False
    for part, style in line:
        begin, column = column, column + len(part)
        styles = style.split()
        if not part and "wrapped" in styles:
            joint = " "
        elif not part and "cut" in styles:
            joint = ""
        if "pad" in styles or (begin < INDENT and not part.strip("▌ ")):
            continue
        if _DRAWN.intersection(styles):
            is_drawn = True
            continue
        text += part[max(start - begin, 0) : None if end is None else max(end - begin, 0)]
        has_words = has_words or bool(part.strip())
    if is_drawn and not has_words:
        return None
    return text if joint == "" else text.rstrip(), joint
