"""An answer that is JSON, as a tree whose branches can be folded. Numbers and names stand as the model wrote them."""

import json
from dataclasses import dataclass
from typing import Any

from chatterm.markdown.lines import FixedLine, Line, cells, elided, wrap
from chatterm.terminal.sanitize import visible
from models.units import counted

_MOST_CHARACTERS, _MOST_NODES = 200_000, 5_000
"""Limits above which an answer stays text."""
_STEP = 2
_LEAST_ROOM = 16
"""Fewest columns of a value, however deeply it is nested."""


class _Number(str):
    """A number as it was written."""

    __slots__ = ()


class _Pairs(list[tuple[str, Any]]):
    """An object, in which a name may occur twice."""


@dataclass(slots=True)
class _Node:
    depth: int
    name: str
    value: str
    """The JSON of a leaf; "" if there is anything below."""
    style: str
    below: int = 0
    """The number of nodes below it, at any depth; they follow it."""
    summary: str = ""
    is_open: bool = True


class JsonTree:
    """JSON as a tree of nodes, laid out in lines that each belong to a node."""

    def __init__(self, nodes: list[_Node]) -> None:
        self._nodes = nodes
        self._owners: list[int] = []

    @classmethod
    def of(cls, text: str) -> "JsonTree | None":
        """Parse a text; return None if it is no JSON object or list, is empty, or is too large."""
        text = text.strip()
        if not text.startswith(("{", "[")) or len(text) > _MOST_CHARACTERS:
            return None
        try:
            value = json.loads(
                text,
                object_pairs_hook=_Pairs,
                parse_int=_Number,
                parse_float=_Number,
                parse_constant=_not_json,
            )
        except (ValueError, RecursionError):
            return None
        nodes = _flat(value)
        return cls(nodes) if nodes else None

    @property
    def count(self) -> str:
        """The number of values, in words."""
        return counted(sum(not node.below for node in self._nodes), "value")

    @property
    def has_depth(self) -> bool:
        """Whether anything can be folded."""
        return any(node.below for node in self._nodes)

    @property
    def is_folded(self) -> bool:
        """Whether every branch is folded."""
        return self.has_depth and not any(node.below and node.is_open for node in self._nodes)

    def fold(self, is_open: bool) -> None:
        """Open every branch, or fold every one."""
        for node in self._nodes:
            node.is_open = is_open or not node.below

    def toggle(self, row: int) -> bool:
        """Fold or open the branch on a line of the latest layout; return False if there is none."""
        if not 0 <= row < len(self._owners):
            return False
        node = self._nodes[self._owners[row]]
        if node.below:
            node.is_open = not node.is_open
        return bool(node.below)

    def lines(self, width: int) -> list[FixedLine]:
        """Return the lines that are not folded away."""
        found: list[FixedLine] = []
        self._owners = []
        index = 0
        while index < len(self._nodes):
            node = self._nodes[index]
            lines = _node_lines(node, width)
            found += map(tuple, lines)
            self._owners += [index] * len(lines)
            index += 1 if node.is_open else 1 + node.below
        return found


def _not_json(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _flat(value: Any) -> list[_Node]:
    """Return a node for every value below this one, each before those below it; [] if there are too many."""
    nodes: list[_Node] = []
    stack = [(0, item) for item in reversed(_items(value))]
    while stack:
        depth, (name, value) = stack.pop()
        below = _items(value)
        if below:
            kind = "value" if isinstance(value, _Pairs) else "item"
            nodes.append(_Node(depth, name, "", "muted", summary=counted(len(below), kind)))
            stack += [(depth + 1, item) for item in reversed(below)]
        else:
            nodes.append(_Node(depth, name, *_leaf(value)))
        if len(nodes) + len(stack) > _MOST_NODES:
            return []
    above: list[int] = []
    for index, node in enumerate(nodes):
        _close(nodes, above, node.depth, index)
        above.append(index)
    _close(nodes, above, 0, len(nodes))
    return nodes


def _close(nodes: list[_Node], above: list[int], depth: int, end: int) -> None:
    """Remove the nodes of this depth or deeper from `above`: nothing more is below them, so it can be counted."""
    while above and nodes[above[-1]].depth >= depth:
        last = above.pop()
        nodes[last].below = end - last - 1


def _items(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, _Pairs):
        return [(_written(name)[1:-1], below) for name, below in value]
    return [(str(number), below) for number, below in enumerate(value, 1)] if isinstance(value, list) else []


def _written(text: str) -> str:
    """Return a text as JSON on one line: separators of lines and paragraphs are escaped as well."""
    written = json.dumps(text, ensure_ascii=False)
    return visible(written.replace("\u2028", r"\u2028").replace("\u2029", r"\u2029"))


def _leaf(value: Any) -> tuple[str, str]:
    """Return the JSON of a value without anything below, and its style."""
    if isinstance(value, _Number):
        return visible(value), "code-number"
    if isinstance(value, str):
        return _written(value), "code-string"
    if isinstance(value, _Pairs | list):
        return "{}" if isinstance(value, _Pairs) else "[]", "muted"
    return json.dumps(value), "code-keyword"


def _node_lines(node: _Node, width: int) -> list[Line]:
    indent = min(node.depth * _STEP, max(width - _LEAST_ROOM, 0))
    mark = "  " if not node.below else "▾ " if node.is_open else "▸ "
    room = max(width - indent - 2, 1)
    name = elided(node.name, max(room // 2, 1))
    head: Line = [(" " * indent, ""), (mark, "muted"), (name, "code-name")]
    if node.below:
        return [
            [*head, *([] if node.is_open else [(elided(f" · {node.summary}", room - cells(name)), "muted")])]
        ]
    taken = cells(name) + 2
    first, *rest = wrap([(node.value, node.style)], max(room - taken, 1))
    return [[*head, (": ", "muted"), *first], *([(" " * (indent + 2 + taken), ""), *line] for line in rest)]
