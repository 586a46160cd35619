"""/compact: ways to make room in the context, and a summary to read and edit before it is used."""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import ClassVar, Protocol

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import TextArea

from chatterm.backends.backend import EngineError
from chatterm.conversation.compaction import Room, Way, ways
from chatterm.conversation.figures import count_text
from chatterm.conversation.turn import SPINNER
from chatterm.conversation.visible_history import summarised
from chatterm.markdown.lines import Line, cells, elided, line_cells, padded, wrap
from chatterm.screens.backdrop import Backdrop
from chatterm.screens.report import BoxHead
from chatterm.terminal.wording import sentences
from chatterm.widgets.canvas import STYLE_CLASSES, Canvas
from models.units import counted

_FRAME = 1 / 15


@dataclass(slots=True)
class Draft:
    """A summary being written, or written, by the model."""

    exchange: int
    """The id of the last exchange it summarises."""
    count: int
    """The number of exchanges it summarises."""
    text: str = ""
    is_over: bool = False
    is_whole: bool = False
    """Whether the model ended it itself."""
    problem: str = ""

    @property
    def is_failed(self) -> bool:
        return self.is_over and not self.is_whole


class Compactor(Protocol):
    """The callbacks that carry out a compaction."""

    def summarise(self, count: int) -> Draft: ...
    def stop_summary(self) -> None: ...
    def read(self, count: int, text: str) -> None: ...
    def leave(self) -> None: ...
    def use_summary(self, count: int, text: str) -> None: ...
    def use(self, kind: str) -> None: ...


class CompactScreen(Backdrop, ModalScreen[None]):
    """Shows the ways to make room, then the text of a summary. Nothing changes before Enter."""

    COMPONENT_CLASSES: ClassVar[set[str]] = STYLE_CLASSES
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "back", "Back to the conversation", priority=True),
        Binding("enter", "accept", "Select", priority=True),
        Binding("ctrl+j", "new_line", "New line", priority=True),
        Binding("ctrl+r", "again", "Write the summary again", priority=True),
        Binding("up", "move(-1)", "Up"),
        Binding("down", "move(1)", "Down"),
        Binding("left,minus", "count(-1)", "Fewer messages"),
        Binding("right,plus", "count(1)", "More messages"),
    ]
    DEFAULT_CSS = """
    CompactScreen { align: center middle; }
    CompactScreen > Vertical {
        width: 92%; max-width: 100; height: auto; max-height: 94%; padding: 1 2; background: $surface;
    }
    CompactScreen TextArea, CompactScreen TextArea:focus {
        border: none; padding: 0 1; margin: 1 0; height: auto; min-height: 3; background: $panel; color: $foreground;
        scrollbar-size-vertical: 1; scrollbar-background: $panel; scrollbar-color: $faint;
        scrollbar-background-hover: $panel; scrollbar-color-hover: $muted;
    }
    CompactScreen TextArea .text-area--cursor { background: $primary; color: $background; }
    CompactScreen TextArea .text-area--selection { background: $selection; color: $foreground; }
    """

    def __init__(self, room: Room, draft: Draft | None, compactor: Compactor) -> None:
        """Show the ways to make room or, if a summary was begun already, `draft`."""
        super().__init__()
        self._room = room
        self._draft = draft
        self._compactor = compactor
        self._count = draft.count if draft is not None else room.default_count
        self._note: Line = []
        self._was_read = False

    @property
    def _is_choosing(self) -> bool:
        return bool(self.query_one(WayList).display)

    @property
    def _is_writing(self) -> bool:
        """Whether the whole summary is still to be shown, even if it is complete: it is not used unseen."""
        return self.query_one(TextArea).read_only

    def compose(self) -> ComposeResult:
        with Vertical():
            yield BoxHead("Make room in the context", ("Esc leaves all as it is", "Esc back"))
            yield WayList(self._room, self._count)
            yield TextArea(soft_wrap=True, compact=True, highlight_cursor_line=False)
            yield Below(self._below)

    def on_mount(self) -> None:
        self.query_one(TextArea).display = False
        self.query_one(WayList).lay_out()
        if self._draft is not None:
            self._write()
        self.set_interval(_FRAME, self._look)

    def on_resize(self, event: events.Resize) -> None:
        self.query_one(TextArea).styles.max_height = max(min(event.size.height - 10, 24), 3)
        self.query_one(WayList).lay_out()
        self.query_one(Below).lay_out()

    # --- keys ---

    def action_back(self) -> None:
        self._compactor.leave()
        self.dismiss(None)

    def action_move(self, step: int) -> None:
        if self._is_choosing:
            self.query_one(WayList).move(step)
            self.query_one(Below).lay_out()

    def action_count(self, step: int) -> None:
        if self._is_choosing and self._room.least_count:
            self._count = min(max(self._count + step, self._room.least_count), len(self._room.path))
            self.query_one(WayList).count_is(self._count)
            self.query_one(Below).lay_out()

    def action_accept(self) -> None:
        if self._is_choosing:
            self._choose(self.query_one(WayList).chosen)
        elif self._is_writing:
            self._compactor.stop_summary()
        else:
            self._attempt(lambda: self._compactor.use_summary(self._count, self.query_one(TextArea).text))

    def action_new_line(self) -> None:
        area = self.query_one(TextArea)
        if area.display and not area.read_only:
            area.insert("\n")

    def action_again(self) -> None:
        if not self._is_choosing and not self._is_writing:
            self._draft = self._compactor.summarise(self._count)
            self._was_read = False
            self._write()

    def on_click(self, event: events.Click) -> None:
        if event.widget is self:
            self.action_back()

    def on_way_list_clicked(self) -> None:
        self.action_accept()

    def _choose(self, way: Way | None) -> None:
        if way is None:
            self.action_back()
        elif way.kind == "summary":
            self._draft = self._compactor.summarise(self._count)
            self._write()
        elif way.kind == "edit":
            self._count = summarised(self._room.path)
            compaction = self._room.path[self._count - 1].compaction
            self._write()
            self._edit(compaction.summary or "" if compaction is not None else "")
        else:
            self._attempt(lambda: self._compactor.use(way.kind))

    def _attempt(self, use: Callable[[], None]) -> None:
        try:
            use()
        except EngineError as error:
            self._note = [(str(error), "error")]
            self.query_one(Below).lay_out()
        else:
            self.dismiss(None)

    # --- the summary ---

    def _write(self) -> None:
        """Show the text of the summary in place of the list."""
        self.query_one(WayList).display = False
        area = self.query_one(TextArea)
        area.load_text("")
        area.display, area.read_only = True, self._draft is not None
        area.focus()
        self._note = []
        self._look()

    def _look(self) -> None:
        draft, area = self._draft, self.query_one(TextArea)
        if draft is None or not area.display:
            return
        if not self._is_writing:
            self.query_one(Below).refresh()
            return
        if area.text != draft.text:
            area.load_text(draft.text)
            area.move_cursor(area.document.end)
        if draft.is_over:
            self._edit(draft.text.strip())
            if draft.problem:
                self._note = [
                    (
                        sentences(draft.problem, "Write a summary yourself, or press Ctrl+R to try again"),
                        "error",
                    )
                ]
            elif not draft.is_whole:
                self._note = [("The summary was stopped; Ctrl+R begins again.", "warning")]
        self.query_one(Below).lay_out()

    def _edit(self, text: str) -> None:
        area = self.query_one(TextArea)
        area.load_text(text)
        area.move_cursor(area.document.end)
        area.read_only = False
        if text.strip() and not self._was_read:
            self._was_read = True
            self._compactor.read(self._count, text)

    def on_text_area_changed(self) -> None:
        if not self._is_writing:
            self.query_one(Below).lay_out()

    def _below(self, width: int) -> list[Line]:
        """Return the lines below the list or the summary."""
        room = self._room
        note = wrap(self._note, width) if self._note else []
        if self._is_choosing:
            way = self.query_one(WayList).chosen
            of = f" of {count_text(room.context)}" if room.context else ""
            used = f"Tokens used: {count_text(room.used)}{of}. "
            more = "← → more or fewer messages. " if way is not None and way.kind == "summary" else ""
            about = way.about + " " if way is not None else ""
            stays = "Every message stays here, and /compact off shows the model all of them again."
            return [[], *note, *wrap([(used, ""), (about, ""), (more, "accent"), (stays, "muted")], width)]
        text = self.query_one(TextArea).text
        takes = room.of_text(text)
        if self._is_writing:
            spinner = SPINNER[int(monotonic() * 10) % len(SPINNER)]
            what = "the model reads" if not text else f"the model writes, about {counted(takes, 'token')}"
            return [[(f"{spinner} {what} · Enter stops it, Esc leaves", "muted")]]
        before = room.tokens(room.replaced(self._count)) if self._count > summarised(room.path) else 0
        size = f"About {counted(takes, 'token')}" + (f" in place of {before:,}" if before else "")
        makes_room = not before or takes < before
        use = "Enter uses it" if makes_room else "Shorten it to make room"
        keys = f". {use} · Ctrl+J new line · Ctrl+R writes it again"
        return [*note, *wrap([(size, "" if makes_room else "warning"), (keys, "muted")], width)]


class WayList(Canvas):
    """The ways to make room, one a line."""

    DEFAULT_CSS = "WayList { height: 1; margin: 1 0 0 0; }"

    class Clicked(Message):
        """Posted when a way was clicked."""

    def __init__(self, room: Room, count: int) -> None:
        super().__init__()
        self._room = room
        self._ways = ways(room, count)
        self._index = 0

    @property
    def chosen(self) -> Way | None:
        return self._ways[self._index] if self._ways else None

    def lay_out(self) -> None:
        self.styles.height = max(len(self._ways), 1)

    def count_is(self, count: int) -> None:
        self._ways = ways(self._room, count)
        self.refresh()

    def move(self, step: int) -> None:
        self._index = (self._index + step) % max(len(self._ways), 1)
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        if event.y < len(self._ways):
            self._index = event.y
            self.post_message(self.Clicked())

    def build(self, width: int) -> list[Line]:
        lines: list[Line] = []
        for number, way in enumerate(self._ways):
            chosen = "chosen" if number == self._index else ""
            gain = f"frees about {way.frees:,} tokens" if way.frees > 0 else ""
            gain = f"takes about {-way.frees:,} tokens" if way.frees < 0 else gain
            label = elided(way.label, max(width - cells(gain) - 4, 8))
            line: Line = [(" ", chosen), (label, f"primary {chosen}")]
            line = padded(line, max(width - cells(gain) - 1, line_cells(line)), chosen)
            lines.append(padded([*line, (gain, f"muted {chosen}")], width, chosen))
        return lines


class Below(Canvas):
    """The lines of `builder`; the height follows their number."""

    def __init__(self, builder: Callable[[int], list[Line]]) -> None:
        super().__init__()
        self._builder = builder

    def on_resize(self) -> None:
        self.lay_out()

    def lay_out(self) -> None:
        width = self.size.width or 60
        self.styles.height = max(len(self._builder(width)), 1)
        self.refresh()

    def build(self, width: int) -> list[Line]:
        return self._builder(width)
