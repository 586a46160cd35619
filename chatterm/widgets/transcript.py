"""The conversation. One widget draws all of it, line by line, and only what can be seen costs anything."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from time import monotonic
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

from chatterm.conversation.entries import INDENT, AnswerEntry, Click, CompactionEntry, Entry, UserEntry
from chatterm.conversation.find import Finder, Match
from chatterm.markdown.lines import Line, padded, styled
from chatterm.widgets.canvas import Painter

_WIDEST = 104
"""Columns of text: longer lines are hard to read."""
_IDLE_BUDGET = 0.004
"""Seconds of layout work between two looks at the keyboard."""
_IDLE_PAUSE = 0.02
"""Seconds for everything else between two stretches of such work."""
_BAR = 0.2
"""Seconds between two updates of the scroll bar while an answer grows: it costs as much as the text."""
_DRAWN = frozenset(
    [
        "user-bar",
        "quote-bar",
        "rule",
        "code-label",
        "code-copy",
        "notice-mark",
        "error-mark",
        "branch",
        "edited",
        "picture",
    ]
)
"""Styles of what is drawn around a text and is no part of it."""
_KEPT = 400
"""Lines that are kept as they were drawn."""


MESSAGE_KEYS = {
    "up": ("select", "prev"),
    "k": ("select", "prev"),
    "down": ("select", "next"),
    "j": ("select", "next"),
    "c": ("copy", ""),
    "e": ("edit", ""),
    "r": ("retry", ""),
    "left_square_bracket": ("branch", "prev"),
    "left": ("branch", "prev"),
    "right_square_bracket": ("branch", "next"),
    "right": ("branch", "next"),
    "left_curly_bracket": ("select", "prev"),
    "right_curly_bracket": ("select", "next"),
    "t": ("expand", ""),
    "enter": ("expand", ""),
    "space": ("expand", ""),
}
"""Keys while a message is selected: a command and its argument."""
CODE_KEYS = {"y": "copy_block", "s": "save_code", "x": "run_code", "z": "change_view"}
"""Keys that do something with a code block of the selected answer, or with JSON."""
EDGE_KEYS = {"g": -1, "G": 1}
"""Keys that lead to the first line and to the last."""


class Transcript(ScrollView, Painter, can_focus=True):
    """Entries below each other, an empty line between two.

    Stays at the end while it is at the end; otherwise what is being read does not move. It has the focus while a
    message is selected.
    """

    ALLOW_SELECT = True
    FOCUS_ON_CLICK = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(k, f"screen.run_command({n!r}, {a!r})", show=False) for k, (n, a) in MESSAGE_KEYS.items()),
        *(Binding(key, f"screen.{action}", show=False) for key, action in CODE_KEYS.items()),
        *(Binding(key, f"screen.edge({step})", show=False) for key, step in EDGE_KEYS.items()),
    ]

    has_news = reactive(False, repaint=False)
    """Text has come below what is read."""

    class Clicked(Message):
        """A message was clicked: `click` says where, as far as it concerns others."""

        def __init__(self, entry: Entry, click: Click) -> None:
            super().__init__()
            self.entry = entry
            self.click = click

    class Pictured(Message):
        """A message with pictures is in view for the first time."""

        def __init__(self, entry: UserEntry) -> None:
            super().__init__()
            self.entry = entry

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.entries: list[Entry] = []
        self._head: list[Entry] = []
        self.selected: Entry | None = None
        self._starts: list[int] = []
        """Line at which each entry begins."""
        self.finder: Finder | None = None
        """Whose matches are marked."""
        self._follow = True
        self._width = 0
        self._bar_waits = False
        """The scroll bar will be updated in a moment."""
        self._rest_waits = False
        """What cannot be seen will be laid out in a moment."""
        self._drawn: dict[int, tuple[Line, tuple[int, int], Strip, Strip]] = {}
        """By number: what the line was, how wide, and what `_drawn_line` made of it."""

    # --- contents ---

    def add(self, *entries: Entry) -> None:
        self.entries += entries
        self._reflow()

    def drop(self, *entries: Entry) -> None:
        self.entries = [entry for entry in self.entries if entry not in entries]
        self._reflow()

    def show_head(self, *head: Entry) -> None:
        """What stands above the messages, whichever these are."""
        self.entries = [*head, *self.entries[len(self._head) :]]
        self._head = list(head)
        self._reflow()

    def clear(self) -> None:
        """Everything but the head goes."""
        self.entries, self.selected = [*self._head], None
        self._follow, self.has_news = True, False
        self._reflow()

    def show_path(self, wanted: Sequence[Entry]) -> None:
        """Show these messages. What stands above the first one that changes stays, notices included."""
        kept = matching = 0
        for entry in self.entries:
            if isinstance(entry, UserEntry | AnswerEntry | CompactionEntry):
                if matching == len(wanted) or wanted[matching] is not entry:
                    break
                matching += 1
            kept += 1
        self.entries[kept:] = wanted[matching:]
        if self.selected not in self.entries:
            self.selected = None
        self._reflow()

    def end_with(self, answer: Entry) -> None:
        """What was said below `answer` goes: it grows now, and shall be seen. Messages that wait stay."""
        place = self.entries.index(answer) + 1
        self.entries[place:] = [entry for entry in self.entries[place:] if isinstance(entry, UserEntry)]
        self._reflow()

    def update(self) -> None:
        """Some entry changed."""
        self._reflow()

    def new_text(self) -> None:
        """Text has come at the end: who reads elsewhere is to know."""
        self.has_news = not self._follow

    def follow(self) -> None:
        """Go to the end and stay there."""
        self._follow, self.has_news = True, False
        self._reflow()

    def look_at(self, entry: Entry) -> None:
        """Go to the end, or to the first line of the last entry where it is taller than the screen."""
        self.follow()
        if entry.height > self.scrollable_content_region.height:
            self.scroll_to(y=self._starts[self.entries.index(entry)], animate=False, immediate=True)

    def select(self, entry: Entry | None) -> None:
        """Mark this entry and bring it into view; None marks nothing."""
        self.selected = entry
        if entry is None or entry not in self.entries:
            self.refresh()
            return
        entry.lay_out(self._width)
        self._count()
        start, page = self._starts[self.entries.index(entry)], self.scrollable_content_region.height
        top = round(self.scroll_y)
        if start < top or start + entry.height > top + page:
            above = start - max((page - entry.height) // 2, 0)
            self.scroll_to(y=max(above, 0), animate=False, immediate=True, force=True)
        self._reflow()

    def matches(self) -> list[Match]:
        """What the finder finds in the messages, in order."""
        return self.finder.all(self.entries, self._width) if self.finder is not None else []

    def latest_in_view(self, matches: Sequence[Match]) -> int:
        """The number of the last match that is not below what can be seen; 0 where all are."""
        self._reflow()
        end = round(self.scroll_y) + self.scrollable_content_region.height
        tops = [self._starts[self.entries.index(match.entry)] + match.spans[0][0] for match in matches]
        return max(sum(top < end for top in tops) - 1, 0)

    def show_match(self, match: Match | None) -> None:
        """Bring it into view, in the middle where it was not; it is marked as the one that is looked at."""
        if self.finder is not None:
            self.finder.here = match
        self._reflow()
        if match is not None and match.entry in self.entries:
            row = self._starts[self.entries.index(match.entry)] + match.spans[0][0]
            page = self.scrollable_content_region.height
            if not round(self.scroll_y) <= row < round(self.scroll_y) + page:
                self.scroll_to(y=max(row - page // 2, 0), animate=False, immediate=True, force=True)

    def neighbour(self, step: int) -> Entry | None:
        """The message before (-1) or after (1) the selected one; coming from below, the last."""
        messages = [e for e in self.entries if isinstance(e, UserEntry | AnswerEntry) and not e.is_blank]
        if self.selected not in messages:
            return messages[-1] if messages and step < 0 else None
        place = messages.index(self.selected) + step
        return messages[max(place, 0)] if place < len(messages) else None

    def page(self, step: int) -> None:
        """A screenful up (-1) or down (1), two lines of it kept."""
        page = max(self.scrollable_content_region.height - 2, 1)
        self.scroll_to(y=self.scroll_y + step * page, animate=False)

    def edge(self, step: int) -> None:
        """To the first line (-1) or to the last (1)."""
        self.scroll_to(y=0 if step < 0 else self.max_scroll_y, animate=False)

    # --- layout ---

    @property
    def _height(self) -> int:
        return self._starts[-1] + self.entries[-1].height if self.entries else 0

    def _count(self) -> None:
        heights = (entry.height + (not entry.is_blank) for entry in self.entries[:-1])
        self._starts = list(accumulate(heights, initial=0)) if self.entries else []

    def _top(self) -> tuple[Entry, int] | None:
        """The entry at the upper edge and how much of it is above; None at the end or when empty."""
        if self._follow or not self._starts or not self.entries:
            return None
        y = round(self.scroll_y)
        index = max(bisect_right(self._starts, y) - 1, 0)
        return self.entries[min(index, len(self.entries) - 1)], y - self._starts[index]

    def _reflow(self) -> None:
        """Lay out what can be seen, and the rest soon; keep the reader's place."""
        width = min(self.scrollable_content_region.width - 1, _WIDEST)  # a column of air before the bar
        if width <= 0:
            self._count()
            return
        top = self._top()
        self._width = width
        page = self.scrollable_content_region.height
        self._count()
        while True:
            first = self._place(top, page)
            seen = self._between(first, first + page)
            stale = [entry for entry in seen if not entry.is_laid_out(width)]
            if not stale:
                break
            for entry in stale:
                entry.lay_out(width)
            self._count()
        self._grow(Size(width, self._height))
        self.scroll_to(y=self._place(top, page), animate=False, immediate=True, force=True)
        self.refresh()
        # One timer at a time: a frame comes 30 times a second, and each would ask for one more.
        if not self._rest_waits and not all(entry.is_laid_out(width) for entry in self.entries):
            self._rest_waits = True
            self.set_timer(_IDLE_PAUSE, self._lay_out_rest)

    def _lay_out_rest(self) -> None:
        """Lay out of what cannot be seen what there is time for, the latest first."""
        self._rest_waits = False
        rest = [entry for entry in self.entries if not entry.is_laid_out(self._width)]
        deadline = monotonic() + _IDLE_BUDGET
        while rest and monotonic() < deadline:
            rest.pop().lay_out(self._width)
        self._reflow()

    def _grow(self, size: Size) -> None:
        """Set the size of the whole. What is around the transcript does not depend on it, so nothing else is
        laid out again, as it would be by setting `virtual_size`: 30 times a second that costs a lot."""
        if size == self.virtual_size:
            return
        self.set_reactive(Widget.virtual_size, size)
        has_bar = size.height > self.container_size.height
        if not self._follow or has_bar != self.show_vertical_scrollbar:
            self._scroll_update(size)
        elif not self._bar_waits:
            self._bar_waits = True
            self.set_timer(_BAR, self._move_bar)

    def _move_bar(self) -> None:
        self._bar_waits = False
        self._scroll_update(self.virtual_size)
        self.vertical_scrollbar.position = self.scroll_y

    def _place(self, top: tuple[Entry, int] | None, page: int) -> int:
        """The first visible line, when `top` is what was at the upper edge."""
        end = max(self._height - page, 0)
        if top is None or top[0] not in self.entries:
            return end
        return min(self._starts[self.entries.index(top[0])] + top[1], end)

    def shows(self, entry: Entry) -> bool:
        """Whether some of it can be seen."""
        first = round(self.scroll_y)
        return entry in self._between(first, first + self.scrollable_content_region.height - 1)

    def _between(self, first: int, last: int) -> list[Entry]:
        if not self._starts:
            return []
        start = max(bisect_right(self._starts, first) - 1, 0)
        return self.entries[start : bisect_right(self._starts, last)]

    def on_resize(self, _: events.Resize) -> None:
        self._reflow()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        self._follow = new_value >= self.max_scroll_y - 0.5
        self.has_news = self.has_news and not self._follow
        if self._follow and self._bar_waits:
            self.refresh()
        else:
            super().watch_scroll_y(old_value, new_value)

    # --- drawing ---

    def line_at(self, y: int) -> tuple[Entry | None, int, Line]:
        """The entry at line `y` of the whole, the row inside it, and the line itself."""
        index = bisect_right(self._starts, y) - 1
        if index < 0 or index >= len(self.entries):
            return None, 0, []
        entry, row = self.entries[index], y - self._starts[index]
        entry.lay_out(self._width)
        return entry, row, entry.line(row)

    def render_line(self, y: int) -> Strip:
        """A line of the part that can be seen, without padding."""
        return self._drawn_line(y + self.scroll_offset.y, (self.size.width, self.region.width))[0]

    def render_lines(self, crop: Region) -> list[Strip]:
        """Most of a frame is lines of the frame before, further up. They are the very same strips, for Textual
        keeps with a strip how it was cut and encoded: showing them again costs next to nothing."""
        width, background = self.region.width, self.background_colors[1]
        above, first = self.styles.padding.top, self.scroll_offset.y - self.styles.padding.top
        blank = Strip([Segment(" " * width, self.style_of(""))], width)
        widths = (self.size.width, width)
        strips = [
            self._drawn_line(row + first, widths)[1] if row >= above else blank for row in crop.line_range
        ]
        for line_filter in self.get_line_filters():
            strips = [strip.apply_filter(line_filter, background) for strip in strips]
        if crop.column_span != (0, width):
            strips = [strip.crop(*crop.column_span) for strip in strips]
        return strips

    def _drawn_line(self, y: int, widths: tuple[int, int]) -> tuple[Strip, Strip]:
        """Line `y` of the whole: its text, and the same with what is left and right of it, in two widths."""
        entry, row, line = self.line_at(y)
        if isinstance(entry, UserEntry) and entry.pictures and not entry.is_pictured:
            entry.is_pictured = True
            self.post_message(self.Pictured(entry))
        if entry is not None and entry is self.selected and row < entry.height:
            line = _marked(line, self._width)
        elif entry is not None and self.finder is not None and row < entry.height:
            line = self.finder.marked(entry, row, line)
        selection = self.text_selection
        span = selection.get_span(y) if selection is not None else None
        known = self._drawn.get(y)
        if known is not None and known[:2] == (line, widths) and span is None:
            return known[2:]
        strip, base = self.strip(line), self.style_of("")
        if span is not None:
            strip = self._selected(strip, *span)
        strip = strip.crop_extend(0, widths[0], base).apply_offsets(0, y)
        left = self.styles.padding.left
        padded = strip.crop_pad(widths[1] - left, left, 0, base)
        if span is None:
            if len(self._drawn) >= _KEPT:
                self._drawn.clear()
            self._drawn[y] = (line, widths, strip, padded)
        return strip, padded

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._drawn.clear()

    def _selected(self, strip: Strip, start: int, end: int) -> Strip:
        end = strip.cell_length if end == -1 else min(end, strip.cell_length)
        if start >= end:
            return strip
        style = self.screen.get_component_rich_style("screen--selection")
        middle = strip.crop(start, end)
        marked = Strip([Segment(text, (own or Style()) + style) for text, own, _ in middle])
        return Strip.join([strip.crop(0, start), marked, strip.crop(end, strip.cell_length)])

    # --- mouse ---

    def on_click(self, event: events.Click) -> None:
        if self.screen.selections:
            return
        padding = self.styles.padding
        entry, row, _ = self.line_at(event.y + self.scroll_offset.y - padding.top)
        if entry is None:
            return
        event.stop()
        click = entry.click(row, event.x - padding.left)
        self._reflow()
        if click.what != "fold":
            self.post_message(self.Clicked(entry, click))

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        first = selection.start.y if selection.start else 0
        last = selection.end.y if selection.end else self._height - 1
        text, joint = "", ""
        for y in range(first, min(last, self._height) + 1):
            start = selection.start.x if selection.start and y == first else 0
            end = selection.end.x if selection.end and y == last else None
            said = _said(self.line_at(y)[2], start, end)
            if said is not None:
                text += joint + said[0]
                joint = said[1]
        return text, "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()


def _marked(line: Line, width: int) -> Line:
    """A line of the selected message: a bar instead of its margin, and a ground of its own."""
    rest: Line = []
    skip = INDENT  # the margin consists of narrow characters
    for text, style in line:
        rest.append((text[skip:], style))
        skip = max(skip - len(text), 0)
    bar: Line = [("▌", "selected selected-bar"), (" ", "selected")]
    return padded([*bar, *styled(rest, "selected")], width, "selected")


def _said(line: Line, start: int, end: int | None) -> tuple[str, str] | None:
    """The part of a line between two columns as somebody wrote it, without what is drawn around it; and what stands
    between it and the next line. None where nothing of the line was written by anybody.
    """
    column, text, joint, has_words, is_drawn = 0, "", "\n", False, False
    for part, style in line:
        begin, column = column, column + len(part)
        styles = style.split()
        if not part and "wrapped" in styles:
            joint = " "
        elif not part and "cut" in styles:
            joint = ""
        if "pad" in styles or (begin < INDENT and not part.strip("▌ ")):
            continue
        if _DRAWN.intersection(styles):
            is_drawn = True
            continue
        text += part[max(start - begin, 0) : None if end is None else max(end - begin, 0)]
        has_words = has_words or bool(part.strip())
    if is_drawn and not has_words:
        return None
    return text if joint == "" else text.rstrip(), joint
