"""The approval of a tool call: shows what the call would do, in full, and the possible answers.

Nothing is approved by accident: "No" is selected at first, so that Yes takes two keys; keys typed before the question
are ignored (`chatterm/tools/keypress_guard.py`), as are pastes; and Yes requires that the whole call was in view.
"""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.geometry import Size
from textual.screen import ModalScreen
from textual.scroll_view import ScrollView
from textual.strip import Strip

from chatterm.markdown.lines import Line, chop, elided, padded, wrap
from chatterm.screens.backdrop import Backdrop
from chatterm.screens.report import BoxHead
from chatterm.terminal.sanitize import visible
from chatterm.tools.danger import revealed
from chatterm.tools.keypress_guard import Deliberate
from chatterm.tools.policy import Answer, choice_text, choices
from chatterm.tools.tool import Tone, ToolPlan
from chatterm.widgets.canvas import STYLE_CLASSES, Canvas, Painter

_LOOK = 0.1
"""Seconds between two checks whether keys count yet."""
_STYLES: dict[Tone, str] = {
    "text": "",
    "muted": "muted",
    "added": "code-added",
    "removed": "code-removed",
    "warning": "warning",
}
_BAR: Line = [("│ ", "rule")]
"""Drawn before every line of a call, so that none can pass for a message of chatterm."""
_MOST_LINES = 20_000
_TOO_LONG = "It is too long to be shown; answer No."
_WAIT = "One moment: keys pressed before you could read this are ignored."


class ApprovalScreen(Backdrop, ModalScreen[Answer | None]):
    """Dismisses with the answer, or with None: no, and stop altogether."""

    COMPONENT_CLASSES: ClassVar[set[str]] = STYLE_CLASSES
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "dismiss(None)", "No, and stop", priority=True),
        Binding("pageup", "scroll(-1)", "Page up", priority=True),
        Binding("pagedown,space", "scroll(1)", "Page down", priority=True),
        Binding("end", "edge", "To the end", priority=True),
    ]
    DEFAULT_CSS = """
    ApprovalScreen { align: center bottom; }
    ApprovalScreen > Vertical {
        width: 100%; max-width: 140; height: auto; max-height: 100%; padding: 1 2; background: $surface;
        color: $foreground; border-top: heavy $accent;
    }
    ApprovalScreen PlanView { height: auto; }
    ApprovalScreen AnswerList { height: auto; margin-top: 1; }
    ApprovalScreen Notice { height: auto; }
    """

    def __init__(
        self, plan: ToolPlan, why: str, place: str, now: Callable[[], float] = monotonic, model: str = ""
    ) -> None:
        """Ask about `plan`. `why`: the reason for asking; `place`: which call of how many, "" for the only one."""
        super().__init__()
        self._plan = plan
        self._why = why
        self._place = place
        self._now = now
        self._model = model
        self._keys = Deliberate(now())
        self._answers = AnswerList(plan, choices(plan), self._may)

    def compose(self) -> ComposeResult:
        label = f"{self._model or 'The model'} asks to use {self._plan.tool}{self._place}"
        with Vertical():
            yield BoxHead(label, ("Esc: no, and stop", "Esc: no"))
            if self._plan.dangers:
                yield Notice(f"Caution: {' · '.join(self._plan.dangers)}", "warning")
            yield PlanView(self._plan.shown)
            yield self._answers

    def on_mount(self) -> None:
        self._look()
        self.set_interval(_LOOK, self._look)

    def on_resize(self, event: events.Resize) -> None:
        view = self.query_one(PlanView)
        around = 9 + len(self._answers.answers) + (2 if self._plan.dangers else 0)
        view.styles.max_height = max(event.size.height - around, 3)

    def on_key(self, event: events.Key) -> None:
        event.stop()
        event.prevent_default()
        counts = self._keys.press(self._now())
        if not counts:
            self._answers.reset()
        elif event.key in ("up", "down"):
            self._answers.move(-1 if event.key == "up" else 1)
        elif event.key == "enter":
            chosen = self._answers.chosen
            if chosen == "no" or self._may():
                self.dismiss(chosen)
        self._look()

    def on_paste(self, event: events.Paste) -> None:
        """Drop a paste, which was meant for something else, and select No again."""
        event.stop()
        self._keys.press(self._now())
        self._keys.press(self._now())
        self._answers.reset()

    def action_scroll(self, step: int) -> None:
        self._keys.press(self._now())
        view = self.query_one(PlanView)
        view.scroll_relative(y=step * max(view.size.height - 1, 1), animate=False)
        self.call_after_refresh(self._look)

    def action_edge(self) -> None:
        self._keys.press(self._now())
        self.query_one(PlanView).scroll_end(animate=False)
        self.call_after_refresh(self._look)

    def _may(self) -> bool:
        """Return whether Yes can be chosen: the whole call was in view."""
        views = self.query(PlanView)
        return bool(views) and views.first().was_seen

    def _look(self) -> None:
        view = self.query_one(PlanView)
        view.look()
        below = view.below
        self._answers.say(
            _TOO_LONG
            if not view.is_whole
            else f"↓ {below:,} more lines; Page Down and End show them. You can allow it once you have seen them."
            if below and not view.was_seen
            else ""
            if self._keys.ready(self._now())
            else _WAIT,
            self._why,
        )


class Notice(Canvas):
    """A message of chatterm itself."""

    def __init__(self, text: str, style: str) -> None:
        super().__init__()
        self._text = text
        self._style = style

    def build(self, width: int) -> list[Line]:
        return [*wrap([(visible(self._text), self._style)], max(width, 10)), []]

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.build(width))


class PlanView(ScrollView, Painter):
    """A scrollable view of the whole call."""

    DEFAULT_CSS = """
    PlanView {
        overflow: hidden auto; scrollbar-gutter: stable; scrollbar-size-vertical: 1;
        scrollbar-background: $surface; scrollbar-background-hover: $surface; scrollbar-background-active: $surface;
        scrollbar-color: $faint; scrollbar-color-hover: $muted; scrollbar-color-active: $muted;
    }
    """

    def __init__(self, shown: Sequence[tuple[str, Tone]]) -> None:
        super().__init__()
        self._shown = shown
        self._lines: list[Line] = []
        self._made_for = 0
        self.is_whole = True
        """Whether the lines are the whole call."""
        self.was_seen = False
        """Whether the last line of the whole call has been in view."""

    @property
    def below(self) -> int:
        """The number of lines below the view."""
        return max(len(self._lines) - self.scroll_offset.y - self.size.height, 0)

    def look(self) -> None:
        """Note whether the last line of the whole call is in view."""
        if self.is_whole and self._lines and self.size.height and not self.below:
            self.was_seen = True

    def on_resize(self, _: events.Resize) -> None:
        width = max(self.scrollable_content_region.width - 1, 8)
        if width != self._made_for:
            self._made_for = width
            self._lines, self.is_whole = _laid_out(self._shown, width)
        self.styles.height = max(len(self._lines), 1)
        self.virtual_size = Size(width, len(self._lines))

    def render_line(self, y: int) -> Strip:
        row = y + self.scroll_offset.y
        line = self._lines[row] if row < len(self._lines) else []
        return self.strip(line).crop_extend(0, self.size.width, self.style_of(""))


class AnswerList(Canvas):
    """The list of answers; the first one, No, is selected at first."""

    def __init__(self, plan: ToolPlan, answers: Sequence[Answer], may: Callable[[], bool]) -> None:
        super().__init__()
        self.answers = answers
        self._plan = plan
        self._may = may
        self._index = 0
        self._said = (_WAIT, "")

    @property
    def chosen(self) -> Answer:
        return self.answers[self._index]

    def move(self, step: int) -> None:
        self._index = min(max(self._index + step, 0), len(self.answers) - 1)
        self.refresh()

    def reset(self) -> None:
        self._index = 0
        self.refresh()

    def say(self, wait: str, why: str) -> None:
        """Show below the answers why none can be chosen yet (`wait`), else why the person is asked."""
        if (wait, why) != self._said:
            self._said = (wait, why)
            self.refresh(layout=True)

    def build(self, width: int) -> list[Line]:
        lines: list[Line] = []
        for index, answer in enumerate(self.answers):
            is_chosen = index == self._index
            style = "chosen" if is_chosen else "" if answer == "no" or self._may() else "muted"
            text = f"{'❯' if is_chosen else ' '} {choice_text(self._plan, answer)}"
            lines.append(padded([(elided(text, width), style)], width, style))
        wait, why = self._said
        foot = wait or f"{why} ↑ ↓ choose, Enter answers."
        return [*lines, [], *wrap([(foot, "warning" if wait else "muted")], max(width, 10))]

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.build(width))


def _laid_out(shown: Sequence[tuple[str, Tone]], width: int) -> tuple[list[Line], bool]:
    """Return the call in lines of `width` columns, and whether they are all of it.

    Lines are broken anywhere, so that no character and no blank is lost.
    """
    lines: list[Line] = []
    for text, tone in shown:
        break_up = wrap if tone == "warning" else chop  # a warning is a sentence of chatterm's own
        for row in revealed(visible(text)).split("\n"):
            lines += [
                [*_BAR, *line] for line in break_up([(row.expandtabs(4), _STYLES[tone])], width - 2) or [[]]
            ]
            if len(lines) > _MOST_LINES:
                return [*lines, [(f"│ {_TOO_LONG}", "warning")]], False
    return lines, True
