"""Search inside the conversation: Ctrl+F, /find."""

import asyncio
from functools import partial
from typing import Any, TypeVar

from chatterm.conversation.find import MOST, Finder, Walk
from chatterm.screens.chat.parts import ScreenPart
from chatterm.widgets.find_bar import FindBar
from chatterm.widgets.slices import in_slices

T = TypeVar("T")

_PAUSE = 0.05
"""Seconds without a key before the search begins."""
_NAME = "find"


class Finding(ScreenPart):
    """The search runs beside everything else, a few milliseconds at a time, however long the conversation is."""

    _has_looked = False
    """Whether the match to begin at was looked for."""
    _steps = 0
    """How many matches are still to be stepped on (above 0) or back (below 0)."""

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
        self._stop()
        self.bar.display = False
        self.transcript.finder = None
        self.transcript.refresh()
        self.screen.back_to_composer()

    def look_for(self, text: str) -> None:
        """Mark every match; the latest one that is above the end of what is in view is looked at."""
        if not self.is_open:
            return
        self._stop()
        self._has_looked, self._steps = False, 0
        self.transcript.finder = Finder(text)
        self.transcript.refresh()
        if text.split():
            self._begin()
        else:
            self.bar.say("Esc back")

    def step(self, side: int) -> None:
        """The next match below (1) or above (-1); after the last comes the first."""
        finder = self.transcript.finder
        if finder is None or not finder.text.split():
            return
        self._steps += side
        if self._has_looked:
            self._begin()  # otherwise the search is running

    def _stop(self) -> None:
        self.screen.workers.cancel_group(self.screen, _NAME)

    def _begin(self) -> None:
        finder = self.transcript.finder
        assert finder is not None
        look: Any = partial(
            self._look, finder
        )  # a coroutine made now would never be awaited if it were cancelled
        self.screen.run_worker(look, _NAME, _NAME, exclusive=True)

    async def _look(self, finder: Finder) -> None:
        """Go to the match that is wanted, then count all matches."""
        transcript = self.transcript
        if not self._has_looked:
            await asyncio.sleep(_PAUSE)
            place, row = transcript.place_in_view()
            walk = finder.latest(transcript.entries.copy(), place, row, transcript.lay_out)
            finder.here = await self._walked(walk)
            self._has_looked = True
        while self._steps:
            side = 1 if self._steps > 0 else -1
            finder.here = await self._walked(
                finder.beside(transcript.entries.copy(), side, transcript.lay_out)
            )
            self._steps -= side
        transcript.show_match(finder.here)
        self._say(*await self._walked(finder.count(transcript.entries.copy(), transcript.lay_out)))

    async def _walked(self, walk: Walk[T]) -> T:
        """Do a walk through the conversation in slices. Return its result."""
        return await in_slices(walk, between=self._goes_on)

    def _goes_on(self) -> None:
        self.transcript.update()  # messages that were folded may be open now
        self.bar.say("searching… · Esc back")

    def _say(self, number: int, total: int) -> None:
        self.transcript.update()
        keys = " · ↓ next · ↑ previous · Esc back" if self.screen.size.width >= 70 else ""
        count = f"{MOST:,}+" if total > MOST else f"{total:,}"
        if not total:
            self.bar.say("not found · Esc back")
        else:
            self.bar.say((f"{number:,} of {count}" if number else f"{count} found") + keys)
