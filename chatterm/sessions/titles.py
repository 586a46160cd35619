"""Titles of sessions: made from the first message, and searched by what the user types. Pure functions."""

import re
from collections.abc import Iterable

from chatterm.sessions.records import SessionError, SessionInfo
from chatterm.terminal.sanitize import cleaned, one_line
from models.units import counted

LIMIT = 60
"""The most characters of a title made from a message."""
UNTITLED = "Untitled"
_MOST_WORDS = 10
_NO_TITLES = frozenset(
    ("sure", "here", "here's", "certainly", "okay", "ok", "i", "i'm", "as", "sorry", "user", "assistant")
)
"""First words of replies that are not titles."""

_ROLE = re.compile(
    r"^[\s*_\"]*(?:user|assistant|human|title|titel|titre|título)[\s*_]*:[\s*_]*", re.IGNORECASE
)
"""The role that a transcript or a model writes before the text."""
_OPEN = re.compile(r"^(?:\*\*|~~|`)+|(?:\*\*|~~|`)+$")
"""Marks left at either end because nothing closes them."""
_DECORATION = re.compile(r"^(?:(?:```\w*|[#>*+~`-]+|\d+[.)])(?:\s+|$))+")


def plain(line: str) -> str:
    """Return a line of Markdown as plain text: without marks for emphasis, code and links, or a leading role."""
    from markdown_it import MarkdownIt

    line = _DECORATION.sub("", line[: 6 * LIMIT].strip())
    tokens = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").parseInline(line)
    parts = (part.content for token in tokens for part in token.children or ())
    return one_line(_OPEN.sub("", _ROLE.sub("", "".join(parts))))


def make_title(message: str) -> str:
    """Return a title for a session that begins with `message`: its first words, on one line, as plain text."""
    lines = map(plain, cleaned(message[:4000]).splitlines())
    text = next(filter(None, lines), one_line(message))
    if len(text) <= LIMIT:
        return text or UNTITLED
    head = text[:LIMIT]  # the last place is for the ellipsis
    cut = head.rfind(" ", LIMIT // 2)
    return head[: cut if cut > 0 else LIMIT - 1].rstrip(" ,;:.") + "…"


def made_title(said: str) -> str:
    """Return the title in a model's reply to a request for one; "" if none is usable."""
    line = next((line for line in cleaned(said).splitlines() if line.strip()), "")
    line = plain(one_line(line, 4 * LIMIT))
    title = line.strip(" \t*_#`\"'“”„«».:-")
    words = title.casefold().split()
    repeats = len(set(words)) < len(words) - 1 or re.search(r"(.{1,8})\1{3}", title) is not None
    if len(title) > LIMIT or len(words) > _MOST_WORDS or repeats or not re.search(r"[^\W\d_]", title):
        return ""
    return "" if words[0] in _NO_TITLES or line.endswith((":", "?!")) else title


def given_title(text: str) -> str:
    """Return a title that the user gave, on one line. Raises SessionError if nothing of it can be shown."""
    title = one_line(text, 200)
    if not title:
        raise SessionError("The title is empty; write one.")
    return title


def messages_text(count: int) -> str:
    """Return a number of messages in words: "1 message", "1,204 messages"."""
    return counted(count, "message")


def extent_text(info: SessionInfo) -> str:
    """Return how many messages a session shows, and its branches if it has several: "3 messages, 2 branches"."""
    branches = f", {counted(info.branches, 'branch')}" if info.branches > 1 else ""
    return messages_text(info.messages) + branches


def matching_line(texts: Iterable[str], words: list[str]) -> str:
    """Return the first line of `texts` with the most of `words`; without words the first line that is not blank.

    A long line is cut to begin near the first of the words.
    """
    best, most = "", 0
    tests = [re.compile(re.escape(word), re.IGNORECASE) for word in words]
    for text in texts:
        for line in filter(str.strip, text.splitlines()):
            count = sum(test.search(line) is not None for test in tests)
            if not words or count > most:
                best, most = line, count
            if not words or most == len(words):
                return _near(best, tests)
    return _near(best, tests)


def _near(line: str, tests: list[re.Pattern[str]]) -> str:
    """Return the part of a long line that begins some words before the first match."""
    line = one_line(line, 10_000)
    first = min((match.start() for test in tests if (match := test.search(line))), default=0)
    start = line.rfind(" ", 0, first - 30) + 1 if first > 50 else 0
    return ("…" if start else "") + line[start : start + 400]


def pick(sessions: Iterable[SessionInfo], name: str) -> SessionInfo:
    """Return the session meant by `name`: its id, its title, the start of its id, or a part of its title.

    The first of these that fits any session decides. Raises SessionError if none or several fit.
    """
    known = list(sessions)
    wanted = one_line(name).casefold()
    tests = (
        lambda s: s.id == wanted,
        lambda s: s.title.casefold() == wanted,
        lambda s: len(wanted) >= 4 and s.id.startswith(wanted),
        lambda s: s.title.casefold().startswith(wanted),
        lambda s: wanted in s.title.casefold(),
    )
    for fits in tests if wanted else ():
        found = [session for session in known if fits(session)]
        if len(found) == 1:
            return found[0]
        if found:
            some = ", ".join(f"{s.id} ({one_line(s.title, 40)})" for s in found[:3])
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise SessionError(f"Several sessions match {one_line(name, 60)!r}: {some}{more}; give an id.")
    raise SessionError(f"Unknown session {one_line(name, 60)!r}; chatterm sessions list shows them all.")
