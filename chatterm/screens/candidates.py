"""`/retry N`: several answers to one message side by side as they stream, to keep one of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from chatterm.conversation.entry_cache import labels
from chatterm.conversation.screen_conversation import ScreenConversation
from chatterm.conversation.turn import SPINNER, RunningTurn
from chatterm.markdown.lines import Line, Run, cells, elided, line_cells, line_text, padded, styled, wrap
from chatterm.terminal.sanitize import one_line
from chatterm.widgets.canvas import STYLE_CLASSES, Canvas
from engine.cache.block_map import BlockMap
from models.units import counted

_FRAME = 1 / 15
_NARROWEST = 34
"""The fewest columns of a candidate for a side-by-side layout."""
_LOWEST = 9
"""The fewest rows of text of a candidate for several rows of candidates."""
_AIRY = 20
"""Rows of a candidate from which an empty row follows its head."""
_GAP = 2
_BEGINNING = 8
"""Lines from which the preview of a collapsed candidate is made."""
_ENDS = {"cancelled": "stopped", "length": "at the token limit", "context_full": "the context is full"}


class CandidatesScreen(ModalScreen[None]):
    """Covers the conversation until one answer is kept. Running answers go on, and are saved, regardless."""

    COMPONENT_CLASSES: ClassVar[set[str]] = STYLE_CLASSES
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "back", "Stop them, or keep the earlier answer", priority=True),
        Binding("enter", "keep", "Keep the selected answer", priority=True),
        Binding("left,shift+tab,h", "move(-1)", "The answer before", priority=True),
        Binding("right,tab,l", "move(1)", "The next answer", priority=True),
        Binding("up,k", "row(-1)", "The answer above", priority=True),
        Binding("down,j", "row(1)", "The answer below", priority=True),
        Binding("pageup,b", "page(-1)", "Scroll up", priority=True),
        Binding("pagedown,space", "page(1)", "Scroll down", priority=True),
        Binding("f3", "cache", "Map of the KV cache", priority=True),
    ]

    def __init__(self, conversation: ScreenConversation, blocks: Callable[[], BlockMap | None]) -> None:
        super().__init__()
        self._conversation = conversation
        self._all = conversation.choice  # copied now: one may fail before the screen is composed
        self._blocks = blocks
        self._is_over = False

    def compose(self) -> ComposeResult:
        yield Candidates(self._all)

    def on_mount(self) -> None:
        self._look()
        self.set_interval(_FRAME, self._look)

    @property
    def _view(self) -> "Candidates":
        return self.query_one(Candidates)

    def _look(self) -> None:
        if not self._conversation.choice:
            if self.app.screen is self and not self._is_over:  # the cache map may cover it
                self._is_over = True
                self.dismiss()
        else:
            self._view.show(self._conversation.choice, self._conversation.turn is not None)

    def on_key(self, event: events.Key) -> None:
        event.stop()
        if event.character is not None and (turn := self._view.numbered(event.character)) is not None:
            self._keep(turn)

    def on_click(self, event: events.Click) -> None:
        turn, is_whole = self._view.at(event.x, event.y)
        if turn is not None and is_whole:
            self._keep(turn)
        elif turn is not None:
            self._view.select(turn)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._view.scroll_at(event.x, event.y, 3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._view.scroll_at(event.x, event.y, -3)

    def _keep(self, turn: RunningTurn) -> None:
        if any(turn is other for other in self._conversation.choice):  # it may be gone since it was drawn
            self._conversation.keep(turn)
        self._look()

    def action_keep(self) -> None:
        if (turn := self._view.selected) is not None:
            self._keep(turn)

    def action_back(self) -> None:
        if self._conversation.turn is not None:
            self._conversation.stop()
        else:
            self._conversation.choose_none()
            self._look()

    def action_move(self, step: int) -> None:
        self._view.move(step)

    def action_row(self, step: int) -> None:
        self._view.move(step * self._view.across)

    def action_page(self, step: int) -> None:
        self._view.page(step)

    def action_cache(self) -> None:
        from chatterm.screens.cache import CacheScreen

        self.app.push_screen(CacheScreen(self._blocks))


@dataclass(slots=True)
class _Box:
    """The position and size of a candidate; `height` includes its head."""

    turn: RunningTurn
    x: int
    y: int
    width: int
    height: int

    @property
    def gap(self) -> int:
        """The number of empty rows below the head."""
        return 1 if self.height >= _AIRY else 0

    @property
    def room(self) -> int:
        """The number of rows for the text."""
        return max(self.height - 1 - self.gap, 0)


class Candidates(Canvas):
    """Shows the candidates side by side if there is room, else as a list in which the selected one is open."""

    DEFAULT_CSS = "Candidates { width: 100%; height: 100%; padding: 1 3; }\nCandidates.-low { padding: 0 1; }"

    def __init__(self, turns: Sequence[RunningTurn]) -> None:
        super().__init__()
        self.selected: RunningTurn | None = None
        self.across = 1
        """The number of candidates side by side."""
        self._turns: list[RunningTurn] = []
        self._all = list(turns)
        """All candidates, including those removed because they ended without text, so that no number changes."""
        self._scrolled: dict[int, int] = {}
        """By exchange id, the rows scrolled past."""
        self._is_running = True
        self._boxes: list[_Box] = []
        self._lines: list[Line] = []
        self._made_for: tuple[int, int] | None = None

    def show(self, turns: list[RunningTurn], is_running: bool) -> None:
        """Show these candidates; select the first if the selected one is gone."""
        self._turns, self._is_running = list(turns), is_running
        if self.selected not in self._turns:
            self.selected = turns[0]
        self._again()

    def select(self, turn: RunningTurn) -> None:
        self.selected = turn
        self._again()

    def numbered(self, digit: str) -> RunningTurn | None:
        """Return the candidate with this number; None if there is none."""
        return next((turn for turn in self._turns if digit == str(self._number(turn))), None)

    def _number(self, turn: RunningTurn) -> int:
        return self._all.index(turn) + 1

    def move(self, step: int) -> None:
        if self.selected in self._turns:
            place = self._turns.index(self.selected) + step
            if 0 <= place < len(self._turns):
                self.select(self._turns[place])

    def page(self, step: int) -> None:
        box = next((box for box in self._boxes if box.turn is self.selected), None)
        if box is not None:
            self._scroll(box, step * max(box.room - 2, 1))

    def scroll_at(self, x: int, y: int, step: int) -> None:
        for box in self._boxes:
            if box.turn is self._at(x, y):
                self._scroll(box, step)

    def at(self, x: int, y: int) -> tuple[RunningTurn | None, bool]:
        """Return the candidate at screen position (x, y), and whether its text is shown."""
        turn = self._at(x, y)
        return turn, any(box.turn is turn and box.height > 1 for box in self._boxes)

    def _at(self, x: int, y: int) -> RunningTurn | None:
        x, y = x - self.content_region.x, y - self.content_region.y
        for box in self._boxes:
            if box.x <= x < box.x + box.width and box.y <= y < box.y + box.height:
                return box.turn
        return None

    def _scroll(self, box: _Box, rows: int) -> None:
        id = box.turn.exchange.id
        most = max(len(_text(box.turn, box.width - 2)) - box.room, 0)
        self._scrolled[id] = min(max(self._scrolled.get(id, 0) + rows, 0), most)
        self._again()

    def _again(self) -> None:
        self._made_for = None
        self.refresh()

    # --- display ---

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(self.screen.size.height < 20, "-low")

    def build(self, width: int) -> list[Line]:
        size = (width, self.size.height)
        if size != self._made_for:
            self._made_for = size
            self._lines = self._drawn(*size) if self._turns else []
        return self._lines

    def _drawn(self, width: int, height: int) -> list[Line]:
        question = one_line(self._turns[0].prompt.said, 400)
        title = f"{counted(len(self._turns), 'answer')}  "
        head: Line = [(title, "heading"), (elided(question, max(width - cells(title), 8)), "user")]
        failures = self._failures(width)
        room = height - 4 - len(failures)
        self._boxes = self._placed(width, room)
        rows: list[Line] = [[] for _ in range(max(room, 1))]
        for box in self._boxes:
            for at, line in enumerate(self._card(box)):
                if box.y - 2 + at < len(rows):
                    row = rows[box.y - 2 + at]
                    row[:] = [*padded(row, box.x, ""), *line]
        return [head, [], *rows, [], *failures, [(self._hint(width), "muted")]]

    def _failures(self, width: int) -> list[Line]:
        """Return a line with the errors of removed candidates; [] if there are none."""
        gone = [turn for turn in self._all if turn.problem and turn not in self._turns]
        said = " · ".join(f"Answer {self._number(turn)} failed: {turn.problem}" for turn in gone)
        return [[(elided(said, width), "error")]] if said else []

    def _hint(self, width: int) -> str:
        """Return a hint about the keys that fits into `width` columns."""
        select = "← → select" if self.across > 1 else "↑ ↓ select"
        leave = "Esc stops them" if self._is_running else "Esc keeps the earlier answer"
        keep = "Enter or its number keeps one"
        for parts in ((select, "Page Up, Page Down scroll", keep, leave), (select, keep, leave)):
            if cells(hint := " · ".join(parts)) <= width:
                return hint
        return elided(f"{select} · Enter keeps it · {leave}", width)

    def _placed(self, width: int, height: int) -> list[_Box]:
        """Return the boxes of the candidates, below the title and an empty line."""
        count = len(self._turns)
        most = max((width + _GAP) // (_NARROWEST + _GAP), 1)
        rows = -(-count // most)
        across = -(-count // rows)
        each = (height - (rows - 1)) // rows
        if across > 1 and (rows == 1 or each - 1 >= _LOWEST):
            self.across = across
            size = (width - _GAP * (across - 1)) // across
            places = [divmod(number, across) for number in range(count)]
            return [
                _Box(turn, column * (size + _GAP), 2 + row * (each + 1), size, each)
                for turn, (row, column) in zip(self._turns, places, strict=True)
            ]
        self.across = 1
        boxes, y = [], 2
        for turn in self._turns:
            size = max(height - count + 1, 1) if turn is self.selected else 1
            boxes.append(_Box(turn, 0, y, width, size))
            y += size
        return boxes

    def _card(self, box: _Box) -> list[Line]:
        """Return the lines of a candidate, each as wide as its box."""
        turn, width = box.turn, box.width
        is_selected = turn is self.selected
        bar = ("▌", "user-bar") if is_selected else ("│", "rule")
        head = [bar, (" ", ""), *self._head(turn, width - 2, with_text=box.height == 1)]
        filled = padded(head, width, "")
        lines = [styled(filled, "chosen") if is_selected else filled]
        if room := box.room:
            text = _text(turn, width - 2)
            start = min(self._scrolled.get(turn.exchange.id, 0), max(len(text) - room, 0))
            shown = text[start : start + room]
            if start and room > 3:
                shown[0] = [(f"▴ {counted(start + 1, 'more line')}", "muted")]
            if (left := len(text) - start - room) > 0:
                how = " · Page Down" if is_selected else ""
                shown[-1] = [(elided(f"▾ {counted(left + 1, 'more line')}{how}", width - 2), "muted")]
            for line in [*([[]] * box.gap), *shown, *([[]] * (room - len(shown)))]:
                lines.append(padded([bar, (" ", ""), *line], width, ""))
        return lines

    def _head(self, turn: RunningTurn, width: int, *, with_text: bool) -> Line:
        """Return a candidate's number and state and, if `with_text`, the beginning of its text."""
        number, state = f"{self._number(turn)}  ", _state(turn)
        names = labels(other.exchange.model for other in self._all)
        if len(names) > 1:  # several models are compared
            name, room = names.get(turn.exchange.model, ""), width - cells(number) - 2
            if cells(name) + cells(state) > room:
                state = _state(turn, is_short=True)
            number += f"{elided(name, max(room - cells(state), 8))}  "
        state = elided(state, max(width - cells(number), 1))
        line: Line = [(number, "accent"), (state, "muted")]
        room = width - line_cells(line) - 2
        if with_text and room > 8:
            begins = " ".join(line_text(line).strip() for line in _text(turn, width)[:_BEGINNING])
            line += [("  ", ""), (elided(one_line(begins, room + 40), room), "")]
        return line


def _state(turn: RunningTurn, *, is_short: bool = False) -> str:
    """Return a candidate's state or result; the short form leaves out the thinking tokens."""
    count = counted(turn.speed.count, "token")
    reason = turn.exchange.finish_reason
    if reason is not None:
        end = "failed" if turn.problem else _ENDS.get(reason, "")
        thought = 0 if is_short else turn.answer.thinking_tokens
        return " · ".join(part for part in (count, end, f"{thought:,} thinking" if thought else "") if part)
    sign = SPINNER[int((monotonic() - turn.started) * 10) % len(SPINNER)]
    if turn.is_stopping:
        return f"{sign} stopping"
    if not turn.has_begun:
        return f"{sign} {turn.doing}"
    return f"{sign} thinking, {count}" if turn.answer.is_thinking else f"{sign} {count}"


def _text(turn: RunningTurn, width: int) -> list[Line]:
    """Return the text of a candidate: its thinking until there is an answer, then the answer; any error follows."""
    answer = turn.answer
    if answer.body.is_empty and answer.has_thought:
        lines = [styled(line, "thinking") for line in answer.thinking.lines(width)]
    elif answer.body.is_empty and turn.exchange.finish_reason is not None:
        lines = [[("The model gave no text.", "muted")]]
    else:
        lines = [_plain(line) for line in answer.body.lines(width)]
    return [*lines, [], *wrap([(turn.problem, "error")], width)] if turn.problem else lines


def _plain(line: Sequence[Run]) -> Line:
    """Return `line` without its copy button, because a click here selects or keeps a candidate."""
    return [(" " * cells(text) if style.endswith("code-copy") else text, style) for text, style in line]
