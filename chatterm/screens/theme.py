"""The theme picker: the whole screen previews the selected theme."""

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical

from chatterm.markdown.lines import Line, padded, styled
from chatterm.screens.notes import Note
from chatterm.screens.picker import Picker, PickerList
from chatterm.screens.themed_app import ThemedApp
from chatterm.settings.settings import SettingsError
from chatterm.settings.themes import theme_names
from chatterm.terminal.sanitize import one_line


class ThemePicker(Picker):
    """Dismisses with the chosen theme, or with None after restoring the earlier theme."""

    DEFAULT_CSS = """
    ThemePicker { align: right middle; }
    ThemePicker > Vertical { width: 37; margin: 1 2; border-left: outer $primary; background: $panel; }
    ThemePicker PickerList { margin: 1 0; }
    ThemePicker.-low > Vertical { padding: 0 2; margin: 0 2; max-height: 100%; }
    ThemePicker.-low PickerList { margin: 0; }
    """

    def __init__(self, current: str) -> None:
        super().__init__()
        self._current = current

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Note([("Theme", "heading")])
            yield ThemeList(self._current)
            yield Note([("Enter selects · Esc goes back", "muted")], id="theme-foot")

    def on_resize(self, event: events.Resize) -> None:
        event.prevent_default()  # not the picker's layout
        self.set_class(event.size.height < 20, "-low")
        self._fit(event.size.height)

    def _fit(self, height: int) -> None:
        """Fit the list into the rows that the text below it leaves."""
        room = height - 3 if height < 20 else height * 9 // 10 - 8
        foot = self.query_one("#theme-foot", Note)
        rows = len(foot.build(foot.size.width)) if foot.size.width else 1
        self.query_one(ThemeList).styles.max_height = max(room + 1 - rows, 1)

    def preview(self, name: str) -> None:
        """Apply this theme to the whole screen; report an error if its file is invalid."""
        app = self.app
        assert isinstance(app, ThemedApp)
        foot = self.query_one("#theme-foot", Note)
        try:
            said = app.use_theme(name)
        except SettingsError as error:
            foot.show([(one_line(str(error)), "error")])
        else:
            foot.show([(f"{said} Enter selects · Esc goes back".strip(), "muted")])
        self._fit(self.size.height)

    def action_move(self, step: int) -> None:
        super().action_move(step)
        self.preview(self.query_one(ThemeList).chosen)

    def action_accept(self) -> None:
        app = self.app
        assert isinstance(app, ThemedApp)
        # A theme with an invalid file can be selected but is not applied.
        if app.chosen_theme == self.query_one(ThemeList).chosen:
            self.dismiss(app.chosen_theme)

    def action_back(self) -> None:
        app = self.app
        assert isinstance(app, ThemedApp)
        if app.chosen_theme != self._current:
            app.use_theme(self._current)
        self.dismiss(None)


class ThemeList(PickerList):
    def __init__(self, current: str) -> None:
        super().__init__()
        self._current = current
        self._names = theme_names()
        self._index = self._names.index(current) if current in self._names else 0

    @property
    def count(self) -> int:
        return len(self._names)

    @property
    def chosen(self) -> str:
        return self._names[self._index]

    def on_mount(self) -> None:
        self.resized()

    def on_click(self, event: events.Click) -> None:
        row = self.clicked(event)
        if row is not None:
            event.stop()
            self.pick(row - self._index)

    def pick(self, step: int) -> None:
        screen = self.screen
        assert isinstance(screen, ThemePicker)
        screen.action_move(step)

    def on_mouse_scroll_up(self) -> None:
        self.pick(-1)

    def on_mouse_scroll_down(self) -> None:
        self.pick(1)

    def build(self, width: int) -> list[Line]:
        lines = []
        for row in self.in_view():
            name = self._names[row]
            line: Line = [("● " if name == self._current else "  ", "primary"), (name, "")]
            lines.append(styled(padded(line, width, ""), "chosen") if row == self._index else line)
        return lines
