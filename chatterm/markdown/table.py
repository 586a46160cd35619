"""Tables: columns without borders, a rule under the header. Cells wrap at spaces; if even their longest words do not
fit side by side, every row is shown as a record.
"""

from chatterm.markdown.lines import Line, Run, line_cells, longest_word, padded, styled, wrap

_GAP = "   "


def table_lines(rows: list[list[list[Run]]], aligns: list[str], width: int) -> list[Line]:
    """Lay out a table: `rows[0]` is the header; `aligns` says left, center or right for each column."""
    columns = max(len(row) for row in rows)
    rows = [[*row, *([[]] * (columns - len(row)))] for row in rows]
    aligns = [*aligns, *["left"] * (columns - len(aligns))][:columns]
    room = width - len(_GAP) * (columns - 1)
    needed = [max(max(longest_word(row[column]) for row in rows), 1) for column in range(columns)]
    if sum(needed) > room:
        return _records(rows, width)
    wanted = [max(_widest(row[column]) for row in rows) for column in range(columns)]
    sizes = _sizes(needed, wanted, room)
    blocks = [_row(row, sizes, aligns, "" if number else "strong") for number, row in enumerate(rows)]
    across = sum(sizes) + len(_GAP) * (columns - 1)
    between: list[Line] = [[("╌" * across, "rule")]] if any(len(block) > 1 for block in blocks[1:]) else []
    lines = [*blocks[0], [("─" * across, "rule")]]
    for number, block in enumerate(blocks[1:]):
        lines += (between if number else []) + block
    return lines


def _widest(cell: list[Run]) -> int:
    """Return the columns of the longest line of a cell."""
    ends = [number for number, (text, _) in enumerate(cell) if text == "\n"]
    return max(
        line_cells(cell[a:b]) for a, b in zip([0, *(end + 1 for end in ends)], [*ends, None], strict=True)
    )


def _sizes(needed: list[int], wanted: list[int], room: int) -> list[int]:
    """Return column widths that fit: each column gets what it needs, and those that want the least more choose first
    from equal shares of what is left.
    """
    sizes, left = list(needed), room - sum(needed)
    by_wish = sorted(range(len(sizes)), key=lambda column: wanted[column] - needed[column])
    for number, column in enumerate(by_wish):
        more = min(max(wanted[column] - needed[column], 0), left // (len(sizes) - number))
        sizes[column] += more
        left -= more
    return sizes


def _row(row: list[list[Run]], sizes: list[int], aligns: list[str], style: str) -> list[Line]:
    wrapped = [wrap(cell, size) for cell, size in zip(row, sizes, strict=True)]
    lines: list[Line] = []
    for number in range(max(len(cell) for cell in wrapped)):
        line: Line = []
        for cell, size, align in zip(wrapped, sizes, aligns, strict=True):
            content = [run for run in cell[number] if run[0]] if number < len(cell) else []
            if line:
                line.append((_GAP, ""))
            free = size - line_cells(content)
            left = free if align == "right" else free // 2 if align == "center" else 0
            line += [(" " * left, "")] if left > 0 else []
            line += padded(styled(content, style) if style else content, size - max(left, 0), "")
        lines.append(line)
    return lines


def _records(rows: list[list[list[Run]]], width: int) -> list[Line]:
    """Lay out each row as lines of `column: value`, with a rule between two rows."""
    if len(rows) == 1:
        return [line for cell in rows[0] for line in wrap(styled(cell, "strong"), width)]
    lines: list[Line] = []
    for row in rows[1:]:
        if lines:
            lines.append([("╌" * width, "rule")])
        for name, cell in zip(rows[0], row, strict=True):
            label: Line = [*styled(name, "strong"), (": ", "")] if line_cells(name) else []
            if label or line_cells(cell):
                lines += wrap([*label, *cell], width)
    return lines
