"""The arguments and the output of `/library`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from time import time

from chatterm.backends.backend import EngineError
from chatterm.markdown.lines import Line, cells, elided, wrap
from chatterm.sessions.dates import when_text
from chatterm.sessions.library import DocumentLibrary, LibraryEntry, name_for, size_text
from chatterm.terminal.sanitize import one_line

WORDS = ("add", "open", "remove")
_AS = re.compile(r"(.+?)(?:\s+as\s+(\S+))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Add:
    source: str
    """A file, a folder or a URL."""
    name: str


@dataclass(frozen=True, slots=True)
class Open:
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Remove:
    name: str


def told(argument: str) -> Add | Open | Remove | None:
    """Parse the argument of `/library`; None: list the documents. Raises EngineError (one line)."""
    word, _, rest = argument.strip().partition(" ")
    rest = rest.strip()
    if not word:
        return None
    if word not in WORDS:
        raise EngineError(
            f"/library takes add, open or remove, not {one_line(word, 40)!r}; on its own it lists the documents."
        )
    if not rest:
        raise EngineError(
            f"/library {word} needs {'a file, a folder or an address' if word == 'add' else 'a name'}."
        )
    if word == "remove":
        return Remove(rest)
    if word == "open":
        return Open(tuple(name for name in re.split(r"[\s,]+", rest) if name))
    match = _AS.fullmatch(rest)
    assert match is not None
    source = match[1]
    if len(source) > 1 and source[0] == source[-1] and source[0] in "\"'":
        source = source[1:-1]
    return Add(source, match[2] or name_for(source))


def suggested(argument: str) -> list[str]:
    """Return completions of an argument that is being typed. Reads the disk, but waits for no other program."""
    word, gap, rest = argument.partition(" ")
    if not gap:
        return [f"{one} " for one in WORDS if one.startswith(word)]
    if word not in ("open", "remove"):
        return []
    *before, begun = rest.split(" ")
    if before and word == "remove":
        return []
    taken = {name.casefold() for name in before}
    fitting = [name for name in DocumentLibrary().names() if name.casefold().startswith(begun.casefold())]
    return [" ".join([word, *before, name]) for name in fitting if name.casefold() not in taken]


def library_lines(
    entries: Sequence[LibraryEntry], opened: Sequence[str], model: str, width: int
) -> list[Line]:
    """Return a list of the documents: name, length (if possible by `model`), date, source; marks those in `opened`."""
    ways = (
        "/library open NAME begins a conversation with a document (with several names: with all of them, "
        "in that order), "
    )
    lines = wrap([(ways + "/library add FILE adds one, /library remove NAME removes one.", "muted")], width)
    if not entries:
        return [*lines, [], [("The library is empty.", "")]]
    now = time()
    rows = [
        (one.name, size_text(one, model), when_text(one.added, now), one_line(one.source, 300))
        for one in entries
    ]
    sizes = [min(max(cells(row[column]) for row in rows), 28) + 2 for column in range(3)]
    left = width - sum(sizes) - 2
    lines.append([])
    for name, *about in rows:
        style = "accent" if name in opened else ""
        mark = ("▸ " if name in opened else "  ", "accent")
        if left >= 12:
            columns = [*map(_column, about, sizes[1:]), elided(about[2], left)]
            lines.append([mark, (_column(name, sizes[0]), style), *((text, "muted") for text in columns)])
        else:  # the rest goes below
            rest = wrap([(" · ".join(about), "muted")], width - 4)
            lines += [[mark, (elided(name, width - 2), style)], *([("    ", ""), *more] for more in rest)]
    return lines


def _column(text: str, width: int) -> str:
    """Return `text` cut or padded to `width` columns, at least two of them empty."""
    shown = elided(text, width - 2)
    return shown + " " * (width - cells(shown))
