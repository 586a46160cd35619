"""What a transcript consists of. An entry is data that lays itself out as lines; it knows no widget."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chatterm.figures import seconds_text
from chatterm.markdown.document import Document
from chatterm.markdown.lines import Line, Run, styled, wrap
from chatterm.sanitize import cleaned, visible

INDENT = 2
"""Columns left of every text: the person's bar stands there."""
_MARGIN: Line = [(" " * INDENT, "")]


@dataclass(frozen=True, slots=True)
class Section:
    """Lines of somebody else (they are not copied), and what is put around each when it is drawn."""

    lines: Sequence[Sequence[Run]]
    prefix: Line
    style: str = ""


class Entry:
    """Laid out when somebody asks, and kept until `changed`."""

    def __init__(self) -> None:
        self._sections: list[Section] = []
        self._width = 0
        self.height = 0
        """Lines when it was last laid out: an estimate while the width is another."""

    def build(self, width: int) -> list[Section]:
        raise NotImplementedError

    def changed(self) -> None:
        self._width = 0

    def is_laid_out(self, width: int) -> bool:
        return self._width == width

    def lay_out(self, width: int) -> None:
        if self._width != width:
            self._sections = self.build(width)
            self._width = width
            self.height = sum(len(section.lines) for section in self._sections)

    def line(self, row: int) -> Line:
        """One line of the latest layout; empty where there is none."""
        for section in self._sections:
            if row < len(section.lines):
                line = section.lines[row]
                if not line and section.prefix == _MARGIN:
                    return []
                return [*section.prefix, *(styled(line, section.style) if section.style else line)]
            row -= len(section.lines)
        return []

    def click(self, row: int) -> bool:
        """Whether a click on this line changed anything."""
        return False


class UserEntry(Entry):
    """What the person wrote, exactly as typed: nothing in it is markup."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = cleaned(text)
        self.note = ""
        """Said dimly below it: that it waits, for instance."""

    def build(self, width: int) -> list[Section]:
        rows = self.text.split("\n")
        lines = [line for row in rows for line in wrap([(row, "user")], width - INDENT)]
        sections = [Section(lines, [("▌", "user-bar"), (" ", "")])]
        if self.note:
            sections.append(Section([[(self.note, "muted")]], _MARGIN))
        return sections


class AnswerEntry(Entry):
    """Thinking (if any), the answer, and a line of figures below it."""

    def __init__(self, *, show_thinking: bool | None = None) -> None:
        super().__init__()
        self.body = Document()
        self.thinking = Document()
        self.source: list[str] = []
        """The answer as the model wrote it, in pieces."""
        self.activity = ""
        """What happens while nothing can be read yet."""
        self.footer: Line = []
        self.thinking_tokens = 0
        self.thinking_s = 0.0
        self.is_thinking = False
        self._open = show_thinking
        """None: open while it runs, one line afterwards."""

    def add(self, text: str, *, reasoning: bool) -> None:
        if not reasoning:
            self.source.append(text)
        document = self.thinking if reasoning else self.body
        text = visible(text)
        # A model often begins with line breaks; they are not part of what it says.
        document.append(text.lstrip("\n") if document.is_empty else text)
        self.changed()

    @property
    def has_thought(self) -> bool:
        return self.is_thinking or not self.thinking.is_empty

    @property
    def is_open(self) -> bool:
        return self.is_thinking if self._open is None else self._open

    def show_thinking(self, opened: bool | None) -> None:
        self._open = opened
        self.changed()

    def click(self, row: int) -> bool:
        if row == 0 and self.has_thought:
            self.show_thinking(not self.is_open)
            return True
        return False

    def build(self, width: int) -> list[Section]:
        room = width - INDENT
        sections: list[Section] = []
        if self.has_thought:
            sections.append(Section([[(self._thinking_head(), "thinking-head")]], _MARGIN))
            if self.is_open:
                bar = [*_MARGIN, ("│ ", "rule")]
                sections.append(Section(self.thinking.lines(room - 2), bar, "thinking"))
        if not self.body.is_empty:
            sections.append(Section([[]] if sections else [], _MARGIN))
            sections.append(Section(self.body.lines(room), _MARGIN))
        elif self.activity:
            sections.append(Section([[(self.activity, "muted")]], _MARGIN))
        if self.footer:
            sections.append(Section([[], *wrap(self.footer, room)], _MARGIN))
        return sections

    def _thinking_head(self) -> str:
        tokens = f"{self.thinking_tokens:,} tokens"
        mark = "▾" if self.is_open else "▸"
        if self.is_thinking:
            return f"{mark} thinking · {self.thinking_s:.1f} s, {tokens}"
        return f"{mark} thought for {seconds_text(self.thinking_s)}, {tokens}"


class NoticeEntry(Entry):
    """One message of the program, of a kind: "notice" or "error"."""

    def __init__(self, text: str, kind: str = "notice") -> None:
        super().__init__()
        self.text = cleaned(text)
        self.kind = kind

    def build(self, width: int) -> list[Section]:
        rows = self.text.split("\n")
        lines = [line for row in rows for line in wrap([(row, self.kind)], width - INDENT)]
        mark = "✗ " if self.kind == "error" else "· "
        return [Section(lines[:1], [(mark, f"{self.kind}-mark")]), Section(lines[1:], _MARGIN)]


class BuiltEntry(Entry):
    """Lines made by a function of the width: /help, /stats."""

    def __init__(self, builder: Callable[[int], list[Line]]) -> None:
        super().__init__()
        self._builder = builder

    def build(self, width: int) -> list[Section]:
        return [Section(self._builder(width - INDENT), _MARGIN)]
