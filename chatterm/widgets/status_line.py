"""The line below the composer: all the figures on a narrow screen, the keys on a wide one."""

from chatterm.conversation.figures import (
    Live,
    count_text,
    left_text,
    meter,
    progress_parts,
    rate_text,
    seconds_text,
    sparkline,
)
from chatterm.markdown.lines import Line, line_cells, shortened
from chatterm.widgets.canvas import Canvas
from chatterm.widgets.meter import context_bar, context_style
from models.units import counted

_WIDE = 90
"""Columns from which the time to the first token has its full name and the context bar its full width."""
KEYS = ("Enter send", "Ctrl+J new line", "Esc stop", "/ commands", "F1 help")
Part = list[Line]
"""One item in several forms, longest first: the first form that fits is shown."""


class StatusLine(Canvas):
    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._live: Live | None = None
        self._hint = ""
        self._keys_only = False
        self._mode = ""

    def show_mode(self, mode: str) -> None:
        """Show the mode of the vim keys; "" without them."""
        self._mode = mode
        self.refresh()

    def show(self, live: Live) -> None:
        if live != self._live:
            self._live = live
            self.refresh()

    def hint(self, text: str) -> None:
        """Show a hint in place of the figures; "" removes it."""
        if text != self._hint:
            self._hint = text
            self.refresh()

    def keys_only(self, on: bool) -> None:
        """Show only the keys if `on`, because the figures are shown elsewhere."""
        self._keys_only = on
        self.refresh()

    def build(self, width: int) -> list[Line]:
        if not self._mode:
            return self._lines(width)
        mode: Line = [(self._mode, "accent"), ("  ", "")]
        room = max(width - line_cells(mode), 1)
        return [[*mode, *line] for line in self._lines(room)]

    def _lines(self, width: int) -> list[Line]:
        if self._hint:
            return [[(shortened(self._hint, width), "warning")]]
        if self._live is None or self._keys_only:
            return [_joined([[[(key, "muted")]] for key in KEYS], width)]
        return [status_line(self._live, width)]


def status_line(live: Live, width: int) -> Line:
    """Return the line of figures, the most important first; parts that do not fit are left out whole."""
    parts = _parts(live, width)
    right = _context(live, 6 if width < 80 else 8 if width < _WIDE else 10)
    if line_cells(right) + line_cells(parts[0][-1]) + 2 > width:
        right = []  # on the narrowest screens the most important part has priority
    line = _joined(parts, width - line_cells(right) - (2 if right else 0))
    missing = width - line_cells(line) - line_cells(right)
    return [*line, (" " * missing, ""), *right]


def _joined(parts: list[Part], room: int) -> Line:
    """Return the parts that fit into `room` columns, separated by dots."""
    line: Line = []
    for part in parts:
        left = room - line_cells(line) - (3 if line else 0)
        shown = next((form for form in part if line_cells(form) <= left), None)
        if shown is not None:
            line += ([(" · ", "rule")] if line else []) + shown
    return line


def _parts(live: Live, width: int) -> list[Part]:
    if live.phase == "loading":
        if live.progress is None:
            return [[[("loading ", "muted"), *name] for name in _names(live)] + [[("loading", "muted")]]]
        progress = live.progress
        filled_bar: Line = []
        if progress.total:
            filled_bar = [(" ", ""), *meter(progress.done / progress.total, 12)]
        what, *rest = progress_parts(live)
        stage: Line = [(progress.stage, "muted"), *filled_bar]
        first: Line = [(f"{progress.stage} {what}", "muted"), *filled_bar]
        return [[first, stage, stage[:1]], *([[(part, "muted")]] for part in rest)]
    if live.phase == "absent":
        return [[[("no model: /model NAME loads one", "warning")], [("no model", "warning")]]]
    parts = [[part] for part in _figures(live, width)]
    names = _names(live)
    return [*parts, names] if parts else [names, [[("ready", "muted")]]]


def _names(live: Live) -> Part:
    """Return the model's name, then shorter forms: without its server, and without its publisher."""
    name, label = (live.info.name, live.info.label) if live.info else (live.model, live.model)
    return [[(text, "muted")] for text in dict.fromkeys((name, label, name.rsplit("/", 1)[-1]))]


def _figures(live: Live, width: int) -> list[Line]:
    parts: list[Line] = []
    if live.is_warming:
        parts.append([(f"caching {live.present:,} of {counted(live.used, 'token')}", "muted")])
        if live.left_s is not None:
            parts.append([(left_text(live.left_s), "muted")])
    elif (chunk := live.read) is not None:
        about = f"reading {shortened(chunk.name, 16)} {chunk.present:,} of {counted(chunk.tokens, 'token')} "
        parts.append([(about, "muted"), *meter(chunk.present / chunk.tokens, 10)])
        if live.left_s is not None:
            parts.append([(left_text(live.left_s), "muted")])
    if live.phase == "reading":
        figures = live.figures
        if figures is not None and figures.prefill_total:
            about = f"reading {figures.prefill_done:,} of {counted(figures.prefill_total, 'token')} "
            parts.append([(about, "muted"), *meter(figures.prefill_done / figures.prefill_total, 10)])
        if live.prefill_rate:
            parts.append([(rate_text(live.prefill_rate), "muted")])
        if live.left_s is not None:
            parts.append([(left_text(live.left_s), "muted")])
        return [*parts, [(f"{live.waited_s:.1f} s", "muted")]]
    if live.speed:
        parts.append([(sparkline(live.history, 6), "spark"), (f" {rate_text(live.speed)}".lstrip(), "")])
        if live.history:
            parts[-1].insert(1, (" ", ""))
    if live.ttft_s is not None:
        name = "first token" if width >= _WIDE else "first"
        parts.append([(f"{name} {seconds_text(live.ttft_s)}", "muted")])
    if live.cached is not None and live.computed is not None:
        parts.append([(f"{count_text(live.cached)} cached, {count_text(live.computed)} computed", "muted")])
    if (share := live.bandwidth_share) is not None:
        parts.append([(f"{share:.0%} of bandwidth", "muted")])
    return parts


def _context(live: Live, width: int) -> Line:
    if not live.context:
        return []
    style = context_style(live.used / live.context)
    text = f" {count_text(live.used)}/{count_text(live.context)}"
    return [*context_bar(live, width), (text, "muted" if style == "primary" else style)]
