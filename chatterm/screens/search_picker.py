"""A picker with search, details of the selected item, and a question before an item is removed."""

from collections.abc import Sequence
from time import time
from typing import Generic, TypeVar

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Input

from chatterm.markdown.lines import Line, elided, padded, styled
from chatterm.screens.notes import Choices, Note
from chatterm.screens.picker import Picker, PickerList

Item = TypeVar("Item")


class SearchPicker(Picker, Generic[Item]):
    """Dismisses with the choice, or with None. A subclass finds the items and carries out the actions on them."""

    DEFAULT_CSS = """
    SearchPicker ItemList { height: auto; }
    SearchPicker #picker-about { margin-top: 1; }
    SearchPicker #picker-note { display: none; margin-top: 1; }
    SearchPicker #picker-foot { margin-top: 1; }
    """
    HEADING = ""

    def __init__(self) -> None:
        super().__init__()
        self._asking: Item | None = None
        """The item to remove if the person confirms."""

    def items(self) -> "ItemList[Item]":
        """Create the list; called once."""
        raise NotImplementedError

    def compose(self) -> ComposeResult:
        # Kept, not queried: a result from the disk may arrive while the picker is being removed.
        self._input = Input(placeholder="Type to search")
        self._list = self.items()
        self._heading, self._about_note = Note(id="picker-head"), Note(id="picker-about")
        self._note, self._foot = Note(id="picker-note"), Choices(id="picker-foot")
        with Vertical():
            yield self._heading
            yield self._input
            yield self._list
            yield self._about_note
            yield self._note
            yield self._foot

    # --- around the list ---

    def show_mode(self) -> None:
        """Update the head and the foot, which tell what the keys do now."""
        if self._asking is not None:
            self._head(self.HEADING)
            question, yes, no = self.question(self._asking)
            self._offer((question, ""), (yes, "confirm"), (no, "back"))
        else:
            count = self._list.count
            self._head(self.HEADING, f"  {count:,}" if count else "")
            self._offer(*self.offers())

    def question(self, item: Item) -> tuple[str, str, str]:
        """Return the question before an item is removed, and what `y` and `n` do."""
        raise NotImplementedError

    def offers(self) -> Sequence[tuple[str, str]]:
        """Return the possible actions as (text, action) pairs."""
        raise NotImplementedError

    def look(self) -> None:
        """Show details of the selected item."""
        raise NotImplementedError

    def _head(self, title: str, count: str = "") -> None:
        self._heading.show([(title, "heading"), (count, "muted")])

    def _offer(self, *parts: tuple[str, str]) -> None:
        self._foot.offer(*parts)

    def _about(self, runs: Line, rest: str = "") -> None:
        """Show a line about the selected item, and `rest` below it; nothing if `runs` is empty."""
        self._about_note.show([*runs, ("\n", ""), (rest, "muted")] if runs else [])

    @property
    def _about_width(self) -> int:
        return max(self._about_note.size.width, 8)

    def _say(self, text: str, style: str = "muted") -> None:
        self._note.display = bool(text)
        self._note.show([(text, style)])

    # --- actions ---

    async def on_choices_action_selected(self, message: Choices.ActionSelected) -> None:
        await self.run_action(message.action)

    def on_key(self, event: events.Key) -> None:
        if self._asking is not None:
            event.stop()
            event.prevent_default()
            if event.key in ("y", "Y"):
                self.action_confirm()
            else:
                self.action_back()

    def action_move(self, step: int) -> None:
        self.stop_asking()
        self._list.move(step)
        self.look()

    def action_back(self) -> None:
        if self._asking is not None:
            self.stop_asking()
        else:
            self.dismiss(None)

    def action_confirm(self) -> None:
        """Remove the item that the question is about."""
        if (item := self._asking) is not None:
            self.stop_asking()
            self.remove_item(item)

    def remove_item(self, item: Item) -> None:
        """Remove an item after the person has confirmed."""
        raise NotImplementedError

    def ask(self, item: Item) -> None:
        self._asking = item
        self.set_focus(None)  # otherwise the answer would be typed into the search
        self._say("")
        self.show_mode()

    def stop_asking(self) -> None:
        if self._asking is not None:
            self._asking = None
            self._input.focus()
            self.show_mode()


class ItemList(PickerList, Generic[Item]):
    """Items, one a line, one of them selected."""

    class ItemSelected(Message):
        """Posted when an item was clicked."""

        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Item] = []
        self._nothing = ""

    def key(self, item: Item) -> str:
        """Return the string that identifies an item, with which the picker dismisses."""
        raise NotImplementedError

    def line(self, item: Item, width: int, now: float) -> Line:
        """Return the line of an item; `now` is in seconds since the epoch."""
        raise NotImplementedError

    @property
    def count(self) -> int:
        return len(self.items)

    @property
    def chosen(self) -> Item | None:
        return self.items[self._index] if self.items else None

    def show(self, items: list[Item], nothing: str) -> None:
        """Show these items, keeping the selection if it is among them. `nothing` is shown for an empty list."""
        before = self.chosen
        self.items, self._nothing = items, nothing
        keys = [self.key(item) for item in items]
        key = self.key(before) if before is not None else None
        self._index = keys.index(key) if key in keys else 0
        self.resized()

    def drop(self, key: str) -> None:
        """Remove an item from the list and select the next one."""
        self.items = [item for item in self.items if self.key(item) != key]
        self._index = min(self._index, max(len(self.items) - 1, 0))
        self.resized()

    def on_click(self, event: events.Click) -> None:
        row = self.clicked(event)
        if row is not None:
            event.stop()
            self._index = row
            self.refresh()
            self.post_message(self.ItemSelected(self.key(self.items[row])))

    def build(self, width: int) -> list[Line]:
        if not self.items:
            return [[(elided(self._nothing, width), "muted")]]
        now = time()
        lines: list[Line] = []
        for row in self.in_view():
            line = self.line(self.items[row], width, now)
            lines.append(styled(padded(line, width, ""), "chosen") if row == self._index else line)
        return lines
