"""The model picker: models of this machine, of servers and of the catalogue, with size, memory and expected speed."""

from collections.abc import Callable, Sequence

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Input

from chatterm.backends.backend import ModelChoice
from chatterm.conversation.figures import rate_text
from chatterm.markdown.lines import Line, cells, elided, padded, styled, wrap
from chatterm.screens.picker import Picker, PickerList
from chatterm.terminal.sanitize import one_line
from chatterm.widgets.canvas import Canvas
from models.units import bytes_text, counted

HEADS = (("size", 7, True), ("memory", 7, True), ("speed", 12, True), ("", 11, False))
"""For each column its title, its width, and whether it is right-aligned."""
_NAME = 21
"""The fewest columns of a name: every name of the catalogue fits."""
_CUT_NAME = 15
"""The same when only one other column is left."""


class ModelPicker(Picker):
    """Dismisses with the chosen name, or with None. Typing filters the list or enters another name (Hub id, path).

    It opens before the list has been loaded, so that no key goes elsewhere; Enter then takes effect once it has.
    """

    DEFAULT_CSS = """
    ModelPicker > Vertical { max-width: 96; }
    ModelPicker PickerLine { height: 1; }
    ModelPicker #picker-detail { height: 2; margin-top: 1; }
    ModelPicker.-low #picker-detail, ModelPicker.-low #picker-foot { display: none; }
    """
    AROUND = 11

    def __init__(self, current: str, waits: str, looks: int) -> None:
        """Open without a list: `waits` says why, until `show`. `looks`: number of server scans that call `add`."""
        super().__init__()
        self._list = ModelList(current, waits)
        self._looks = looks
        self._accepts = False
        """Whether Enter was pressed before there was a list."""

    def compose(self) -> ComposeResult:
        with Vertical():
            yield PickerLine(self._head, id="picker-head")
            yield Input(placeholder="Search, or type a Hub id, a path or openai://HOST:PORT/MODEL")
            yield PickerLine(lambda width: head_line(width, self._list.unknown), id="picker-columns")
            yield self._list
            yield ModelDetail(id="picker-detail")
            foot = "Enter selects (and downloads if needed) · Esc goes back"
            yield PickerLine(lambda width: [(foot, "muted")], id="picker-foot")

    def _head(self, width: int) -> Line:
        return [("Models", "heading"), *([(" · looking for servers…", "muted")] if self._looks > 0 else [])]

    def show(self, choices: Sequence[ModelChoice]) -> None:
        """Show the list of local models and the catalogue; carry out an earlier Enter."""
        self._list.waits = ""
        self._add(choices)
        if self._accepts:
            self.action_accept()

    def add(self, choices: Sequence[ModelChoice]) -> None:
        """Add the models found by a server scan."""
        self._looks -= 1
        self._add(choices)

    def _add(self, choices: Sequence[ModelChoice]) -> None:
        self._list.add(choices)
        if self.is_mounted and self.is_running:  # otherwise it is not composed yet, or closed
            for line in self.query(PickerLine):
                line.refresh()

    @on(Input.Changed)
    def _typed(self, message: Input.Changed) -> None:
        self._accepts = False
        self._list.look(message.value)

    def on_model_list_looked_at(self, message: "ModelList.LookedAt") -> None:
        line = self.query_one(ModelDetail)
        line.choice = message.choice
        line.refresh()

    def on_model_list_model_selected(self, message: "ModelList.ModelSelected") -> None:
        self.dismiss(message.name)

    def action_accept(self) -> None:
        if (name := self._list.chosen) is not None:
            self.dismiss(name)
        else:
            self._accepts = bool(self.query_one(Input).value)


class PickerLine(Canvas):
    """A single line."""

    def __init__(self, line: Callable[[int], Line], *, id: str | None = None) -> None:
        """Create the line; `line` returns it for a width."""
        super().__init__(id=id)
        self._line = line

    def build(self, width: int) -> list[Line]:
        return [self._line(width)]


class ModelDetail(Canvas):
    """Details of the selected model."""

    choice: ModelChoice | None = None

    def build(self, width: int) -> list[Line]:
        return wrap([detail(self.choice)], width)


class ModelList(PickerList):
    """The models that match, one a line, one of them selected."""

    class ModelSelected(Message):
        """Posted when a model was clicked."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    class LookedAt(Message):
        """Posted when another model is selected; None if there is none."""

        def __init__(self, choice: ModelChoice | None) -> None:
            super().__init__()
            self.choice = choice

    def __init__(self, current: str, waits: str) -> None:
        super().__init__()
        self.waits = waits
        """Why there is no list yet; "" once there is."""
        self._current = current
        self._typed = ""
        self._is_chosen = False
        """Whether the person has moved or typed."""
        self._choices: list[ModelChoice] = []
        self._matching: list[ModelChoice] = []

    @property
    def count(self) -> int:
        return len(self._matching)

    @property
    def chosen(self) -> str | None:
        """The name to load: the selected one, else the typed text; None if there is neither."""
        if self._matching:
            return self._matching[self._index].name
        return None if self.waits else self._typed or None

    @property
    def unknown(self) -> frozenset[str]:
        """The titles of the columns that are empty for every model."""
        return unknown_columns(self._choices)

    def look(self, typed: str) -> None:
        """Show the models that match `typed`."""
        self._typed = one_line(typed, 300)
        self._is_chosen = True
        self._match()
        self._index = self._first = 0
        self.resized()
        self._tell()

    def add(self, choices: Sequence[ModelChoice]) -> None:
        """Add models. Keep the person's selection; before one was made, select the current model."""
        known = {choice.name for choice in self._choices}
        fresh = [choice for choice in choices if choice.name not in known]
        is_chosen = self._is_chosen and self._matching
        chosen = self._matching[self._index].name if is_chosen else self._current
        self._choices = sorted([*self._choices, *fresh], key=_place)
        self._match()
        names = [choice.name for choice in self._matching]
        self._index = names.index(chosen) if chosen in names else 0
        self.resized()
        self._tell()

    def _match(self) -> None:
        words = self._typed.lower().split()
        self._matching = [
            choice
            for choice in self._choices
            if all(word in f"{choice.name} {choice.server}".lower() for word in words)
        ]

    def move(self, step: int) -> None:
        super().move(step)
        self._is_chosen = True
        self._tell()

    def _tell(self) -> None:
        self.post_message(self.LookedAt(self._matching[self._index] if self._matching else None))

    def on_mount(self) -> None:
        self.resized()
        self._tell()

    def on_click(self, event: events.Click) -> None:
        row = self.clicked(event)
        if row is not None:
            event.stop()
            self.post_message(self.ModelSelected(self._matching[row].name))

    def build(self, width: int) -> list[Line]:
        if not self._matching and (self.waits or not self._typed):
            return [[(elided(self.waits or "There is no list; type a name.", width), "muted")]]
        if not self._matching:
            typed = elided(self._typed, width - 20)
            return [[("No match; ", "muted"), ("Enter loads ", "muted"), (typed, "primary")]]
        unknown = self.unknown
        return [
            choice_line(
                self._matching[row], width, chosen=row == self._index, current=self._current, unknown=unknown
            )
            for row in self.in_view()
        ]


def _place(choice: ModelChoice) -> int:
    """Return the sort key: local models first, then those of servers, then those to download."""
    return 0 if choice.on_disk else 1 if choice.server else 2


def unknown_columns(choices: Sequence[ModelChoice]) -> frozenset[str]:
    """Return the titles of the columns that are empty for every model: without an engine nothing was measured."""
    here = [choice for choice in choices if not choice.server]
    known = {
        "size": any(choice.bytes for choice in here),
        "memory": any(choice.memory_bytes for choice in here),
        "speed": any(choice.tokens_per_s or choice.fits is False for choice in here),
    }
    return frozenset(name for name, is_known in known.items() if not is_known)


def choice_line(
    choice: ModelChoice, width: int, *, chosen: bool, current: str = "", unknown: frozenset[str] = frozenset()
) -> Line:
    """Return a line: mark, name, and the columns of HEADS except `unknown`; narrow screens show fewer columns."""
    mark = "● " if choice.name == current else "○ " if choice.on_disk or choice.server else "  "
    if choice.server:
        line = _on_server(mark, choice, width)
        return styled(padded(line, width, ""), "chosen") if chosen else line
    warned = "warning" if choice.fits is False or choice.crawls else ""
    cells_of = (
        (bytes_text(choice.bytes) if choice.bytes else "", ""),
        (bytes_text(choice.memory_bytes) if choice.memory_bytes else "", ""),
        (speed_text(choice), warned),
        ("downloaded" if choice.on_disk else "to download", "" if choice.on_disk else "muted"),
    )
    name = (one_line(choice.name, 200), "muted" if choice.fits is False else "")
    line = _columns(mark, name, cells_of, width, unknown)
    return styled(padded(line, width, ""), "chosen") if chosen else line


def _on_server(mark: str, choice: ModelChoice, width: int) -> Line:
    """Return the line of a server's model: its name, and the server at the end in place of figures."""
    server = elided(one_line(choice.server, 100), max(width // 2 - 2, 4))
    room = max(width - 4 - cells(server), 4)
    name = elided(one_line(choice.label or choice.name, 200), room)
    return [(mark, "primary"), (name, ""), (" " * (room - cells(name) + 2), ""), (server, "accent")]


def head_line(width: int, unknown: frozenset[str] = frozenset()) -> Line:
    """Return the line of column titles."""
    return _columns("  ", ("", ""), [(head, "muted") for head, _, _ in HEADS], width, unknown)


def _columns(
    mark: str, name: tuple[str, str], cells_of: Sequence[tuple[str, str]], width: int, unknown: frozenset[str]
) -> Line:
    columns = [both for both in zip(HEADS, cells_of, strict=True) if both[0][0] not in unknown]
    while columns and width - 2 - sum(size + 2 for (_, size, _), _ in columns) < (
        _NAME if len(columns) > 1 else _CUT_NAME
    ):
        # The mark already tells where a model is; speed matters more than memory, and memory more than size.
        names = [head for (head, _, _), _ in columns]
        columns.pop(next((names.index(head) for head in ("", "size", "memory") if head in names), 0))
    room = max(width - 2 - sum(size + 2 for (_, size, _), _ in columns), 4)
    text = elided(name[0], room)
    line: Line = [(mark, "primary"), (text, name[1]), (" " * (room - cells(text)), "")]
    for (_, size, right), (text, style) in columns:
        text = elided(text, size)
        gap = " " * (size - cells(text))
        line += [("  ", ""), (gap, ""), (text, style)] if right else [("  ", ""), (text, style), (gap, "")]
    return line


def speed_text(choice: ModelChoice) -> str:
    """Return the expected speed in a few words; "" if unknown."""
    if choice.fits is False:
        return "does not fit"
    return rate_text(choice.tokens_per_s) if choice.tokens_per_s else ""


def detail(choice: ModelChoice | None) -> tuple[str, str]:
    """Return a line about the selected model, to read before loading it, and its style."""
    if choice is None:
        return "", ""
    if choice.server:
        room = f" · {counted(choice.context, 'token')} of context" if choice.context else ""
        return f"{one_line(choice.name, 200)}{room}", "muted"
    if choice.fits is False:
        need = f"about {bytes_text(choice.memory_bytes)}" if choice.memory_bytes else "more"
        return f"It does not fit: it needs {need} of free memory.", "warning"
    if choice.crawls and choice.tokens_per_s:
        other = choice.int4_tokens_per_s
        better = f"; with --quantize int4 about {other:.1f}" if other else ""
        return f"It fits but is slow: about {rate_text(choice.tokens_per_s)}{better}.", "warning"
    known = choice.memory_bytes is not None
    return ("Memory: weights plus 4,096 tokens of conversation. Speed: estimated." if known else ""), "muted"
