"""What commands say: the tables of /help and /stats as lines, the words of /think."""

from chatterm.backend import Figures, ModelInfo, ThinkMode, TurnStats
from chatterm.commands import COMMANDS
from chatterm.figures import SessionStats, seconds_text
from chatterm.markdown.lines import Line, Run, cells, wrap
from chatterm.markdown.table import table_lines
from models.units import bytes_text

_KEYS = (
    ("Enter", "Send"),
    ("Ctrl+J", "Break the line (Shift+Enter, Alt+Enter)"),
    ("Esc", "Stop the answer; what was said stays"),
    ("Ctrl+C", "Stop; twice: quit; copies a selection"),
    ("Ctrl+T", "Open or close the thinking (or click)"),
    ("Page Up/Down", "Scroll; Ctrl+Home, Ctrl+End: the ends"),
    ("Ctrl+P", "Command palette"),
    ("F1", "This help"),
)


THINKING: dict[ThinkMode, str] = {
    "on": "The model thinks before it answers.",
    "off": "The model answers without thinking.",
    "auto": "The model thinks where its template says so.",
}


def help_lines(width: int) -> list[Line]:
    commands = [(command.usage, command.help) for command in COMMANDS]
    column = min(max(cells(name) for name, _ in (*commands, *_KEYS)) + 3, width // 2)
    keys = _described("Keys", list(_KEYS), width, column)
    return [*_described("Commands", commands, width, column), [], *keys]


def _described(title: str, rows: list[tuple[str, str]], width: int, column: int) -> list[Line]:
    lines: list[Line] = [[(title, "heading")]]
    for name, text in rows:
        left, right = wrap([(name, "")], column - 2), wrap([(text, "muted")], width - column)
        for row in range(max(len(left), len(right))):
            start = left[row] if row < len(left) else []
            gap = column - sum(cells(part) for part, _ in start)
            lines.append([*start, (" " * gap, ""), *(right[row] if row < len(right) else [])])
    return lines


def stats_lines(
    width: int, turn: TurnStats | None, session: SessionStats, info: ModelInfo | None, figures: Figures | None
) -> list[Line]:
    """This turn beside the session, then what the engine holds."""
    lines: list[Line] = [[("Statistics", "heading")]]
    if turn is None and not session.turns:
        lines.append([("Nothing has been answered yet.", "muted")])
    else:
        lines += table_lines(_rows(turn or TurnStats(), session), ["left", "right", "right"], width)
    if info is not None:
        about = f"{info.name} · {info.device} · {info.dtype} · context {info.context_length:,} tokens"
        lines += [[], *wrap([(about, "muted")], width)]
    if figures is not None:
        blocks = (
            f"{figures.attention} attention · {figures.decode} · weights {bytes_text(figures.weight_bytes)}"
            f" · KV cache {bytes_text(figures.kv_bytes)} in blocks of {figures.block_size} tokens:"
            f" {figures.blocks_held:,} held, {figures.blocks_cached:,} cached, {figures.blocks_free:,} free"
        )
        lines += wrap([(blocks, "muted")], width)
    return lines


def _rows(turn: TurnStats, session: SessionStats) -> list[list[list[Run]]]:
    ttft = sum(session.ttfts) / len(session.ttfts) if session.ttfts else 0.0
    decode = max(session.generated_tokens - session.turns, 0) / session.decode_s if session.decode_s else 0.0
    table: list[tuple[str, str, str]] = [
        ("", "this turn", f"session ({session.turns})"),
        ("prompt tokens", f"{turn.prompt_tokens:,}", f"{session.prompt_tokens:,}"),
        ("  from the cache", f"{turn.cached_tokens:,}", f"{session.cached_tokens:,}"),
        ("  computed", f"{turn.prefilled_tokens:,}", f"{session.prefilled_tokens:,}"),
        ("generated tokens", f"{turn.generated_tokens:,}", f"{session.generated_tokens:,}"),
        ("  of them thinking", f"{turn.reasoning_tokens:,}", f"{session.reasoning_tokens:,}"),
        ("first token after", seconds_text(turn.ttft_s), f"{seconds_text(ttft)} (mean)"),
        (
            "prefill",
            _rate(turn.prefilled_tokens, turn.prefill_s),
            _rate(session.prefilled_tokens, session.prefill_s),
        ),
        ("decode", f"{turn.decode_tokens_per_s:,.1f} tok/s", f"{decode:,.1f} tok/s"),
        ("time decoding", seconds_text(turn.decode_s), seconds_text(session.decode_s)),
    ]
    return [[[(cell, "")] for cell in row] for row in table]


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:,.0f} tok/s" if seconds > 0 else "–"
