"""The keys of the commands. After Ctrl+L, a key acts as it does with Alt, or a digit as its function key."""

from collections.abc import Iterable
from dataclasses import dataclass

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen

from chatterm.commands.registry import key_text, second_key
from chatterm.markdown.lines import Line, cells, elided, padded
from chatterm.screens.backdrop import Backdrop
from chatterm.screens.chat.commands import COMMANDS
from chatterm.widgets.canvas import STYLE_CLASSES, Canvas

_TITLE = "Ctrl+L, then a key · Esc goes back"


@dataclass(frozen=True, slots=True)
class Shortcut:
    """The second key after the leader, Ctrl+L."""

    key: str
    label: str
    action: str
    """An action of the chat screen."""


def command_bindings() -> list[BindingType]:
    """Return the key bindings of the commands."""
    return [
        Binding(
            key,
            f"run_command({command.name!r}, {argument!r})",
            f"/{command.name} {argument or ''}".strip(),
            priority=True,
        )
        for command in COMMANDS
        for key, argument in command.keys.items()
        if key not in ("escape", "ctrl+q")  # these do more than their command
    ]


def ask_for_second_key(screen: Screen[None]) -> None:
    """Show the keys after the leader and run the action of the next key."""

    async def act(chosen: Shortcut | None) -> None:
        if chosen is not None:
            await screen.run_action(chosen.action)

    screen.app.push_screen(LeaderScreen(screen.BINDINGS), act)


def shortcuts(bindings: Iterable[BindingType]) -> dict[str, Shortcut]:
    """Return the second keys of these bindings by key, letters first."""
    found = {}
    for binding in bindings:
        assert isinstance(binding, Binding)
        for key in binding.key.split(","):
            if (second := second_key(key)) is not None:
                assert second not in found, f"{key} and another key are both {second} behind the leader"
                found[second] = Shortcut(second, binding.description, binding.action)
    return {key: found[key] for key in sorted(found, key=lambda key: (not key.isalpha(), len(key), key))}


class LeaderScreen(Backdrop, ModalScreen[Shortcut | None]):
    """Dismisses with the shortcut of the next key, or with None if it has none."""

    COMPONENT_CLASSES = STYLE_CLASSES
    DEFAULT_CSS = """
    LeaderScreen { align: center bottom; background: $background 50%; }
    LeaderScreen > VerticalScroll {
        width: 100%; height: auto; max-height: 90%; margin: 1 2; padding: 1 2; background: $surface;
        scrollbar-gutter: stable; scrollbar-size-vertical: 1; scrollbar-background: $surface; scrollbar-color: $faint;
    }
    LeaderScreen.-low > VerticalScroll { max-height: 100%; margin: 0 2; padding: 0 2; }
    """

    def __init__(self, bindings: Iterable[BindingType]) -> None:
        super().__init__()
        self._shortcuts = shortcuts(bindings)

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=False):
            yield ShortcutList(list(self._shortcuts.values()))

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.height < 20, "-low")

    def on_key(self, event: events.Key) -> None:
        event.stop()
        event.prevent_default()
        if event.key in ("pageup", "pagedown"):
            rows = self.query_one(VerticalScroll)
            rows.scroll_relative(
                y=(rows.size.height - 1) * (1 if event.key == "pagedown" else -1), animate=False
            )
            return
        pressed = event.key if event.key == "space" else event.character or event.key
        self.dismiss(self._shortcuts.get(pressed.lower() if event.is_printable else event.key))

    def on_click(self) -> None:
        self.dismiss(None)


class ShortcutList(Canvas):
    """All shortcuts, in as many columns as fit."""

    def __init__(self, found: list[Shortcut]) -> None:
        super().__init__()
        self._keys = [key_text(shortcut.key) for shortcut in found]
        self._labels = [shortcut.label for shortcut in found]
        self._key_cells = max(map(cells, self._keys)) + 2
        self._cells = self._key_cells + max(map(cells, self._labels)) + 2

    def on_resize(self, event: events.Resize) -> None:
        self.styles.height = len(self.build(event.size.width))

    def build(self, width: int) -> list[Line]:
        columns = max((width + 2) // self._cells, 1)
        rows = -(-len(self._keys) // columns)
        lines: list[Line] = [[(elided(_TITLE, width), "heading")], []]
        for row in range(rows):
            line: Line = []
            for index in range(row, len(self._keys), rows):
                entry: Line = [
                    (self._keys[index].ljust(self._key_cells), "accent"),
                    (self._labels[index], ""),
                ]
                line += padded(entry, self._cells, "")
            lines.append(line)
        return lines
