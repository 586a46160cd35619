"""The transcript: one widget that draws the conversation line by line; only visible lines cost anything."""

from collections import deque
from collections.abc import Generator, Iterable, Sequence
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
from chatterm.markdown.lines import Line, Run, padded, styled
from chatterm.widgets.canvas import Painter
from chatterm.widgets.column import Column, rows_of
from chatterm.widgets.message_keys import CODE_KEYS, EDGE_KEYS, MESSAGE_KEYS
from chatterm.widgets.once import call_once
from chatterm.widgets.said import said
from chatterm.widgets.slices import LATER, at_once, in_slices

_WIDEST = 104
"""The most columns of text: longer lines are hard to read."""
_AT_ONCE = 2
"""Pieces of a long entry laid out before it is drawn; the others follow in a moment."""
_BAR = 0.2
"""Seconds between two updates of the scroll bar while an answer grows: an update costs as much as the text."""
_READ = 64
"""Lines read at a time while text is copied."""
_KEPT = 400
"""The most drawn lines that are cached."""


class Transcript(ScrollView, Painter, can_focus=True):
    """The entries of a conversation, separated by empty lines.

    It follows new text while scrolled to the end; otherwise the text in view does not move. It has the focus while
    a message is selected.
    """

    ALLOW_SELECT = True
    FOCUS_ON_CLICK = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(k, f"screen.run_command({n!r}, {a!r})", show=False) for k, (n, a) in MESSAGE_KEYS.items()),
        *(Binding(key, f"screen.code({what!r})", show=False) for key, what in CODE_KEYS.items()),
        *(Binding(key, f"screen.edge({step})", show=False) for key, step in EDGE_KEYS.items()),
    ]

    has_news = reactive(False, repaint=False)
    """Whether there is new text below the view."""

    class Clicked(Message):
        """Posted when a message was clicked; `click` tells what was hit."""

        def __init__(self, entry: Entry, click: Click) -> None:
            super().__init__()
            self.entry = entry
            self.click = click

    class Pictured(Message):
        """Posted when a message with pictures comes into view."""

        def __init__(self, entry: UserEntry) -> None:
            super().__init__()
            self.entry = entry

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._column = Column()
        self._prepared: Column | None = None
        """What may be shown next, with the head."""
        self._head: list[Entry] = []
        self.selected: Entry | None = None
        self._gone: deque[Entry] = deque()
        """Removed entries, freed little by little because freeing many at once takes a while."""
        self._anchor: tuple[Entry, int] | None = None
        """The entry at the top of the view, and how many of its rows are above; None if there is none."""
        self.finder: Finder | None = None
        """The search whose matches are marked."""
        self._follow = True
        self._width = 0
        self._bar_waits = False
        """Whether an update of the scroll bar is scheduled."""
        self._rest_waits = False
        """Whether the layout of invisible entries is running or scheduled."""
        self._drawn: dict[tuple[tuple[Run, ...], tuple[int, int]], Strip] = {}
        """The strip of each line, by its text, styles and widths: lines move while those above are laid out."""

    # --- contents ---

    @property
    def entries(self) -> list[Entry]:
        """All of them, the head first."""
        return self._column.entries

    def add(self, *entries: Entry) -> None:
        self._put(len(self.entries), entries)
        self.update()

    def drop(self, *entries: Entry) -> None:
        first = min(
            (self._column.places[entry] for entry in entries if entry in self._column.places), default=None
        )
        if first is not None:
            self._put(first, [entry for entry in self.entries[first:] if entry not in entries])
        self.update()

    def show_head(self, *head: Entry) -> None:
        """Show `head` above the messages, instead of the former head."""
        self._put(0, [*head, *self.entries[len(self._head) :]])
        self._head = list(head)
        self.update()

    def clear(self) -> None:
        """Remove everything but the head."""
        empty = Column()
        empty.add(self._head, self._width)
        self._take(empty)
        self.selected = None
        self._follow, self.has_news = True, False
        self.update()

    def prepare(self, entries: Sequence[Entry]) -> None:
        """Prepare what `show_path` needs to show these entries, which were never shown; another thread may do it."""
        column = Column()
        column.add([*self._head, *entries], 0)
        self._prepared = column

    def show_path(self, wanted: Sequence[Entry], above: Entry | None = None) -> None:
        """Show these messages below `above`. Everything above the first changed one stays, notices included."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared.entries == [*self._head, *wanted]:
            self._take(prepared)
        else:
            self._show_path(wanted, self._column.places[above] + 1 if above is not None else 0)
        if self.selected not in self._column.places:
            self.selected = None
        self.update()

    def _show_path(self, wanted: Sequence[Entry], kept: int) -> None:
        """Show these messages below the first `kept` entries."""
        matching = 0
        for entry in self.entries[kept:]:
            if isinstance(entry, UserEntry | AnswerEntry | CompactionEntry):
                if matching == len(wanted) or wanted[matching] is not entry:
                    break
                matching += 1
            kept += 1
        self._put(kept, wanted[matching:])

    def _take(self, column: Column) -> None:
        """Show another column, which begins with the head."""
        for entry in self.entries:
            entry.on_change = None
        self._gone.extend(self.entries)
        self._column = column
        for entry in self._head:
            entry.on_change = column.stale.add

    def _put(self, place: int, entries: Iterable[Entry]) -> None:
        """Replace the entries from this place on; `entries` may be some of them."""
        entries = list(entries)
        self._gone.extend(self._column.cut(place))
        self._column.add(entries, self._width)

    def end_with(self, answer: Entry) -> None:
        """Remove the notices below `answer`, which begins to grow and must be visible; keep waiting messages."""
        place = self._column.places[answer] + 1
        self._put(place, [entry for entry in self.entries[place:] if isinstance(entry, UserEntry)])
        self.update()

    def new_text(self) -> None:
        """Note that text was added at the end: set `has_news` if the reader is elsewhere."""
        self.has_news = not self._follow

    def follow(self) -> None:
        """Scroll to the end and follow new text."""
        self._follow, self.has_news = True, False
        self.update()

    def look_at(self, entry: Entry) -> None:
        """Scroll to the end, or to the first line of `entry` if it is taller than the view."""
        self.follow()
        if entry.height > self.scrollable_content_region.height:
            self.scroll_to(y=self._start(entry), animate=False, immediate=True)

    def select(self, entry: Entry | None) -> None:
        """Select this entry and scroll it into view; None selects nothing."""
        self.selected = entry
        if entry is None or entry not in self._column.places:
            self.refresh()
            return
        self._lay_out_now(entry)
        self.update()
        start, page = self._start(entry), self.scrollable_content_region.height
        top = round(self.scroll_y)
        if start < top or start + entry.height > top + page:
            above = start - max((page - entry.height) // 2, 0)
            self.scroll_to(y=max(above, 0), animate=False, immediate=True, force=True)
        self.update()

    def place_in_view(self) -> tuple[int, int]:
        """Return the index of the last entry in view, and its first row below the view."""
        end = round(self.scroll_y) + self.scrollable_content_region.height
        place = max(self._column.stack.at(end - 1), 0)
        return place, end - self._column.stack.start(place)

    def show_match(self, match: Match | None) -> None:
        """Mark a match as the current one; centre it if it is not in view."""
        if self.finder is not None:
            self.finder.here = match
        self.update()
        if match is not None and match.entry in self._column.places:
            row = self._start(match.entry) + match.spans[0][0]
            page = self.scrollable_content_region.height
            if not round(self.scroll_y) <= row < round(self.scroll_y) + page:
                self.scroll_to(y=max(row - page // 2, 0), animate=False, immediate=True, force=True)

    def neighbour(self, step: int) -> Entry | None:
        """Return the message before (-1) or after (1) the selected one; with none selected, the last for -1."""
        here = self._column.places.get(self.selected) if self.selected is not None else None
        if here is None and step > 0:
            return None
        place = len(self.entries) - 1 if here is None else here + step
        while 0 <= place < len(self.entries):
            entry = self.entries[place]
            if isinstance(entry, UserEntry | AnswerEntry) and not entry.is_blank:
                return entry
            place += step
        return self.selected if step < 0 else None

    def page(self, step: int) -> None:
        """Scroll a page up (-1) or down (1), with an overlap of two lines."""
        page = max(self.scrollable_content_region.height - 2, 1)
        self.scroll_to(y=self.scroll_y + step * page, animate=False)

    def edge(self, step: int) -> None:
        """Scroll to the first line (-1) or the last (1)."""
        self.scroll_to(y=0 if step < 0 else self.max_scroll_y, animate=False)

    # --- layout ---

    @property
    def _height(self) -> int:
        return (
            self._column.stack.start(len(self.entries) - 1) + self.entries[-1].height if self.entries else 0
        )

    def _start(self, entry: Entry) -> int:
        return self._column.stack.start(self._column.places[entry])

    def lay_out(self, entry: Entry) -> bool:
        """Lay out a piece of an entry. Return whether it was the last one; `update` then shows the entry."""
        if not entry.step(self._width):
            return False
        if entry in self._column.places:
            self._column.stale.discard(entry)
            self._column.stack.resize(self._column.places[entry], rows_of(entry))
        return True

    def _lay_out_now(self, entry: Entry) -> None:
        """Lay out an entry, or the first pieces of a long one."""
        for _ in range(_AT_ONCE):
            if self.lay_out(entry):
                break

    def update(self) -> None:
        """Show entries that have changed: lay out visible ones now and the rest soon; keep the reader's place."""
        width = min(self.scrollable_content_region.width - 1, _WIDEST)  # a column of air before the bar
        if width <= 0:
            return
        if width != self._width:
            self._width = width
            self._column.stale.update(self.entries)
        pieces = 0
        while pieces < _AT_ONCE and (stale := self._stale_in_view()) is not None:
            pieces += not self.lay_out(stale)
        self._grow(Size(width, self._height))
        self.scroll_to(y=self._first(), animate=False, immediate=True, force=True)
        self.refresh()
        # One timer at a time: 30 frames a second would each start another.
        if not self._rest_waits and (self._column.stale or self._gone):
            self._rest_waits = True
            call_once(self, LATER, self._lay_out_rest)

    def _lay_out_rest(self) -> None:
        """Lay out invisible entries and free removed ones, in slices."""

        async def go() -> None:
            try:
                await in_slices(self._rest(), LATER, self.update)
            finally:
                self._rest_waits = False
            self.update()

        self.run_worker(go())

    def _rest(self) -> Generator[None, None, None]:
        """Lay out entries in view, then the others from the last up; then free removed ones. Yield after each piece."""
        place = 0
        while self._column.stale:
            if (entry := self._stale_in_view()) is None:
                place = min(place, len(self.entries)) or len(self.entries)
                entry, place = self.entries[place - 1], place - 1
            if entry in self._column.stale:
                while not self.lay_out(entry):
                    yield
            yield
        while self._gone:
            self._gone.pop()
            yield

    def _stale_in_view(self) -> Entry | None:
        """Return an entry to be laid out that is in view or up to a page above it; None if there is none."""
        first, page = self._first(), self.scrollable_content_region.height
        seen, above = self._between(first, first + page), self._between(first - page, first - 1)
        wanted = [*(reversed(seen) if self._follow else seen), *reversed(above)]
        return next((entry for entry in wanted if entry in self._column.stale), None)

    def _grow(self, size: Size) -> None:
        """Set the virtual size without a new layout of the screen, which would be costly 30 times a second."""
        if size == self.virtual_size:
            return
        self.set_reactive(Widget.virtual_size, size)
        has_bar = size.height > self.container_size.height
        if not self._follow or has_bar != self.show_vertical_scrollbar:
            self._scroll_update(size)
        elif not self._bar_waits:
            self._bar_waits = True
            call_once(self, _BAR, self._move_bar)

    def _move_bar(self) -> None:
        self._bar_waits = False
        self._scroll_update(self.virtual_size)
        self.vertical_scrollbar.position = self.scroll_y

    def _first(self) -> int:
        """Return the line at the top of the view that keeps the reader's place."""
        end = max(self._height - self.scrollable_content_region.height, 0)
        if self._follow or self._anchor is None or self._anchor[0] not in self._column.places:
            return end
        return min(self._start(self._anchor[0]) + self._anchor[1], end)

    def shows(self, entry: Entry) -> bool:
        """Return whether some of the entry is in view."""
        first = round(self.scroll_y)
        return entry in self._between(first, first + self.scrollable_content_region.height - 1)

    def _between(self, first: int, last: int) -> list[Entry]:
        return self.entries[max(self._column.stack.at(first), 0) : self._column.stack.at(last) + 1]

    def on_resize(self, _: events.Resize) -> None:
        self.update()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        self._follow = new_value >= self.max_scroll_y - 0.5
        place = self._column.stack.at(round(new_value))
        above = round(new_value) - self._column.stack.start(max(place, 0))
        self._anchor = (self.entries[place], above) if place >= 0 else None
        if self._stale_in_view() is not None:
            self.call_next(self.update)
        self.has_news = self.has_news and not self._follow
        if self._follow and self._bar_waits:
            self.refresh()
        else:
            super().watch_scroll_y(old_value, new_value)

    # --- drawing ---

    def line_at(self, y: int) -> tuple[Entry | None, int, Line]:
        """Return the entry at line `y` of the whole, the row inside it, and the line itself."""
        place = self._column.stack.at(y)
        if place < 0:
            return None, 0, []
        entry, row = self.entries[place], y - self._column.stack.start(place)
        return entry, row, entry.line(row)

    def render_line(self, y: int) -> Strip:
        """Return line `y` of the view, without padding, with the offsets by which Textual selects text."""
        y += self.scroll_offset.y
        return self._cropped(self._visible_line(y), self.size.width).apply_offsets(0, y)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the strips of `crop`, reusing those of the last frame: Textual caches cut and encoded text in them."""
        width, background = self.region.width, self.background_colors[1]
        above, first = self.styles.padding.top, self.scroll_offset.y - self.styles.padding.top
        blank = Strip([Segment(" " * width, self.style_of(""))], width)
        widths = (self.size.width, width)
        strips = [self._drawn_line(row + first, widths) if row >= above else blank for row in crop.line_range]
        for line_filter in self.get_line_filters():
            strips = [strip.apply_filter(line_filter, background) for strip in strips]
        if crop.column_span != (0, width):
            strips = [strip.crop(*crop.column_span) for strip in strips]
        return strips

    def _drawn_line(self, y: int, widths: tuple[int, int]) -> Strip:
        """Return line `y` of the whole with padding; the two `widths` are without and with it."""
        line = self._visible_line(y)
        selection = self.text_selection
        span = selection.get_span(y) if selection is not None else None
        key = (tuple(line), widths)
        if span is None and (known := self._drawn.get(key)) is not None:
            return known
        strip = self._cropped(line, widths[0])
        if span is not None:
            strip = self._selected(strip, *span)
        left = self.styles.padding.left
        padded = strip.crop_pad(widths[1] - left, left, 0, self.style_of(""))
        if span is None:
            if len(self._drawn) >= _KEPT:
                self._drawn.clear()
            self._drawn[key] = padded
        return padded

    def _visible_line(self, y: int) -> Line:
        """Return line `y` of the whole as it looks, except for selected text."""
        entry, row, line = self.line_at(y)
        if isinstance(entry, UserEntry) and entry.pictures and not entry.is_pictured:
            entry.is_pictured = True
            self.post_message(self.Pictured(entry))
        if entry is not None and entry is self.selected and row < entry.height:
            return _marked(line, self._width)
        if entry is not None and self.finder is not None and row < entry.height:
            return self.finder.marked(entry, row, line)
        return line

    def _cropped(self, line: Line, width: int) -> Strip:
        return self.strip(line).crop_extend(0, width, self.style_of(""))

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
        self.update()
        if click.what != "fold":
            self.post_message(self.Clicked(entry, click))

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        return at_once(self.selected_text(selection)), "\n"

    def selected_text(self, selection: Selection) -> Generator[None, None, str]:
        """Return the selected text without decoration; yield every `_READ` lines."""
        first = selection.start.y if selection.start else 0
        last = min(selection.end.y if selection.end else self._height - 1, self._height)
        whole, parts, joint = list[str](), list[str](), ""
        for y in range(first, last + 1):
            start = selection.start.x if selection.start and y == first else 0
            end = selection.end.x if selection.end and y == selection.end.y else None
            found = said(self.line_at(y)[2], start, end)
            if found is not None:
                parts += [joint, found[0]]
                joint = found[1]
            if y % _READ == 0:
                whole.append("".join(parts))  # to join, and then to free, each row at the end would take long
                parts.clear()
                yield
        return "".join([*whole, *parts])

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()


def _marked(line: Line, width: int) -> Line:
    """Return a line of the selected message: a bar in place of its margin, and a background of its own."""
    rest: Line = []
    skip = INDENT  # the margin consists of narrow characters
    for text, style in line:
        rest.append((text[skip:], style))
        skip = max(skip - len(text), 0)
    bar: Line = [("▌", "selected selected-bar"), (" ", "selected")]
    return padded([*bar, *styled(rest, "selected")], width, "selected")
