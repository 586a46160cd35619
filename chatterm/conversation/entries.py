"""The entries of a transcript. An entry is data that lays itself out as lines; it knows no widget."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from chatterm.backends.exchange import Exchange
from chatterm.backends.pictures import Picture, take_out_pictures
from chatterm.commands.registry import command_key
from chatterm.conversation.ending import Ending
from chatterm.conversation.figures import seconds_text
from chatterm.conversation.json_tree import JsonTree
from chatterm.conversation.thumbnail import Thumbnail
from chatterm.markdown.code import code_blocks
from chatterm.markdown.document import Document
from chatterm.markdown.lines import Line, Run, cells, elided, line_cells, styled, wrap
from chatterm.markdown.plain import PlainText
from chatterm.terminal.sanitize import cleaned, visible
from models.units import counted

INDENT = 2
"""Columns left of every text, where the bar of user messages is drawn."""
_LONG, _LONG_LINES = 8_000, 60
"""Characters and lines from which a user message is folded."""
_LONG_HEAD, _LONG_HEAD_LINES = 2_000, 12
"""Characters and lines that are shown of a folded message."""
_EDITED = "✎ you are editing this message below"
_PINNED = "◆ pinned"
_MARGIN: Line = [(" " * INDENT, "")]

Branch = tuple[int, int]
"""Which of the alternatives a message is, from 1, and how many there are."""


@dataclass(frozen=True, slots=True)
class Click:
    """What a click on a line means."""

    what: str
    """`fold` (done already), `prev` or `next` branch, `copy` of a code block, or `message` for the rest."""
    number: int = 0
    """Which code block, from 1."""


@dataclass(frozen=True, slots=True)
class Section:
    """Lines (shared, not copied), and the prefix and style that each gets when it is drawn."""

    lines: Sequence[Sequence[Run]]
    prefix: Line
    style: str = ""


class Entry:
    """A part of the transcript. Its layout is made on demand and kept until `changed`."""

    def __init__(self) -> None:
        self._sections: list[Section] = []
        self._width = 0
        self.height = 0
        """Lines of the latest layout: an estimate if that has another width."""
        self.on_change: Callable[[Entry], None] | None = None
        """Called with the entry when it has to be laid out again."""

    def prepare(self, width: int) -> bool:
        """Do a piece of what `build` needs. Return whether it was the last one."""
        return True

    def build(self, width: int) -> list[Section]:
        raise NotImplementedError

    @property
    def layout(self) -> object:
        """An object that is a new one after each layout."""
        return self._sections

    def changed(self) -> None:
        self._width = 0
        if self.on_change is not None:
            self.on_change(self)

    @property
    def is_blank(self) -> bool:
        """Whether there is nothing to show, not even an empty line."""
        return False

    def is_laid_out(self, width: int) -> bool:
        return self._width == width

    def step(self, width: int) -> bool:
        """Lay out a piece. Return whether it was the last one; until then the lines are those of the old layout."""
        if self._width != width:
            if not self.prepare(width):
                return False
            self._sections = self.build(width)
            self._width = width
            self.height = sum(len(section.lines) for section in self._sections)
        return True

    def lay_out(self, width: int) -> None:
        while not self.step(width):
            pass

    def line(self, row: int) -> Line:
        """Return one line of the latest layout; [] if it has no such line."""
        for section in self._sections:
            if row < len(section.lines):
                line = section.lines[row]
                if not line and section.prefix == _MARGIN:
                    return []
                return [*section.prefix, *(styled(line, section.style) if section.style else line)]
            row -= len(section.lines)
        return []

    def click(self, row: int, column: int) -> Click:
        """Return the meaning of a click; what concerns only this entry is done at once."""
        at = 0
        for text, style in self.line(row):
            at += cells(text)
            if column < at:
                if style == "branch":
                    return Click("prev" if column < at - cells(text) / 2 else "next")
                if style.endswith("code-copy"):
                    above = (self.line(number) for number in range(row + 1))
                    labels = [run for line in above for run in line if run[1].endswith("code-copy")]
                    return Click("copy", len(labels))
                break
        return Click("message")

    @property
    def source_text(self) -> str:
        """The text that a copy of it holds."""
        return ""


class UserEntry(Entry):
    """A user message, exactly as typed: nothing in it is markup."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = cleaned(text)
        self.note = ""
        """A dim note below it: that it waits, for instance."""
        self.branch: Branch = (1, 1)
        self.is_pinned = False
        """Whether the model sees it whatever is compacted."""
        self.is_edited = False
        """Whether it is being edited in the composer."""
        self._is_open = False
        """Whether all of a long message is shown."""
        self._said, self.pictures = take_out_pictures(self.text)
        self._shown, self._rest = PlainText("", "user"), ""
        """The visible part of the message, and the line about the rest."""
        self._fold()
        self.thumbnails: dict[str, Thumbnail] = {}
        """Thumbnails of its pictures that can be shown, by digest."""
        self.is_pictured = False
        """Whether thumbnails were requested since it came into view."""

    @property
    def source_text(self) -> str:
        return self.text

    @property
    def said(self) -> str:
        """The message without the blocks of its pictures."""
        return self._said

    @property
    def is_folded(self) -> bool:
        """Whether some of it is not shown."""
        return bool(self._rest) and not self._is_open

    def unfold(self) -> None:
        """Show all of a long message."""
        if not self._is_open:
            self._is_open = True
            self._fold()

    def _fold(self) -> None:
        head, rest = _folded(self._said)
        self._shown = PlainText(self._said if self._is_open else head, "user")
        self._rest = "▾ show less" if rest and self._is_open else rest
        self.changed()

    def click(self, row: int, column: int) -> Click:
        if self.line(row)[-1:] and self.line(row)[-1][1] == "fold":
            self._is_open = not self._is_open
            self._fold()
            return Click("fold")
        return super().click(row, column)

    def prepare(self, width: int) -> bool:
        return self._shown.step(width - INDENT)

    def build(self, width: int) -> list[Section]:
        bar: Line = [("▌", "user-bar edited" if self.is_edited else "user-bar"), (" ", "")]
        sections = [Section(self._shown.lines(width - INDENT), bar)]
        if self._rest:
            sections.append(Section([[(self._rest, "fold")]], bar))
        sections += [Section(self._drawn(picture, width - INDENT), bar) for picture in self.pictures]
        if self.is_edited:
            sections.append(Section(wrap([(_EDITED, "edited")], width - INDENT), bar))
        pinned: Line = [(_PINNED, "edited"), (" ", "")] if self.is_pinned else []
        below = [*_branch_runs(self.branch), *pinned, *([(self.note, "muted")] if self.note else [])]
        if below:
            sections.append(Section([below], _MARGIN))
        return sections

    def _drawn(self, picture: Picture, room: int) -> list[Line]:
        size = f"{picture.width} x {picture.height} pixels"
        head = f"▣ {picture.name} · {picture.kind.removeprefix('image/').upper()}, {size}"
        found = self.thumbnails.get(picture.digest)
        return [[(elided(head, room), "muted")], *(found.lines(room) if found is not None else [])]


class RetryEntry(UserEntry):
    """A retry that waits for its turn, as messages do."""

    def __init__(self, exchange: Exchange | None, count: int) -> None:
        """Wait to retry `exchange`; None means whichever is last when its turn comes."""
        super().__init__(f"/retry {count}" if count > 1 else "/retry")
        self.exchange = exchange
        self.count = count


class AnswerEntry(Entry):
    """Thinking (if any), the answer, and a line of figures below it."""

    def __init__(self, *, show_thinking: bool | None = None) -> None:
        super().__init__()
        self.body = Document()
        self.thinking = Document()
        self.source: list[str] = []
        """The answer as the model wrote it, in pieces."""
        self._code: tuple[int, list[str]] | None = None
        """How many pieces of `source` there were when code blocks were last searched for, and those found."""
        self.activity = ""
        """The current activity, while there is no text to read."""
        self.footer: Line = []
        self.ending = Ending()
        self.resumes: Container[str] = ()
        """What it may end in for /continue to be able to resume it, as in ModelInfo."""
        self.can_answer_now = True
        """Whether its thinking can be ended."""
        self.model = ""
        """The model that gave it, if that is to be shown."""
        self.branch: Branch = (1, 1)
        self.thinking_tokens = 0
        self.thinking_s = 0.0
        self.is_thinking = False
        self._open = show_thinking
        """Whether the thinking is open; None: open while it runs, one line afterwards."""
        self.tree: JsonTree | None = None
        """The tree of a finished answer that is JSON."""
        self._is_text = False
        """Whether such an answer is shown as text anyway."""
        self._tree_row = 0
        """The row of its first line in the latest layout."""

    def add(self, text: str, *, reasoning: bool, guessed: bool = False) -> None:
        """Append a text; `guessed` says that speculation guessed it."""
        if not reasoning:
            self.source.append(text)
            self.tree = None
        document = self.thinking if reasoning else self.body
        text = visible(text)
        # A model often begins with line breaks; they are not part of what it says.
        document.append(text.lstrip("\n") if document.is_empty else text, guessed=guessed)
        self.changed()

    @property
    def source_text(self) -> str:
        """The answer as the model wrote it, without the line breaks that end its thinking."""
        return "".join(self.source).lstrip("\n")

    def settle_thinking(self, text: str) -> None:
        """Replace the thinking so far by `text`."""
        self.thinking = Document()
        self.add(text, reasoning=True)

    def settle_text(self, text: str) -> None:
        """Make `text` the whole answer so far, whatever was added."""
        source = "".join(self.source)
        if text.startswith(source):
            if rest := text[len(source) :]:
                self.add(rest, reasoning=False)
            return
        self.source, self.body, self._code = [], Document(), None
        self.add(text, reasoning=False)

    def settle(self) -> None:
        """Finish the answer; show it as a tree if it is JSON."""
        self.tree = JsonTree.of(self.source_text)
        self.changed()

    def change_view(self) -> None:
        """Switch a JSON answer to its next view: a tree, the folded tree, or text."""
        if self.tree is None:
            return
        if self._is_text or (self.tree.has_depth and not self.tree.is_folded):
            self.tree.fold(is_open=self._is_text)
            self._is_text = False
        else:
            self._is_text = True
        self.changed()

    def code(self, number: int) -> str | None:
        """Return the n-th code block, from 1, or from the end if negative; None if there is none."""
        if self._code is None or self._code[0] != len(self.source):
            self._code = len(self.source), [block.text for block in code_blocks("".join(self.source))]
        blocks = self._code[1]
        index = number - 1 if number > 0 else number
        return blocks[index] if number and -len(blocks) <= index < len(blocks) else None

    @property
    def is_blank(self) -> bool:
        """Whether it went straight to its calls, so that there is nothing to show."""
        return self.body.is_empty and not (
            self.has_thought or self.activity or self.footer or self.ending.why
        )

    @property
    def has_thought(self) -> bool:
        return self.is_thinking or not self.thinking.is_empty

    @property
    def is_open(self) -> bool:
        return self.is_thinking if self._open is None else self._open

    def show_thinking(self, opened: bool | None) -> None:
        self._open = opened
        self.changed()

    def click(self, row: int, column: int) -> Click:
        if row == 0 and self.has_thought:
            self.show_thinking(not self.is_open)
            return Click("fold")
        if self.tree is not None and row == self._tree_row - 1:
            self._is_text = not self._is_text
            self.changed()
            return Click("fold")
        if self.tree is not None and not self._is_text and self.tree.toggle(row - self._tree_row):
            self.changed()
            return Click("fold")
        return super().click(row, column)

    @property
    def _is_tree(self) -> bool:
        return self.tree is not None and not self._is_text

    def prepare(self, width: int) -> bool:
        room = width - INDENT
        thinking = not (self.has_thought and self.is_open) or self.thinking.step(room - 2)
        return thinking and (self._is_tree or self.body.step(room))

    def build(self, width: int) -> list[Section]:
        room = width - INDENT
        sections: list[Section] = []
        if self.has_thought:
            sections.append(Section([[(elided(self._thinking_head(), room), "thinking-head")]], _MARGIN))
            if self.is_open:
                bar = [*_MARGIN, ("│ ", "rule")]
                sections.append(Section(self.thinking.lines(room - 2), bar, "thinking"))
        if not self.body.is_empty:
            sections.append(Section([[]] if sections else [], _MARGIN))
            if self.tree is not None:
                head = f"JSON, {self.tree.count} · show {'a tree' if self._is_text else 'the text'}"
                sections.append(Section([[(elided(head, room), "fold")]], _MARGIN))
                self._tree_row = sum(len(section.lines) for section in sections)
            lines = (
                self.tree.lines(room) if self.tree is not None and self._is_tree else self.body.lines(room)
            )
            sections.append(Section(lines, _MARGIN))
        if self.activity:
            above: list[Line] = [[]] if sections and not self.body.is_empty else []
            sections.append(Section([*above, [(self.activity, "muted")]], _MARGIN))
        marks = _branch_runs(self.branch)
        ended = self.ending.said(
            has_text=not self.body.is_empty, has_thought=self.has_thought, resumes=self.resumes
        )
        parts: list[Line] = [[(self.model, "muted")], self.footer, [(ended, "warning")]]
        said: Line = []
        for part in parts:
            if part and part[0][0]:
                said += [(" · ", "muted"), *part] if said else part
        if said or marks:
            sections.append(Section([[], *wrap([*marks, *said], room)], _MARGIN))
        return sections

    def _thinking_head(self) -> str:
        tokens = counted(self.thinking_tokens, "token")
        mark = "▾" if self.is_open else "▸"
        if self.is_thinking:
            way_out = f" · {command_key('answer')} answers now" if self.can_answer_now else ""
            return f"{mark} thinking · {self.thinking_s:.1f} s, {tokens}{way_out}"
        return f"{mark} thought for {seconds_text(self.thinking_s)}, {tokens}"


class NoticeEntry(Entry):
    """A notice of something that happened to the conversation."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = cleaned(text)

    def build(self, width: int) -> list[Section]:
        rows = self.text.split("\n")
        lines = [line for row in rows for line in wrap([(row, "notice")], width - INDENT)]
        return [Section(lines[:1], [("· ", "notice-mark")]), Section(lines[1:], _MARGIN)]


class CompactionEntry(Entry):
    """A mark above which the model sees a summary, or nothing. A click shows the summary."""

    def __init__(self, summary: str, count: int, pinned: int) -> None:
        """Mark that `count` exchanges are above, `pinned` of them pinned."""
        super().__init__()
        self.shown = (cleaned(summary), count, pinned)
        self._is_open = False

    def click(self, row: int, column: int) -> Click:
        if self.shown[0]:
            self._is_open = not self._is_open
            self.changed()
        return Click("fold")

    def build(self, width: int) -> list[Section]:
        summary, count, pinned = self.shown
        room = width - INDENT
        mark = ("▾ " if self._is_open else "▸ ") if summary else "◇ "
        what = "a summary" if summary else "nothing"
        left = f", except for {counted(pinned, 'pinned message')}" if pinned else ""
        messages = "message" if count == 1 else counted(count, "message")
        head = f"{mark}The model sees {what} of the {messages} above{left}"
        heads = wrap([(head, "thinking-head")], room)
        rule = "─" * max(room - line_cells(heads[-1]) - 1, 0)
        sections = [Section([*heads[:-1], [*heads[-1], (" ", ""), (rule, "rule")]], _MARGIN)]
        if self._is_open:
            rows = summary.split("\n")
            lines = [line for row in rows for line in wrap([(row, "thinking")], room - 2)]
            sections.append(Section(lines, [*_MARGIN, ("│ ", "rule")]))
        return sections


def _folded(text: str) -> tuple[str, str]:
    """Return the beginning of a long text and a line about the rest, which is "" if nothing is left out."""
    if len(text) <= _LONG and text.count("\n") < _LONG_LINES:
        return text, ""
    head = "\n".join(text[:_LONG_HEAD].split("\n", _LONG_HEAD_LINES)[:_LONG_HEAD_LINES])
    rest = text[len(head) :]
    count = rest.count("\n")
    what = f"{count:,} more lines" if count > 1 else f"{len(rest):,} more characters"
    return head, f"▸ {what}"


def _branch_runs(branch: Branch) -> Line:
    """Return `< 2/3 >` if there are alternatives. A click on its left half goes back, on its right half forward."""
    number, count = branch
    return [(f"< {number}/{count} >", "branch"), (" ", "")] if count > 1 else []
