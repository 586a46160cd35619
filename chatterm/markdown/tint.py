"""Mark the text of rendered Markdown that came from guesses: each piece is looked up in the source it was made from.

What does not appear there as it is shown (an escape, an entity) is not marked.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
from unicodedata import category

from markdown_it.token import Token

from chatterm.markdown.lines import Line, Run

GUESSED = "guessed"
"""The style, and the key of its marks in a token's `meta`."""

_JOINER, _SKINS = "\u200d", "\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"

Marks = tuple[tuple[int, int], ...]
"""Ranges of characters of a text, in order."""


def mark(tokens: Iterable[Token], source: str, marks: Marks) -> None:
    """Store in each token of `source` which parts of it are marked."""
    lines = source.split("\n")
    starts, at = [0, *accumulate(len(line) + 1 for line in lines)], 0
    for token in tokens:
        at = max(at, starts[token.map[0]] if token.map else 0)
        if token.type == "inline":
            for child in token.children or []:
                found = source.find(child.content, at) if child.content else -1
                if found >= 0:
                    child.meta[GUESSED], at = within(marks, found, child.content), found + len(child.content)
        elif token.type in ("fence", "code_block") and token.map is not None:
            at, each = starts[token.map[0] + (token.type == "fence")], []
            for line in token.content.removesuffix("\n").split("\n"):
                found = source.find(line, at)
                each.append(_in_columns(within(marks, found, line), line) if found >= 0 else ())
                at = max(at, found + len(line))
            token.meta[GUESSED] = each


def within(marks: Marks, start: int, text: str) -> Marks:
    """Return the marks of `text`, which begins at `start`, relative to its own beginning."""
    end = start + len(text)
    return tuple(
        (max(first - start, 0), min(last, end) - start)
        for first, last in marks
        if first < end and last > start
    )


def marked(runs: Sequence[Run], marks: Marks) -> Line:
    """Return the runs with the style added where `marks`, counted through all of them, say so."""
    if not marks:
        return list(runs)
    found, start = Line(), 0
    for text, style in runs:
        own = [(_apart(text, a), _apart(text, b)) for a, b in within(marks, start, text)]
        for first, last in pairwise(sorted({0, len(text), *chain.from_iterable(own)})):
            is_marked = any(a <= first and last <= b for a, b in own)
            found.append((text[first:last], f"{style} {GUESSED}".strip() if is_marked else style))
        start += len(text)
    return found


def _apart(text: str, at: int) -> int:
    """Return the next place that does not split characters which are drawn as one."""
    while 0 < at < len(text) and (text[at - 1] == _JOINER or _is_joined(text[at])):
        at += 1
    return at


def _is_joined(character: str) -> bool:
    return not character.isascii() and (
        character in (_JOINER, *_SKINS) or category(character).startswith("M")
    )


def _in_columns(marks: Marks, line: str) -> Marks:
    """Convert marks to the line with its tabs expanded to four columns."""
    if "\t" not in line:
        return marks
    first, last = ([len(line[: pair[end]].expandtabs(4)) for pair in marks] for end in (0, 1))
    return tuple(zip(first, last, strict=True))
