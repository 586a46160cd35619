r"""Parser rules for formulas (`\( a^2 \)`), for footnotes and for definitions (`[^1]: a footnote`), which stay text.

Nothing that a model wrote may vanish. A reference that is defined further down cannot be a link while the text streams,
so every definition stays text, on a line of its own.
"""

import re
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token

_DEFINED = "definition"
"""The key in a paragraph token's `meta` that marks a definition: two in a row have no empty line between them."""

_INLINE = re.compile(r"\\\(.+?\\\)|\\\[.+?\\\]|\$\$.+?\$\$|\$(?![\s$])[^$\n]*(?<!\s)\$(?!\w)", re.DOTALL)
_SIGNS = re.compile(r"[\\^_=<>+]|^\$\w\$$")
"""One of these is in a formula between single dollars; two prices have none of them."""
_FOOTNOTE = re.compile(r"\[\^([^\s\[\]^]{1,20})\]")
_DEFINITION = re.compile(r"\[(?:\\.|[^\[\]\\])+\]:(?=\s|$)")
_OPENERS = {"\\[": "\\]", "$$": "$$"}


def is_definition(token: Token) -> bool:
    return _DEFINED in token.meta


def use_literals(parser: MarkdownIt) -> MarkdownIt:
    """Have `parser` find formulas and footnotes, and keep definitions as text."""
    parser.disable("reference")
    parser.inline.ruler.before("link", "footnote", _footnote)
    parser.inline.ruler.before("escape", "formula", _formula)
    interrupts: Any = {"alt": ["paragraph", "blockquote", "list"]}
    parser.block.ruler.before("fence", "formula_block", _formula_block, interrupts)
    parser.block.ruler.before("lheading", "definition", _definition, interrupts)
    return parser


def _formula(state: StateInline, silent: bool) -> bool:
    if state.src[state.pos] not in "\\$":
        return False
    match = _INLINE.match(state.src, state.pos, state.posMax)
    if match is None or (match[0][1] not in "($[" and _SIGNS.search(match[0]) is None):
        return False
    if not silent:
        state.push("formula", "", 0).content = match[0]
    state.pos = match.end()
    return True


def _footnote(state: StateInline, silent: bool) -> bool:
    match = _FOOTNOTE.match(state.src, state.pos, state.posMax) if state.src[state.pos] == "[" else None
    if match is None:
        return False
    if not silent:
        state.push("footnote", "", 0).content = match[1]
    defines = state.pos == 0 and state.src.startswith(":", match.end())
    state.pos = match.end() + defines
    return True


def _line(state: StateBlock, number: int) -> str:
    return state.src[state.bMarks[number] + state.tShift[number] : state.eMarks[number]]


def _formula_block(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    r"""Match lines from one that begins with `\[`, or is `$$`, to the one that closes it, or to an empty one."""
    if state.is_code_block(start):
        return False
    first = _line(state, start).rstrip()
    opener = next((mark for mark in _OPENERS if first.startswith(mark)), None)
    if opener is None or (opener == "$$" and first != "$$"):
        return False
    closer, last = _OPENERS[opener], start
    closed = closer in first[2:]
    if closed and not first.endswith(closer):
        return False  # a formula in a line of text
    while (
        not closed
        and last + 1 < end
        and not state.isEmpty(last + 1)
        and state.sCount[last + 1] >= state.blkIndent
    ):
        last += 1
        closed = _line(state, last).rstrip().endswith(closer)
    if silent:
        return True
    state.line = last + 1
    token = state.push("formula_block", "", 0)
    token.content = state.getLines(start, last + 1, state.blkIndent, False).rstrip()
    token.map = [start, state.line]
    return True


def _definition(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """Match a line `[name]: text` and the lines of text that follow it, as a paragraph."""
    if state.is_code_block(start) or _DEFINITION.match(_line(state, start)) is None:
        return False
    if silent:
        return True
    last = start
    while last + 1 < end and not state.isEmpty(last + 1) and not _begins_block(state, last + 1, end):
        last += 1
    state.line = last + 1
    opening = state.push("paragraph_open", "p", 1)
    opening.map, opening.meta = [start, state.line], {_DEFINED: True}
    inline = state.push("inline", "", 0)
    inline.content = state.getLines(start, state.line, state.blkIndent, False).strip()
    inline.map, inline.children = [start, state.line], []
    state.push("paragraph_close", "p", -1)
    return True


def _begins_block(state: StateBlock, line: int, end: int) -> bool:
    rules = state.md.block.ruler.getRules("paragraph")
    return state.sCount[line] < state.blkIndent or any(rule(state, line, end, True) for rule in rules)
