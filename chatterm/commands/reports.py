"""The output of commands: the tables of /help and /set as lines, the messages of /think."""

from collections.abc import Iterable

from chatterm.backends.backend import ModelInfo, ThinkMode
from chatterm.commands.registry import COMMANDS, KEYS, plain_commands, prompt_commands
from chatterm.commands.sampling import InForce
from chatterm.markdown.lines import Line, cells, line_cells, wrap
from chatterm.settings.settings import SamplingSettings

LOADING = "The model is still loading."
NO_ANSWER = "There is no answer yet."
THINKING: dict[ThinkMode, str] = {
    "on": "The model thinks before it answers.",
    "off": "The model answers without thinking.",
    "auto": "The model thinks when its template says so.",
}


def no_thinking(info: ModelInfo | None) -> str:
    """Return why the model cannot think; "" if it can, or if no model is loaded yet."""
    if info is None or info.thinks:
        return ""
    return f"{info.name} cannot think; use /model to choose one that can."


def thinking_text(mode: ThinkMode, info: ModelInfo | None) -> str:
    """Describe what the model does in this mode."""
    if info is not None and info.is_remote and mode != "auto":
        return f"The server is asked for {'thinking' if mode == 'on' else 'no thinking'}; not every model can do that."
    return (
        THINKING[mode] if info is None or info.thinks else f"{info.name} cannot think; it answers directly."
    )


def undone_text(count: int) -> str:
    """Return a hint how to restore undone messages; "" if there are none."""
    if not count:
        return ""
    what, which = ("message", "it") if count == 1 else ("messages", "one")
    return f"{count:,} {what} undone; /redo (Alt+Z) restores {which}."


def help_lines(width: int) -> list[Line]:
    """Return the commands with their keys, the prompts, and the keys that do not belong to a command."""
    column = min(max(cells(command.usage) for command in COMMANDS) + 2, width * 2 // 5)
    keys = max(cells(command.key) for command in COMMANDS) + 2
    narrow = width - column - keys < 36
    rows = [[command.usage, command.key, command.help] for command in COMMANDS]
    if narrow:  # the keys follow what they do
        rows = [[usage, f"{text} ({key})" if key else text] for usage, key, text in rows]
    columns = [column] if narrow else [column, keys]
    lines = [*_described("Commands", rows, width, columns), []]
    for title, prompts in zip(("Your prompts", "Prompts of MCP servers"), prompt_commands(), strict=True):
        if prompts:
            rows = [[command.usage, command.help] for command in prompts]
            lines += [*_described(title, rows, width, [column]), []]
    plain = [[key, text] for key, text in KEYS]
    return lines + _described("Keys", plain, width, [min(max(cells(key) for key, _ in KEYS) + 2, column)])


def plain_help() -> list[str]:
    """Return the commands of a chat without a screen, and how to write there."""
    return [
        "A line is a message; one that ends with \\ continues on the next line.",
        "Ctrl-C stops an answer, Ctrl-D quits. Commands:",
        *(f"  {command.usage}: {command.help}" for command in plain_commands()),
    ]


def sampling_lines(settings: Iterable[InForce], width: int) -> list[Line]:
    """Return how to change a setting of /set, then each setting: its value, where that comes from, its meaning."""
    from chatterm.settings.text import field_docs

    docs = field_docs(SamplingSettings)
    rows = [[s.name, s.text, s.source or "not set", docs[s.name]] for s in settings]
    columns = [20, 10, 22]
    if width < 64:  # the meaning goes below
        lines: list[Line] = []
        for name, text, source, doc in rows:
            lines += wrap([(f"{name} ", ""), (text, "accent"), (f" ({source})", "muted")], width)
            lines += [[("  ", ""), *line] for line in wrap([(doc, "muted")], width - 2)]
    else:
        if width < sum(columns) + 40:  # the source follows the meaning
            rows = [[name, text, f"{doc} ({source})"] for name, text, source, doc in rows]
            columns = columns[:2]
        lines = _described("", rows, width, columns)
    ways = "/set NAME VALUE changes one for this conversation, /set NAME default resets it. "
    return [*wrap([(ways + "Changes apply from the next answer on.", "muted")], width), [], *lines]


def _described(title: str, rows: list[list[str]], width: int, columns: list[int]) -> list[Line]:
    """Lay out rows in columns. `columns` are the widths of all but the last, which has the rest of `width`."""
    sizes = [*columns, width - sum(columns)]
    lines: list[Line] = [[(title, "heading")]] if title else []
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
