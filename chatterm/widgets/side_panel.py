"""The stats panel beside the messages on a wide screen: conversation and engine, the most important first."""

from chatterm.conversation.figures import (
    Live,
    bar,
    left_text,
    meter,
    progress_parts,
    seconds_text,
    sparkline,
    tokens_a_step,
)
from chatterm.markdown.lines import Line, cells, elided, wrap
from chatterm.widgets.canvas import Canvas
from chatterm.widgets.meter import context_bar, context_style
from models.units import bytes_text, counted


class SidePanel(Canvas):
    """Shows a `Live`. The screen decides whether the panel is displayed."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._live: Live | None = None
        self._lines: list[Line] = []
        self._made_for = (0, 0)

    def show(self, live: Live) -> None:
        if live != self._live:
            self._live, self._made_for = live, (0, 0)
            if self.display:
                self.refresh()

    def build(self, width: int) -> list[Line]:
        size = (width, self.size.height)
        if self._live is not None and size != self._made_for:
            self._lines, self._made_for = panel_lines(self._live, width, self.size.height), size
        return self._lines


def panel_lines(live: Live, width: int, height: int = 0) -> list[Line]:
    """Return the sections with empty lines between. Drop the last ones until `height` lines suffice; 0: no limit."""
    sections = [_head_lines(live, width)]
    if live.phase == "loading":
        sections.append(_loading(live, width))
    elif live.phase == "absent":
        sections.append(wrap([("No model. /model NAME loads one.", "warning")], width))
    else:
        sections += [_context(live, width), _library(live, width), _read(live, width), _speed(live, width)]
        sections += [_turn(live, width), _memory(live, width)]
        sections.append(_machine(live, width))
    sections = [section for section in sections if section]
    while height and len(sections) > 2 and sum(len(section) + 1 for section in sections) - 1 > height:
        sections.pop()
    lines: list[Line] = []
    for section in sections:
        lines += ([[]] if lines else []) + section
    return lines


def _head_lines(live: Live, width: int) -> list[Line]:
    """Return the title of the conversation and the name of the model."""
    title = wrap([(live.title, "strong")], width)[:3] if live.title else []
    return [
        *title,
        *wrap([(live.info.label if live.info else live.model, "muted" if title else "strong")], width),
    ]


def _machine(live: Live, width: int) -> list[Line]:
    if live.info is None:
        return []
    attention = live.figures.attention if live.figures else ""
    about = " · ".join(part for part in (live.info.device, live.info.dtype, attention) if part)
    return [_head("runs on"), *wrap([(about, "muted")], width)]


def _loading(live: Live, width: int) -> list[Line]:
    progress = live.progress
    if progress is None:
        return [[("loading…", "muted")]]
    lines = [_head(progress.stage)]
    if progress.total:
        lines.append(meter(progress.done / progress.total, width))
    what, *rest = progress_parts(live)
    lines += wrap([(what, "muted")], width)
    return lines + (wrap([(" · ".join(rest), "muted")], width) if rest else [])


def _speed(live: Live, width: int) -> list[Line]:
    if live.phase == "reading":
        return [_head("reading"), *_reading(live, width)]
    if not live.generated:
        return []
    now = f"{live.speed:,.1f}" if live.speed else "–"
    lines = [_head("speed"), [(now, "strong primary"), (" tok/s", "muted")]]
    if live.history:
        lines.append([(sparkline(live.history, width), "spark")])
    average = f"{live.average:,.1f}" if live.average else "–"
    lines.append(_pair("average", f"{average} tok/s", width))
    if live.ttft_s is not None:
        lines.append(_pair("first token", seconds_text(live.ttft_s), width))
    if live.prefill_rate:
        lines.append(_pair("prefill", f"{live.prefill_rate:,.0f} tok/s", width))
    if live.guessed:
        lines.append(_pair("guessed right", f"{live.accepted / live.guessed:.0%}", width))
        if 0 < live.drafted < live.guessed:
            lines.append(_pair("  of drafts", f"{live.accepted_drafts / live.drafted:.0%}", width))
        lines.append(_pair("tokens a step", f"{tokens_a_step(live.generated, live.accepted):.1f}", width))
    if (share := live.bandwidth_share) is not None:
        lines.append(_pair("of bandwidth", f"{share:.0%}", width))
    return lines


def _reading(live: Live, width: int) -> list[Line]:
    figures = live.figures
    lines = [_pair("waiting", f"{live.waited_s:.1f} s", width)]
    if figures is not None and figures.prefill_total:
        lines.append(meter(figures.prefill_done / figures.prefill_total, width))
        lines.append([(f"{figures.prefill_done:,} of {counted(figures.prefill_total, 'token')}", "muted")])
        parts = [f"{live.prefill_rate:,.0f} tok/s"] if live.prefill_rate else []
        parts += [left_text(live.left_s)] if live.left_s is not None else []
        if parts:
            lines.append([(" · ".join(parts), "muted")])
    return lines


def _turn(live: Live, width: int) -> list[Line]:
    if live.cached is None or live.computed is None:
        return []
    prompt = max(live.cached + live.computed, 1)
    return [
        _head("this turn"),
        bar([(live.cached / prompt, "accent"), (live.computed / prompt, "primary")], width),
        _pair("cached", f"{live.cached:,}", width, "accent"),
        _pair("computed", f"{live.computed:,}", width, "primary"),
        _pair("generated", f"{live.generated:,}", width),
    ]


def _context(live: Live, width: int) -> list[Line]:
    if not live.context:
        return []
    share = live.used / live.context
    lines = [_head("context"), context_bar(live, width)]
    lines.append(_pair(f"{live.used:,} of {live.context:,}", f"{share:.0%}", width))
    if live.present is not None and live.used:
        lines.append(_pair("cached", f"{min(live.present, live.used):,}", width))
    if live.is_warming:
        left = f" · {left_text(live.left_s)}" if live.left_s is not None else ""
        lines += wrap([(f"caching the history{left}", "muted")], width)
    if context_style(share) != "primary":
        lines.append([(f"{counted(max(live.context - live.used, 0), 'token')} left", context_style(share))])
    return lines


def _library(live: Live, width: int) -> list[Line]:
    """Return the documents that the conversation begins with, and the memory saved by sharing their cache."""
    if not live.documents:
        return []
    lines = [_head("library"), *wrap([(" · ".join(live.documents), "")], width)]
    if (chunk := live.begun_on) is not None:
        lines.append(_pair("cached", f"{chunk.present:,} of {chunk.tokens:,}", width))
        if chunk.branches > 1:
            saved = f"save {bytes_text(chunk.saved_bytes)}"
            lines.append(_pair(f"{counted(chunk.branches, 'branch')} on it", saved, width))
    return lines


def _read(live: Live, width: int) -> list[Line]:
    """Return the progress of the document being read ahead for later conversations."""
    chunk = live.read
    if chunk is None:
        return []
    left = f" · {left_text(live.left_s)}" if live.left_s is not None and not live.is_warming else ""
    about = f"{chunk.present:,} of {counted(chunk.tokens, 'token')}{left}"
    lines: list[Line] = [_head("reading"), [(elided(chunk.name, width), "")]]
    return [*lines, meter(chunk.present / chunk.tokens, width), *wrap([(about, "muted")], width)]


def _memory(live: Live, width: int) -> list[Line]:
    figures = live.figures
    if figures is None:
        return []
    blocks = max(figures.blocks_held + figures.blocks_cached + figures.blocks_free, 1)
    taken = [(figures.blocks_held / blocks, "primary"), (figures.blocks_cached / blocks, "accent")]
    return [
        _head("memory"),
        _pair("weights", bytes_text(figures.weight_bytes), width),
        _pair("KV cache", bytes_text(figures.kv_bytes), width),
        *([_pair("draft model", bytes_text(figures.draft_bytes), width)] if figures.draft_bytes else []),
        bar(taken, width),
        _pair("blocks in use", f"{figures.blocks_held:,} of {blocks:,}", width, "primary"),
        _pair("blocks cached", f"{figures.blocks_cached:,}", width, "accent"),
    ]


def _head(text: str) -> Line:
    return [(text, "heading")]


def _pair(name: str, value: str, width: int, style: str = "") -> Line:
    """Return a line: the name on the left, with a mark in its colour of the bar above, and the value on the right."""
    mark: Line = [("▪ ", style)] if style else []
    room = max(width - 2 * len(mark) - cells(value) - 1, 0)
    name = elided(name, room)
    return [*mark, (name, "muted"), (" " * (room - cells(name) + 1), ""), (value, "")]
