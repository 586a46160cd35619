"""The context meter: used, cached and free tokens, the cost of a message, advice when the context is nearly full."""

from chatterm.backends.backend import DraftCost
from chatterm.conversation.figures import Live, bar, count_text, seconds_text
from chatterm.markdown.lines import Line, line_cells, of_height, wrap
from chatterm.widgets.canvas import Canvas
from models.units import counted

FULL = 0.9
"""Share of the context from which advice is shown."""
NO_ROOM = 0.98
"""Share of the context from which the meter shows an error."""
_LONG = 0.05
"""Share of the context from which a message counts as long."""
_SLOW = 1.0
"""Seconds of prefill from which a message counts as long, too."""


class ContextNote(Canvas):
    """A note about the context above the composer; hidden while there is nothing to say."""

    DEFAULT_CSS = "ContextNote { width: 100%; margin: 1 2 0 4; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._live: Live | None = None
        self._cost: DraftCost | None = None
        self._lines: list[Line] = []
        self.display = False

    def show(self, live: Live, cost: DraftCost | None) -> None:
        """Update the note. `cost` is that of the composer's text; None if empty or not known yet."""
        if (live, cost) != (self._live, self._cost):
            self._live, self._cost = live, cost
            self._lay_out()

    def on_resize(self) -> None:
        self._lay_out()

    def _lay_out(self) -> None:
        if self._live is None:
            return
        # A hidden widget has no width yet; the resize that follows corrects a wrong guess.
        width = self.size.width or max(self.screen.size.width - 6, 20)
        lines = of_height(
            note_lines(self._live, self._cost, width), max(self.screen.size.height // 6, 1), width
        )
        if lines != self._lines:
            self._lines = lines
            self.display = bool(lines)
            self.styles.height = max(len(lines), 1)
            self.refresh()

    def build(self, width: int) -> list[Line]:
        return self._lines


def context_style(share: float) -> str:
    """Return the style of a meter filled to `share`."""
    return "error" if share >= NO_ROOM else "warning" if share >= FULL else "primary"


def context_bar(live: Live, width: int, draft: int = 0) -> Line:
    """Return a bar of `width` columns: tokens used and cached, used and not cached, the draft's, and free ones."""
    if not live.context:
        return []
    style = context_style((live.used + draft) / live.context)
    cached = min(live.present if live.present is not None else live.used, live.used)
    parts = [(cached, style), (live.used - cached, "accent"), (draft, "muted")]
    return bar([(count / live.context, name) for count, name in parts if count > 0], width)


def is_long(cost: DraftCost, live: Live) -> bool:
    """Return whether a message is long enough for its cost to be shown before it is sent."""
    share = cost.tokens / live.context if live.context else 0.0
    seconds = cost.new / live.prefill_rate if live.prefill_rate else 0.0
    return share >= _LONG or seconds >= _SLOW or cost.free <= 0


def note_lines(live: Live, cost: DraftCost | None, width: int) -> list[Line]:
    """Return the note: the cost of a long message, or that the context is nearly full; [] for none."""
    if not live.context or live.phase in ("loading", "absent"):
        return []
    if cost is not None and is_long(cost, live):
        return _cost_lines(live, cost, width)
    left = live.context - live.used
    if live.used < FULL * live.context:
        return []
    style = context_style(live.used / live.context)
    text = f"The context is {live.used / live.context:.0%} full, {counted(max(left, 0), 'token')} left. "
    ways = "/compact makes room, /undo removes the last message, /reset starts over. Nothing is dropped silently."
    return wrap([(text, style), (ways, "muted")], width)


def _cost_lines(live: Live, cost: DraftCost, width: int) -> list[Line]:
    parts = [counted(cost.tokens, "token")]
    reused = live.used + cost.tokens - cost.new
    computed = f"{cost.new:,} to compute"
    if live.prefill_rate:
        computed += f" (about {seconds_text(cost.new / live.prefill_rate)})"
    parts.append(computed)
    if reused > 0:
        parts.append(f"{reused:,} cached")
    if cost.free <= 0:
        over = f"This message does not fit: {counted(max(-cost.free, 1), 'token')} too many. Shorten it, or "
        ways = "make room with /compact. Nothing is dropped silently."
        return wrap([(over, "error"), (ways, "muted")], width)
    end: Line = [(f"leaves {count_text(cost.free)} of {count_text(live.context)}", "muted")]
    meter = context_bar(live, 12, cost.tokens)
    line: Line = [*meter, (" " + " · ".join(parts) + " · ", "muted"), *end]
    if line_cells(line) <= width:
        return [line]
    return wrap([(" · ".join(parts) + " · ", "muted"), *end], width)
