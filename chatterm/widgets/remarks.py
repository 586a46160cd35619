"""Errors and short notices about the latest actions, above the composer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from chatterm.markdown.lines import Line, cells, of_height, wrap
from chatterm.terminal.sanitize import cleaned
from chatterm.widgets.canvas import Canvas

_SECONDS = 6.0
"""Seconds that a remark stays at least, however fast the person types."""
_MOST = 3
"""The most remarks shown at a time."""


@dataclass(slots=True)
class Remark:
    text: str
    kind: str
    """ "notice" or "error"."""
    written: str
    """The composer's text when it was made."""
    until: float
    """Time after which it goes, once the composer's text has changed."""
    is_old: bool = False
    """Whether the composer's text has changed since."""
    said: float = 0.0


class Remarks(Canvas):
    """The list of remarks, hidden while empty. Times are those of `time.monotonic()`."""

    DEFAULT_CSS = "Remarks { width: 100%; margin: 1 2 0 2; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._remarks: list[Remark] = []
        self._lines: list[Line] = []
        self.display = False

    @property
    def texts(self) -> list[str]:
        return [remark.text for remark in self._remarks]

    def say(self, text: str, kind: str, written: str, now: float) -> None:
        """Add a remark below those made for the same composer text; remove those of earlier texts."""
        text = cleaned(text)
        kept = [r for r in self._remarks if r.until == inf or not (r.is_old or r.text == text)]
        self._remarks = [*kept, Remark(text, kind, written, now + _SECONDS, said=now)][-_MOST:]
        self._lay_out()

    def stand(self, text: str) -> None:
        """Show this error until it is replaced; "" removes it."""
        kept = [remark for remark in self._remarks if remark.until != inf]
        self._remarks = [Remark(cleaned(text), "error", "", inf), *kept][:_MOST] if text else kept
        self._lay_out()

    def written(self, text: str, now: float) -> None:
        """Note that the composer now contains `text`: remarks made for another text may expire."""
        for remark in self._remarks:
            remark.is_old = remark.is_old or text != remark.written
        self.expire(now)

    def expire(self, now: float) -> None:
        kept = [remark for remark in self._remarks if not remark.is_old or now < remark.until]
        if len(kept) != len(self._remarks):
            self._remarks = kept
            self._lay_out()

    def leave(self) -> None:
        """Remove errors about this conversation before another one is shown."""
        self._without(lambda remark: True)

    def over(self, since: float) -> None:
        """Remove errors made before `since`, when an answer began; keep those about text still in the composer."""
        self._without(lambda r: r.said < since and (r.is_old or not r.written))

    def _without(self, is_over: Callable[["Remark"], bool]) -> None:
        self._remarks = [r for r in self._remarks if r.kind != "error" or r.until == inf or not is_over(r)]
        self._lay_out()

    def dismiss(self) -> None:
        """Remove the remarks except a standing error: the person has read them."""
        self._remarks = [remark for remark in self._remarks if remark.until == inf]
        self._lay_out()

    def on_click(self) -> None:
        self.dismiss()

    def on_resize(self) -> None:
        self._lay_out()

    def _lay_out(self) -> None:
        size = self.screen.size
        # A hidden widget has no width yet; the resize that follows corrects a wrong guess.
        width = self.size.width or max(size.width - 4, 20)
        lines = remarks_lines(self._remarks, width, most=max(size.height // 3, 2))
        if lines != self._lines:
            self._lines = lines
            self.display = bool(lines)
            self.mark_parent("-remarked", bool(lines))
            self.styles.height = max(len(lines), 1)
            self.refresh()

    def build(self, width: int) -> list[Line]:
        return self._lines


def remarks_lines(remarks: Sequence[Remark], width: int, most: int) -> list[Line]:
    """Return the latest remarks, each with a mark, that fit into `most` lines of `width` columns; cut the last one."""
    lines: list[Line] = []
    for remark in remarks:
        mark = "✗ " if remark.kind == "error" else "· "
        room = width - cells(mark)
        for row in remark.text.split("\n"):
            for line in wrap([(row, remark.kind)], room):
                lines.append([(mark, f"{remark.kind}-mark"), *line])
                mark = " " * cells(mark)
    if len(lines) > most and len(remarks) > 1:
        return remarks_lines(remarks[1:], width, most)
    return of_height(lines, most, width)
