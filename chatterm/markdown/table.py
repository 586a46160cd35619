"""Tables: quiet columns, one rule under the header, cells that wrap."""

from chatterm.markdown.lines import Line, Run, cells, line_cells, padded, styled, wrap

_GAP = "   "
_NARROWEST = 4


def table_lines(rows: list[list[list[Run]]], aligns: list[str], width: int) -> list[Line]:
    """`rows[0]` is the header; `aligns` says left, center or right for each column."""
    columns = max(len(row) for row in rows)
    rows = [[*row, *([[]] * (columns - len(row)))] for row in rows]
    aligns = [*aligns, *["left"] * (columns - len(aligns))]
    wanted = [max(max(line_cells(row[column]) for row in rows), 1) for column in range(columns)]
    room = width - cells(_GAP) * (columns - 1)
    if room < columns * _NARROWEST:
        return _stacked(rows, width)
    sizes = _shrunk(wanted, room)
    lines: list[Line] = []
    for number, row in enumerate(rows):
        lines += _row(row, sizes, aligns, "strong" if number == 0 else "")
        if number == 0:
            lines.append([("─" * (sum(sizes) + cells(_GAP) * (columns - 1)), "rule")])
    return lines


def _shrunk(wanted: list[int], room: int) -> list[int]:
    """Column widths that fit: narrow columns keep what they want, wide ones share what is left."""
    sizes = [0] * len(wanted)
    left = room
    by_size = sorted(range(len(wanted)), key=lambda column: wanted[column])
    for number, column in enumerate(by_size):
        sizes[column] = min(wanted[column], max(left // (len(wanted) - number), _NARROWEST))
        left -= sizes[column]
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


def _stacked(rows: list[list[list[Run]]], width: int) -> list[Line]:
    """Too many columns for the screen: each row as a list of `header  value`."""
    lines: list[Line] = []
    for row in rows[1:]:
        if lines:
            lines.append([])
        for head, cell in zip(rows[0], row, strict=True):
            lines += wrap([*styled(head, "strong"), ("  ", ""), *cell], width)
    return lines
