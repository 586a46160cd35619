"""The engine at work, beside the conversation on a wide screen."""

from chatterm.figures import Live, meter, progress_text, seconds_text, sparkline
from chatterm.markdown.lines import Line, cells, wrap
from chatterm.widgets.canvas import Canvas
from models.units import bytes_text


class SidePanel(Canvas):
    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._live: Live | None = None
        self._lines: list[Line] = []
        self._width = 0

    def show(self, live: Live) -> None:
        if live != self._live:
            self._live, self._width = live, 0
            self.refresh()

    def build(self, width: int) -> list[Line]:
        if self._live is not None and width != self._width:
            self._lines, self._width = panel_lines(self._live, width), width
        return self._lines


def panel_lines(live: Live, width: int) -> list[Line]:
    """A section a subject, an empty line between two."""
    sections = [_model(live, width)]
    if live.phase == "loading":
        sections.append(_loading(live, width))
    elif live.phase == "absent":
        sections.append(wrap([("No model. /model NAME loads one.", "warning")], width))
    else:
        sections += [_speed(live, width), _turn(live, width), _context(live, width), _memory(live, width)]
    lines: list[Line] = []
    for section in sections:
        lines += ([[]] if lines and section else []) + section
    return lines


def _model(live: Live, width: int) -> list[Line]:
    info = live.info
    lines = wrap([(info.name if info else live.model, "strong")], width)
    if info is not None:
        attention = live.figures.attention if live.figures else ""
        about = " · ".join(part for part in (info.device, info.dtype, attention) if part)
        lines += wrap([(about, "muted")], width)
    return lines


def _loading(live: Live, width: int) -> list[Line]:
    progress = live.progress
    if progress is None:
        return [[("loading…", "muted")]]
    lines = [_head(progress.stage)]
    if progress.total:
        filled, empty = meter(progress.done / progress.total, width)
        lines.append([(filled, "primary"), (empty, "rule")])
    return [*lines, *wrap([(progress_text(progress), "muted")], width)]


def _speed(live: Live, width: int) -> list[Line]:
    lines = [_head("speed")]
    figures = live.figures
    if live.phase == "reading":
        lines.append(_pair("waiting", f"{live.waited_s:.1f} s", width))
        if figures is not None and figures.prefill_total:
            filled, empty = meter(figures.prefill_done / figures.prefill_total, width)
            lines.append([(filled, "primary"), (empty, "rule")])
            lines.append([(f"read {figures.prefill_done:,} of {figures.prefill_total:,} tokens", "muted")])
        return lines
    if not live.generated:
        return []
    lines.append([(f"{live.speed:,.1f}", "strong primary"), (" tok/s", "muted")])
    if live.history:
        lines.append([(sparkline(live.history, width), "spark")])
    lines.append(_pair("average", f"{live.average:,.1f} tok/s", width))
    if live.ttft_s is not None:
        lines.append(_pair("first token", seconds_text(live.ttft_s), width))
    return lines


def _turn(live: Live, width: int) -> list[Line]:
    if live.cached is None or live.computed is None:
        return []
    return [
        _head("this turn"),
        _pair("cached", f"{live.cached:,}", width),
        _pair("computed", f"{live.computed:,}", width),
        _pair("generated", f"{live.generated:,}", width),
    ]


def _context(live: Live, width: int) -> list[Line]:
    if not live.context:
        return []
    share = live.used / live.context
    style = "error" if share >= 0.98 else "warning" if share >= 0.9 else "primary"
    filled, empty = meter(share, width)
    return [
        _head("context"),
        [(filled, style), (empty, "rule")],
        _pair(f"{live.used:,} of {live.context:,}", f"{share:.0%}", width),
    ]


def _memory(live: Live, width: int) -> list[Line]:
    figures = live.figures
    if figures is None:
        return []
    return [
        _head("memory"),
        _pair("weights", bytes_text(figures.weight_bytes), width),
        _pair("KV cache", bytes_text(figures.kv_bytes), width),
    ]


def _head(text: str) -> Line:
    return [(text, "accent")]


def _pair(name: str, value: str, width: int) -> Line:
    return [(name, "muted"), (" " * max(width - cells(name) - cells(value), 1), ""), (value, "")]
