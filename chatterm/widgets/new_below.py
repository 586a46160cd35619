"""A line above the composer that announces new text below the view."""

from textual import events

from chatterm.markdown.lines import Line, shortened
from chatterm.widgets.canvas import Canvas
from chatterm.widgets.transcript import Transcript

_TEXT = "↓ New text below · press End or click to go there"


class NewBelow(Canvas):
    """The announcement; shown while the transcript has news, a click goes there."""

    DEFAULT_CSS = "NewBelow { height: 1; margin: 0 2 0 4; display: none; }"

    def __init__(self, transcript: Transcript) -> None:
        super().__init__()
        self._transcript = transcript

    def on_mount(self) -> None:
        self.watch(self._transcript, "has_news", self._show)

    def _show(self, has_news: bool) -> None:
        self.display = has_news

    def build(self, width: int) -> list[Line]:
        return [[(shortened(_TEXT, width), "accent")]]

    def on_click(self, event: events.Click) -> None:
        event.stop()
        self._transcript.follow()
