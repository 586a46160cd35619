"""Where the person writes."""

from collections.abc import Callable

from textual import events
from textual.message import Message
from textual.widgets import TextArea

from chatterm.sanitize import cleaned


class Composer(TextArea):
    """Enter sends; Shift+Enter (where the terminal reports it), Alt+Enter or Ctrl+J break the line."""

    class Submitted(Message):
        """The person pressed Enter. The text stays until the screen takes it."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self, *, intercept: Callable[[str], bool], id: str | None = None) -> None:
        super().__init__(
            id=id,
            soft_wrap=True,
            compact=True,
            highlight_cursor_line=False,
            tab_behavior="focus",
            placeholder="Write a message, / for commands",
        )
        self._intercept = intercept
        """Sees every key first; True means that it was used."""

    async def _on_key(self, event: events.Key) -> None:
        if self._intercept(event.key):
            event.stop()
            event.prevent_default()
        elif event.key == "enter":
            event.stop()
            event.prevent_default()
            self.post_message(self.Submitted(self.text))
        elif event.key in ("shift+enter", "alt+enter", "ctrl+j"):
            event.stop()
            event.prevent_default()
            self.insert("\n")
            self.scroll_cursor_visible()
        elif event.key == "tab":
            event.stop()
            event.prevent_default()
            self.insert("    ")
        else:
            await super()._on_key(event)

    async def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        text = cleaned(event.text)
        if text and (result := self._replace_via_keyboard(text, *self.selection)):
            self.move_cursor(result.end_location)

    def put(self, text: str) -> None:
        """Show `text` with the cursor at its end."""
        self.load_text(text)
        self.move_cursor(self.document.end)

    def put_back(self, text: str) -> None:
        """Give back what could not be sent, before anything written since."""
        draft = self.text
        self.put(f"{text}\n{draft}" if draft.strip() else text)
