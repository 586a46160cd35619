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
    """Searches in slices of a few milliseconds, so that the screen stays responsive in a long conversation."""

    _has_looked = False
    """Whether the first match to show was searched for."""
    _steps = 0
    """The number of pending steps to the next (above 0) or previous (below 0) match."""

    @property
    def bar(self) -> FindBar:
        return self.screen.query_one(FindBar)

    @property
    def is_open(self) -> bool:
        return bool(self.bar.display)

    def open(self, text: str = "") -> None:
        """Open the search for `text`, or for what will be typed; go to the next match if it is open already."""
        if self.is_open and not text:
            self.step(1)
            return
        self.transcript.select(None)
        self.bar.open(text)
        self.look_for(text)

    def close(self) -> bool:
        """Close the search and remove the marks, without scrolling. Return whether it was open."""
        if not self.is_open:
            return False
        self._stop()
        self.bar.display = False
        self.transcript.finder = None
        self.transcript.refresh()
        self.screen.back_to_composer()
        return True

    def look_for(self, text: str) -> None:
        """Mark every match and go to the last one above the end of the view."""
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
        """Go to the next match below (1) or above (-1), wrapping around at the ends."""
        finder = self.transcript.finder
        if finder is None or not finder.text.split():
            return
        self._steps += side
        if self._has_looked:
            self._begin()  # otherwise the running search takes the step

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
        """Go to the wanted match, then count all matches."""
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
        """Run a walk through the conversation in slices and return its result."""
        return await in_slices(walk, between=self._goes_on)

    def _goes_on(self) -> None:
        self.transcript.update()  # the search may have opened folded messages
        self.bar.say("searching… · Esc back")

    def _say(self, number: int, total: int) -> None:
        self.transcript.update()
        keys = " · ↓ next · ↑ previous · Esc back" if self.screen.size.width >= 70 else ""
        count = f"{MOST:,}+" if total > MOST else f"{total:,}"
        if not total:
            self.bar.say("not found · Esc back")
        else:
            self.bar.say((f"{number:,} of {count}" if number else f"{count} found") + keys)
