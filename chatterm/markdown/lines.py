"""Styled lines, and how text becomes lines of a given width."""

import re
from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len, chop_cells

Run = tuple[str, str]
"""Text and the names of its styles, separated by spaces. A run holds no line break."""
Line = list[Run]
"""A line under construction."""
FixedLine = tuple[Run, ...]
"""A finished line. The garbage collector stops tracking tuples of text, but scans lists again and again: with those, a
long conversation would slow down every full collection (and the screen)."""

WRAPPED, CUT = ("", "wrapped"), ("", "cut")
"""The last run of a line that was broken because it was full: at a space, or inside a word."""

# Scripts written without spaces may break after every character.
_IDEOGRAPH = "\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef\U00020000-\U0003fffd"
_PIECE = re.compile(rf"\n|[ \t]+|[{_IDEOGRAPH}]|[^\s{_IDEOGRAPH}]+|\s")


def cells(text: str) -> int:
    """Return the columns that `text` takes on the screen."""
    return len(text) if text.isascii() and text.isprintable() else cell_len(text)


def elided(text: str, width: int) -> str:
    """Cut `text` to `width` columns; the last one is an ellipsis if something is missing."""
    return text if cells(text) <= width else _head(text, max(width - 1, 0)) + "…"


def shortened(text: str, width: int) -> str:
    """Cut `text` to `width` columns after a whole word, with an ellipsis if something is missing."""
    if cells(text) <= width:
        return text
    head = _head(text, max(width - 1, 0))
    whole = head if text[len(head) :].startswith(" ") else head[: head.rfind(" ") + 1]
    return (whole or head).rstrip(" ,;:.·") + "…"


def line_cells(line: Sequence[Run]) -> int:
    return sum(cells(text) for text, _ in line)


def line_text(line: Sequence[Run]) -> str:
    return "".join(text for text, _ in line)


def styled(line: Sequence[Run], style: str) -> Line:
    """Return `line` with one more style under those it has."""
    return [(text, f"{style} {own}" if own else style) for text, own in line]


def padded(line: Line, width: int, style: str) -> Line:
    """Fill `line` up to `width` columns."""
    missing = width - line_cells(line)
    return [*line, (" " * missing, style)] if missing > 0 else line


def wrap(runs: Iterable[Run], width: int) -> list[Line]:
    """Break at spaces, and inside a word only if it is longer than a line. Return at least one line."""
    return list(wrapped(runs, width))


def wrapped(runs: Iterable[Run], width: int) -> Iterator[Line]:
    """Yield the lines of `wrap`, each as soon as it is known."""
    width = max(width, 1)
    line: Line = []
    column, is_first = 0, True
    space: Line = []
    for word in _words(runs):
        if word[0][0] == "\n":
            yield _joined(line)
            line, column, is_first, space = [], 0, False, []
            continue
        if word[0][0].isspace():
            space += word
            continue
        size, gap = line_cells(word), line_cells(space)
        if column and column + gap + size > width:
            yield _joined([*line, WRAPPED if gap else CUT])
            line, column, is_first, space, gap = [], 0, False, [], 0
        if column == 0 and (not is_first or size <= width < gap + size):
            space, gap = [], 0
        if gap + size > width:
            *whole, line = chop([*space, *word], width)
            yield from map(_joined, whole)
            column, is_first = line_cells(line), is_first and not whole
        else:
            line += [*space, *word]
            column += gap + size
        space = []
    yield _joined(line)


def of_height(lines: list[Line], most: int, width: int) -> list[Line]:
    """Cut to at most `most` lines (at least 1); the last one ends with an ellipsis if some are missing."""
    if len(lines) <= most:
        return lines
    *start, (text, style) = [run for run in lines[most - 1] if run[0]] or [("", "")]
    return [*lines[: most - 1], [*start, (shortened(f"{text} …", width - line_cells(start)), style)]]


def longest_word(runs: Iterable[Run]) -> int:
    """Return the columns of the longest stretch that `wrap` breaks only if a line is shorter."""
    return max((line_cells(word) for word in _words(runs) if not word[0][0].isspace()), default=0)


def chop(line: Line, width: int) -> list[Line]:
    """Break a line at exactly `width` columns, wherever that is."""
    width = max(width, 2)  # a wide character must fit
    lines: list[Line] = [[]]
    column = 0
    for text, style in line:
        while text:
            size = cells(text)
            if column + size <= width:
                lines[-1].append((text, style))
                column += size
                break
            head = _head(text, width - column) or (text[0] if column == 0 else "")
            if head:
                lines[-1].append((head, style))
                text = text[len(head) :]
            lines[-1].append(CUT)
            lines.append([])
            column = 0
    return lines


def _head(text: str, width: int) -> str:
    """Return the longest start of `text` that fits into `width` columns."""
    if width <= 0:
        return ""
    if text.isascii() and text.isprintable():
        return text[:width]
    head = (chop_cells(text, width) or [text])[0] if width > 1 else text[0]
    return head if cells(head) <= width else ""


def _words(runs: Iterable[Run]) -> Iterator[Line]:
    """Yield line breaks, spaces and words, in order. A word may consist of several runs."""
    word: Line = []
    for text, style in runs:
        for match in _PIECE.finditer(text):
            piece = match[0]
            solid = not piece.isspace() and not re.match(f"[{_IDEOGRAPH}]", piece)
            if solid:
                word.append((piece, style))
                continue
            if word:
                yield word
                word = []
            yield [("\n" if piece == "\n" else piece.replace("\t", "    "), style)]
    if word:
        yield word


def _joined(line: Line) -> Line:
    """Merge neighbouring runs of one style."""
    result: Line = []
    for text, style in line:
        if result and result[-1][1] == style:
            result[-1] = (result[-1][0] + text, style)
        else:
            result.append((text, style))
    return result
