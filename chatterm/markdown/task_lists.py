"""A parser rule for task lists: `- [x] done`. It marks the items, whose text then begins behind the box."""

import re

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token

_TASK = "task"
_BOX = re.compile(r"\[([ xX])\]\s+(?=\S)")


def use_tasks(parser: MarkdownIt) -> MarkdownIt:
    """Have `parser` mark the items of task lists."""
    parser.core.ruler.after("inline", "tasks", _mark)
    return parser


def task(item: Token) -> bool | None:
    """Return whether a list item is a task that is done; None if it is no task."""
    return item.meta.get(_TASK)


def _mark(state: StateCore) -> None:
    tokens = state.tokens
    for item, paragraph, inline in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if item.type != "list_item_open" or paragraph.type != "paragraph_open" or not inline.children:
            continue
        first = inline.children[0]
        box = _BOX.match(first.content) if first.type == "text" else None
        if box is not None:
            item.meta[_TASK] = box[1] != " "
            first.content = first.content[box.end() :]
