"""Markdown source as lines: paragraphs, headings, lists, quotes, code, tables."""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest

from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.deflist import deflist_plugin

from chatterm.markdown import formulas
from chatterm.markdown.formulas import as_unicode
from chatterm.markdown.highlight import highlight, is_ready
from chatterm.markdown.html_tags import use_tags
from chatterm.markdown.inline import inline_runs
from chatterm.markdown.lines import Line, Run, cells, chop, elided, padded, styled, wrap
from chatterm.markdown.literal import is_definition, use_literals
from chatterm.markdown.table import table_lines
from chatterm.markdown.task_lists import task, use_tasks
from chatterm.markdown.tint import GUESSED, marked

_COPY = "copy "
_BULLETS = "•◦▪"
_BOXES = "☐☑"
_HEADINGS = {"h1": "heading title", "h2": "heading", "h3": "strong"} | dict.fromkeys(
    ("h4", "h5", "h6"), "strong em"
)
_INDENT = 2
"""Columns before a definition, and before a formula that stands alone."""
_NARROW = 16
"""Below this many columns nothing is indented further."""


@dataclass(slots=True)
class _Node:
    token: Token
    children: list["_Node"] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return self.token.type.removesuffix("_open")


@lru_cache(maxsize=1)
def parser() -> MarkdownIt:
    """Return a parser of CommonMark with what models write besides; HTML stays text but for simple tags."""
    made = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).use(deflist_plugin)
    return use_tasks(use_tags(use_literals(made)))


def token_lines(tokens: list[Token], width: int, *, continued: bool = False) -> list[Line]:
    """Lay out the tokens of `parser`; `continued` says that a first code block continues one before it."""
    return _blocks(_tree(tokens), width, continued=continued)


def can_lay_out(tokens: list[Token]) -> bool:
    """Return whether all code and formulas can be shown as they should. If not, that is being prepared."""
    return all(is_ready(_language(token)) for token in tokens if token.type == "fence") and (
        formulas.is_ready() or not any(map(_has_formula, tokens))
    )


def _has_formula(token: Token) -> bool:
    return token.type == "formula_block" or any(child.type == "formula" for child in token.children or ())


def _tree(tokens: list[Token]) -> list[_Node]:
    top: list[_Node] = []
    stack = [top]
    for token in tokens:
        if token.nesting == -1:
            stack.pop()
            continue
        node = _Node(token)
        stack[-1].append(node)
        if token.nesting == 1:
            stack.append(node.children)
    return top


def _blocks(nodes: list[_Node], width: int, *, depth: int = 0, continued: bool = False) -> list[Line]:
    """Lay out blocks below each other, with an empty line between two, but none inside a tight list."""
    lines: list[Line] = []
    for number, node in enumerate(nodes):
        block = _block(node, width, depth, continued=continued and number == 0)
        before = nodes[number - 1].token if number else node.token
        tight = node.token.hidden or before.hidden or (is_definition(node.token) and is_definition(before))
        if lines and block and not tight:
            lines.append([])
        lines += block
    return lines


def _block(node: _Node, width: int, depth: int, *, continued: bool) -> list[Line]:
    match node.kind:
        case "paragraph":
            return wrap(_inline(node), width)
        case "heading" | "dt":
            style = _HEADINGS.get(node.token.tag, "strong")
            return [styled(line, style) for line in wrap(_inline(node), width)]
        case "fence" | "code_block":
            return _code(node.token, width, labelled=not continued)
        case "bullet_list" | "ordered_list":
            return _list(node, width, depth)
        case "blockquote":
            inner = _blocks(node.children, max(width - 2, _NARROW), depth=depth)
            return [[("▎ ", "quote-bar"), *styled(line, "quote")] for line in inner]
        case "dl":
            return _definitions(node, width, depth)
        case "dd":
            return _indented(_blocks(node.children, max(width - _INDENT, _NARROW), depth=depth))
        case "hr":
            return [[("─" * width, "rule")]]
        case "formula_block":
            return _formula(node.token.content, width)
        case "table":
            return _table(node, width)
        case "inline":
            return wrap(inline_runs(node.token.children or []), width)
        case _:
            return wrap([(node.token.content, "")], width) if node.token.content else []


def _inline(node: _Node) -> list[Run]:
    return [run for child in node.children for run in inline_runs(child.token.children or [])]


def _code(token: Token, width: int, *, labelled: bool) -> list[Line]:
    """Lay out code on its own background, with a blank column on both sides; long lines are broken."""
    lines: list[Line] = []
    if labelled:
        lines.append(_label(token.info.strip(), width))
    shown = highlight(token.content.rstrip("\n"), _language(token))
    for line, marks in zip_longest(shown, token.meta.get(GUESSED, ())[: len(shown)], fillvalue=()):
        lines += [[(" ", "code pad"), *part] for part in chop(marked(line, marks), width - 2)]
    return [padded(line, width, "code pad") for line in lines]


def _language(token: Token) -> str:
    return token.info.split()[0] if token.info.strip() else ""


def _label(language: str, width: int) -> Line:
    """Return a line with the language (and the rest of the info string) on the left, the copy button on the right."""
    name = elided(language, max(width - cells(_COPY) - 2, 0))
    gap = width - cells(name) - 1 - cells(_COPY)
    if gap < 0:
        return [(f" {language}"[:width], "code code-label")]
    return [(f" {name}", "code code-label"), (" " * gap, "code"), (_COPY, "code code-copy")]


def _list(node: _Node, width: int, depth: int) -> list[Line]:
    ordered = node.kind == "ordered_list"
    start = int(node.token.attrs.get("start", 1)) if ordered else 0
    last = start + len(node.children) - 1
    lines: list[Line] = []
    for number, item in enumerate(node.children, start):
        mark = f"{number}.".rjust(len(f"{last}.")) if ordered else _BULLETS[min(depth, len(_BULLETS) - 1)]
        if (is_done := task(item.token)) is not None:
            mark = f"{mark} {_BOXES[is_done]}" if ordered else _BOXES[is_done]
        indent = cells(mark) + 1
        body = _blocks(item.children, max(width - indent, _NARROW), depth=depth + 1) or [[]]
        if lines and not _is_tight(node):
            lines.append([])
        for row, line in enumerate(body):
            lines.append([(mark + " ", "bullet") if row == 0 else (" " * indent, ""), *line])
    return lines


def _formula(source: str, width: int) -> list[Line]:
    """Lay out a formula that stands alone, indented if it is shown in Unicode."""
    shown = as_unicode(source)
    if shown == source:
        return [line for row in source.split("\n") for line in wrap([(row, "")], width)]
    inner = max(width - _INDENT, _NARROW)
    return _indented([line for row in shown.split("\n") for line in wrap([(row, "em")], inner)])


def _definitions(node: _Node, width: int, depth: int) -> list[Line]:
    """Lay out terms, each with its definitions below it."""
    lines: list[Line] = []
    for child in node.children:
        if lines and child.kind == "dt":
            lines.append([])
        lines += _block(child, width, depth, continued=False)
    return lines


def _indented(lines: list[Line]) -> list[Line]:
    return [[(" " * _INDENT, ""), *line] for line in lines]


def _is_tight(node: _Node) -> bool:
    return all(
        child.token.hidden for item in node.children for child in item.children if child.kind == "paragraph"
    )


def _table(node: _Node, width: int) -> list[Line]:
    rows: list[list[list[Run]]] = []
    aligns: list[str] = []
    for section in node.children:
        for row in section.children:
            rows.append([_inline(cell) for cell in row.children])
            if not aligns:
                styles = [str(cell.token.attrs.get("style", "")) for cell in row.children]
                aligns = [style.removeprefix("text-align:") or "left" for style in styles]
    return table_lines(rows, aligns, width)
