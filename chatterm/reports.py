"""What commands say: the tables of /help as lines, the words of /think."""

from chatterm.backend import ModelInfo, ThinkMode
from chatterm.commands import COMMANDS, KEYS
from chatterm.markdown.lines import Line, cells, line_cells, wrap

THINKING: dict[ThinkMode, str] = {
    "on": "The model thinks before it answers.",
    "off": "The model answers without thinking.",
    "auto": "The model thinks where its template says so.",
}


def no_thinking(info: ModelInfo | None) -> str:
    """Why the model cannot be made to think; "" where it can, or where no model is loaded yet."""
    if info is None or info.thinks:
        return ""
    return f"{info.name} cannot think; /model chooses a model that can."


def thinking_text(mode: ThinkMode, info: ModelInfo | None) -> str:
    """What the model does in this mode."""
    return THINKING[mode] if info is None or info.thinks else f"{info.name} cannot think: it answers at once."


def help_lines(width: int) -> list[Line]:
    """The commands with their keys, then the keys that are no commands."""
    column = min(max(cells(command.usage) for command in COMMANDS) + 2, width * 2 // 5)
    keys = max(cells(command.key) for command in COMMANDS) + 2
    narrow = width - column - keys < 36
    rows = [[command.usage, command.key, command.help] for command in COMMANDS]
    if narrow:  # the keys stand behind what they do
        rows = [[usage, f"{text} ({key})" if key else text] for usage, key, text in rows]
    columns = [column] if narrow else [column, keys]
    lines = [*_described("Commands", rows, width, columns), []]
    plain = [[key, text] for key, text in KEYS]
    return lines + _described("Keys", plain, width, [min(max(cells(key) for key, _ in KEYS) + 2, column)])


def _described(title: str, rows: list[list[str]], width: int, columns: list[int]) -> list[Line]:
    """`columns` are the widths of all but the last, which has what is left."""
    sizes = [*columns, width - sum(columns)]
    lines: list[Line] = [[(title, "heading")]]
    for row in rows:
        styles = ["", *["accent"] * (len(row) - 2), "muted"]
        parts = [
            wrap([(text, style)], max(size - 2, 4) if number < len(columns) else size)
            for number, (text, style, size) in enumerate(zip(row, styles, sizes, strict=True))
        ]
        for number in range(max(map(len, parts))):
            line: Line = []
            for part, size in zip(parts, sizes, strict=True):
                here = part[number] if number < len(part) else []
                line += [*here, (" " * max(size - line_cells(here), 0), "")]
            lines.append(line[:-1])
    return lines
