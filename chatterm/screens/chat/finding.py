"""Search inside the conversation: Ctrl+F, /find."""

from chatterm.conversation.find import Finder, Match
from chatterm.screens.chat.parts import ScreenPart
from chatterm.widgets.find_bar import FindBar


class Finding(ScreenPart):
    _matches: tuple[Match, ...] = ()
    _at = 0

    @property
    def bar(self) -> FindBar:
        return self.screen.query_one(FindBar)

    @property
    def is_open(self) -> bool:
        return bool(self.bar.display)

    def open(self, text: str = "") -> None:
        """Look for `text`, or for what will be typed; the next match where the search is open already."""
        if self.is_open and not text:
            self.step(1)
            return
        self.transcript.select(None)
        self.bar.open(text)
        self.look_for(text)

    def close(self) -> None:
        """The marks go, what is in view stays."""
        self.bar.display = False
        self.transcript.finder = None
        self.transcript.refresh()
        self.screen.back_to_composer()

    def look_for(self, text: str) -> None:
        """Mark every match; the latest one that is above the end of what is in view is looked at."""
        if not self.is_open:
            return
        transcript = self.transcript
        transcript.finder = Finder(text)
        self._matches = tuple(transcript.matches())
        self._at = transcript.latest_in_view(self._matches)
        self._show()

    def step(self, side: int) -> None:
        """The next match below (1) or above (-1); after the last comes the first."""
        here = self._matches[self._at].spans if self._matches else None
        self._matches = tuple(self.transcript.matches())  # an answer may have grown
        if self._matches:
            moved = self._at >= len(self._matches) or self._matches[self._at].spans != here
            self._at = (
                min(self._at, len(self._matches) - 1) if moved else (self._at + side) % len(self._matches)
            )
        self._show()

    def _show(self) -> None:
        self.transcript.show_match(self._matches[self._at] if self._matches else None)
        finder = self.transcript.finder
        if finder is None or not finder.text.split():
            self.bar.say("Esc back")
        elif not self._matches:
            self.bar.say("not found · Esc back")
        else:
            keys = " · ↓ next · ↑ previous · Esc back" if self.screen.size.width >= 70 else ""
            self.bar.say(f"{self._at + 1:,} of {len(self._matches):,}{keys}")
