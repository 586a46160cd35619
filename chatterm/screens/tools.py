"""/tools: the tools that are on, the permanent and session rules, and the sandbox."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical

from chatterm.markdown.lines import Line, cells, elided, padded, styled
from chatterm.screens.notes import Note
from chatterm.screens.picker import Picker, PickerList
from chatterm.screens.report import BoxHead
from chatterm.settings.settings import SettingsError
from chatterm.terminal.sanitize import one_line
from chatterm.tools.rules import PermissionRule
from chatterm.tools.session import ToolSession
from chatterm.tools.tool import Effect

_NAME = 24
_EFFECTS: dict[Effect, str] = {
    "read": "reads files",
    "write": "writes files",
    "run": "runs commands",
    "fetch": "fetches web pages",
    "server": "uses an MCP server",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A tool, a rule, or a heading."""

    text: str
    tool: str = ""
    server: str = ""
    """The name of an MCP server that is not running."""
    rule: PermissionRule | None = None
    is_kept: bool = False

    @property
    def is_choice(self) -> bool:
        return bool(self.tool or self.server or self.rule)


class ToolsScreen(Picker):
    """Switches tools and removes rules. Dismisses with the name of a server to start, or with None."""

    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "accept", "On or off"),
        Binding("delete,backspace", "remove", "Remove the rule"),
        Binding("q,alt+o", "back", "Back to the conversation"),
    ]
    DEFAULT_CSS = """
    ToolsScreen > Vertical { max-width: 100; }
    #tool-detail { height: 3; margin-top: 1; }
    #tool-foot { height: 2; }
    """
    AROUND = 10
    AROUND_LOW = 8

    def __init__(
        self, session: ToolSession, around: str, servers: Sequence[str], changed: Callable[[], None]
    ) -> None:
        """Show the tools. `around` describes the sandbox, `servers` do not run, `changed` is called after a switch."""
        super().__init__()
        self._session = session
        self._around = around
        self._servers = servers
        self._changed = changed

    def compose(self) -> ComposeResult:
        with Vertical():
            yield BoxHead(
                "Tools", ("Enter switches on or off · Del removes a rule · Esc closes", "Esc closes")
            )
            yield ToolList(self._session, self._servers)
            yield Note(id="tool-detail")
            folder = one_line(str(self._session.folder))
            yield Note([(f"Working folder: {folder}. {self._around}", "muted")], id="tool-foot")

    def on_mount(self) -> None:
        self._list = self.query_one(ToolList)
        self._tell()

    def action_move(self, step: int) -> None:
        super().action_move(step)
        self._tell()

    def action_accept(self) -> None:
        tool = self._list.chosen.tool
        if self._list.chosen.server:
            self.dismiss(self._list.chosen.server)
        if not tool:
            return
        self._session.box.on ^= {tool}
        self._list.refresh()
        self._changed()

    def action_remove(self) -> None:
        rule = self._list.chosen.rule
        if rule is None:
            return
        try:
            self._session.policy.remove(rule)
        except SettingsError as error:
            self._tell(str(error))
            return
        self._list.again()
        self._tell("It is no longer allowed without asking.")

    def _tell(self, said: str = "") -> None:
        row = self._list.chosen
        text = ""
        if row.tool:
            planner = self._session.box.planner(row.tool)
            policy = self._session.policy
            ruled = any(rule.tool == row.tool for rule in (*policy.always, *policy.session))
            asks = "you are asked, except for what is allowed below" if ruled else "you are asked each time"
            text = f"{one_line(planner.tool.description, 300)} It {_EFFECTS[planner.effect]}; {asks}."
        elif row.server:
            text = f"An MCP server. Enter starts it ({row.server}) and switches its tools on."
        elif row.rule is not None:
            kept = "always" if row.is_kept else "for this session"
            text = f"Allowed {kept}: {row.rule.tool} {one_line(row.rule.pattern, 200)}"
        self.query_one("#tool-detail", Note).show([(said or text, "")])


class ToolList(PickerList):
    """The tools, then the rules."""

    def __init__(self, session: ToolSession, servers: Sequence[str]) -> None:
        super().__init__()
        self._session = session
        self._servers = servers
        self._rows = _rows(session, servers)

    def on_mount(self) -> None:
        self.resized()

    @property
    def count(self) -> int:
        return len(self._rows)

    @property
    def chosen(self) -> Row:
        return self._rows[self._index]

    def again(self) -> None:
        """Rebuild the rows after the rules have changed."""
        self._rows = _rows(self._session, self._servers)
        self.move(0)
        self.resized()

    def on_click(self, event: events.Click) -> None:
        if (row := self.clicked(event)) is not None:
            self._index = row
            self.move(0)

    def move(self, step: int) -> None:
        """Select the row `step` rows further, or the nearest choice: in that direction if there is one."""
        super().move(step)
        here, way = self._index, 1 if step > 0 else -1
        choices = (index for index, row in enumerate(self._rows) if row.is_choice)
        self._index = min(
            choices, key=lambda index: ((index - here) * way < 0, abs(index - here)), default=here
        )

    def build(self, width: int) -> list[Line]:
        view = self.in_view()
        lines = [self._line(self._rows[index], index == self._index, width) for index in view]
        for row, sign, left in ((0, "↑", view.start), (-1, "↓", self.count - view.stop)):
            if left and len(lines) > 2:  # some rows are out of view
                more = f"{sign} {left} more"
                index, room = view[row], max(width - cells(more), 0)
                line = self._line(self._rows[index], index == self._index, room)
                lines[row] = [*padded(line, room, ""), (more, "muted")]
        return lines

    def _line(self, row: Row, is_chosen: bool, width: int) -> Line:
        mark = "❯ " if is_chosen else "  "
        line: Line
        if row.tool:
            planner, is_on = self._session.box.planner(row.tool), row.tool in self._session.box.on
            state = "on " if is_on else "off"
            name = elided(row.tool, _NAME)
            rest = elided(_EFFECTS[planner.effect], max(width - _NAME - 9, 0))
            gap = " " * (_NAME - cells(name))
            line = [
                (mark, ""),
                (state, "accent" if is_on else "muted"),
                (f"  {name}{gap}", ""),
                (f"  {rest}", "muted"),
            ]
        elif row.server:
            line = [
                (mark, ""),
                ("off", "muted"),
                (f"  {elided(row.server, _NAME):<{_NAME}}", ""),
                ("  MCP server", "muted"),
            ]
        elif row.rule is not None:
            kept = "always " if row.is_kept else "session"
            about = elided(f"{row.rule.tool}  {one_line(row.rule.pattern)}", max(width - 12, 0))
            line = [(mark, ""), (kept, "accent"), (f"  {about}", "")]
        else:
            line = [(f"  {row.text}", "muted")]
        return styled(padded(line, width, ""), "chosen") if is_chosen else line


def _rows(session: ToolSession, servers: Sequence[str]) -> list[Row]:
    rows = [Row("", tool=name) for name in session.box.names]
    rows += [Row("", server=name) for name in servers]
    policy = session.policy
    rules = [
        *(Row("", rule=rule, is_kept=True) for rule in policy.always),
        *(Row("", rule=rule) for rule in policy.session),
    ]
    return [
        *rows,
        *(
            [Row(""), Row("Allowed without asking:"), *rules]
            if rules
            else [Row(""), Row("Nothing is allowed without asking.")]
        ),
    ]
