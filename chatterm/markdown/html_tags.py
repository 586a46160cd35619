"""Parser rules for the simple HTML that models write: `<br>`, `<b>bold</b>`, `x<sup>2</sup>`. Other tags stay text."""

import re

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline

_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
_OPENING = re.compile(r"<([a-z]{1,6})>", re.IGNORECASE)
_TOKENS = {"b": "strong", "strong": "strong", "i": "em", "em": "em", "u": "em", "var": "em", "cite": "em"}
_TOKENS |= {"s": "s", "del": "s", "strike": "s", "mark": "strong", "summary": "strong"}
_TOKENS |= {"sup": "sup", "sub": "sub", "code": "code", "kbd": "code", "samp": "code", "tt": "code"}


def use_tags(parser: MarkdownIt) -> MarkdownIt:
    """Have `parser` read these tags where they are closed in the same paragraph."""
    parser.inline.ruler.before("autolink", "tag", _tag)
    return parser


def _tag(state: StateInline, silent: bool) -> bool:
    if state.src[state.pos] != "<":
        return False
    if (broken := _BREAK.match(state.src, state.pos, state.posMax)) is not None:
        if not silent:
            state.push("hardbreak", "br", 0)
        state.pos = broken.end()
        return True
    opening = _OPENING.match(state.src, state.pos, state.posMax)
    name = opening[1].lower() if opening else ""
    if opening is None or name not in _TOKENS:
        return False
    closing = f"</{name}>"
    start, end = opening.end(), state.src[: state.posMax].lower().find(closing, opening.end())
    if end <= start:
        return False
    kind = _TOKENS[name]
    if not silent:
        if kind in ("code", "sup", "sub"):
            state.push(f"{kind}_inline", name, 0).content = state.src[start:end]
        else:
            _push_within(state, kind, start, end)
    state.pos = end + len(closing)
    return True


def _push_within(state: StateInline, kind: str, start: int, end: int) -> None:
    state.push(f"{kind}_open", kind, 1)
    outer, state.posMax, state.pos = state.posMax, end, start
    state.md.inline.tokenize(state)
    state.posMax = outer
    state.push(f"{kind}_close", kind, -1)
