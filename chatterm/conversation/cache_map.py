"""Draw the KV blocks as coloured squares with a legend, as lines for a screen or for the conversation."""

from collections.abc import Sequence

from chatterm.backends.backend import CachedChunk
from chatterm.conversation.figures import count_text
from chatterm.markdown.lines import Line, Run, line_cells, wrap
from engine.cache.block_map import BlockMap, BlockState
from models.units import bytes_text, counted

_STYLES = {
    BlockState.FREE: "rule",
    BlockState.CACHED: "muted",
    BlockState.HELD: "primary",
    BlockState.SHARED: "accent",
    BlockState.MASKED: "code-string",
}
_MARKS = "·▪■▣□"
"""One mark per state, distinguishable without colours."""
PLAIN_MARKS = ".+#@o"
"""The same for terminals that show only ASCII."""
_NAMES = {
    BlockState.HELD: "this branch",
    BlockState.SHARED: "this branch and others",
    BlockState.MASKED: "thinking left out",
    BlockState.CACHED: "other branches",
    BlockState.FREE: "free",
}
_STRIP_ROWS = 4
"""Most lines of the strip that shows the branch in the order of the conversation."""


def cache_lines(
    found: BlockMap, width: int, height: int = 24, *, plain: bool = False, chunks: Sequence[CachedChunk] = ()
) -> list[Line]:
    """Return the branch in conversation order, then every block in memory order, then a legend of the colours.

    `chunks` are documents: for each, a line says how much of it is cached and what sharing saves. The map takes the
    rows that `height` leaves; if there are more blocks than squares, several share one.
    """
    marks = PLAIN_MARKS if plain else _MARKS
    blocks = f"{counted(len(found.states), 'block')} of {counted(found.block_size, 'token')}"
    if found.token_bytes:
        blocks += f" in {found.kv_dtype}, {bytes_text(found.token_bytes)} a token"
    head: list[Line] = [
        *wrap([("KV cache", "heading"), (f"  {blocks}", "muted")], width),
        [],
        *wrap(_about(found), width),
        *(line for chunk in chunks for line in wrap(_kept(chunk), width)),
    ]
    if found.path:
        own = bytes(found.states[id] for id in found.path)
        head += [[], *_squares("In the order of the conversation", own, width, _STRIP_ROWS, marks)]
    legend = _legend(found, width, marks)
    rows = max(height - len(head) - len(legend) - 3, 2)
    whole = _squares("In the order of memory", found.states, width, rows, marks)
    return [*head, [], *whole, [], *legend]


def _about(found: BlockMap) -> list[Run]:
    """Describe in a sentence or two how much of the branch is cached and shared."""
    if not found.tokens:
        return [("There are no messages on this branch yet.", "muted")]
    runs: list[Run] = [("This branch  ", "strong"), (f"{counted(found.tokens, 'token')}, ", "")]
    if found.present == found.tokens:
        runs.append(("all of them in the cache", ""))
    else:
        runs.append((f"{found.present:,} of them in the cache", ""))
    if found.shared:
        others = "another branch" if found.others == 1 else counted(found.others, "other branch")
        runs.append((f"; {found.shared:,} shared with {others} and computed only once", "accent"))
    if found.hidden:
        runs.append((f"; {counted(found.hidden, 'token')} of thinking left out", "code-string"))
    if found.marks is not None:
        places = counted(found.marks, "place")
        runs.append(
            (f". What recurrent layers remember is kept at {places}, where a retry can begin", "accent")
        )
    return [*runs, (".", "")]


def _kept(chunk: CachedChunk) -> list[Run]:
    """Describe how much of a document is cached, and what sharing it between conversations saves."""
    runs: list[Run] = [("Library  ", "strong"), (f"{chunk.name}: ", "accent")]
    runs.append((f"{chunk.present:,} of {counted(chunk.tokens, 'token')} in the cache", ""))
    if chunk.shared:
        runs.append((f"; {chunk.shared:,} shared with the documents before it", ""))
    if chunk.branches > 1:
        saved = f"; {chunk.branches:,} branches share it, which saves {bytes_text(chunk.saved_bytes)}"
        runs.append((saved, "accent"))
    return [*runs, (".", "")]


def _squares(title: str, states: bytes, width: int, rows: int, marks: str) -> list[Line]:
    """Return a title, then at most `rows` lines of squares separated by spaces."""
    across = max((width + 1) // 2, 1)
    each = max(-(-len(states) // (across * rows)), 1)
    # A square of several blocks shows the highest state among them: a short branch must not vanish.
    shown = [BlockState(max(states[at : at + each])) for at in range(0, len(states), each)]
    more = f", {counted(each, 'block')} per square" if each > 1 else ""
    lines = wrap([(title + more, "muted")], width)
    for at in range(0, len(shown), across):
        line: Line = []
        for state in shown[at : at + across]:
            style, text = _STYLES[state], marks[state] + " "
            if line and line[-1][1] == style:
                line[-1] = (line[-1][0] + text, style)
            else:
                line.append((text, style))
        line[-1] = (line[-1][0][:-1], line[-1][1])
        lines.append(line)
    return lines


def _legend(found: BlockMap, width: int, marks: str) -> list[Line]:
    """Return lines of marks, each with its name and count, as many side by side as fit."""
    lines: list[Line] = [[]]
    for state, name in _NAMES.items():
        count = found.count(state)
        if not count and state in (BlockState.SHARED, BlockState.MASKED):
            continue
        entry: Line = [(f"{marks[state]} ", _STYLES[state]), (f"{name} ", "muted"), (count_text(count), "")]
        if line_cells(entry) > width:
            entry[1] = ("", "")
        if lines[-1] and line_cells(lines[-1]) + 3 + line_cells(entry) > width:
            lines.append([])
        lines[-1] += ([("   ", "")] if lines[-1] else []) + entry
    return lines
