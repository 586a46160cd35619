"""Thumbnails of the pictures of messages: decoded once, one after the other, in a thread, while in view."""

from collections import OrderedDict, deque
from functools import partial

from chatterm.backends.pictures import Picture
from chatterm.conversation.entries import UserEntry
from chatterm.conversation.thumbnail import Thumbnail, thumbnail
from chatterm.screens.chat.base import ChatBase
from chatterm.screens.chat.parts import ScreenPart

_KEPT = 200
"""The most thumbnails that are cached; the oldest go first."""


class Picturing(ScreenPart):
    def __init__(self, screen: ChatBase) -> None:
        super().__init__(screen)
        self._known: OrderedDict[str, Thumbnail | None] = OrderedDict()
        """Thumbnails by digest; None for a picture that cannot be shown."""
        self._wanted: deque[tuple[UserEntry, Picture]] = deque()
        self._is_busy = False

    def want(self, entry: UserEntry) -> None:
        """Queue the pictures of a message that has come into view."""
        self._wanted += [(entry, picture) for picture in entry.pictures]
        self._next()

    def _next(self) -> None:
        while self._wanted and not self._is_busy:
            entry, picture = self._wanted.popleft()
            if picture.digest in self._known:
                self._show(entry, picture)
            elif not self.transcript.shows(entry):
                entry.is_pictured = False  # it is queued again when it comes into view
            else:
                self._is_busy = True
                self.screen.in_thread(partial(thumbnail, picture), partial(self._made, entry, picture))

    def _made(self, entry: UserEntry, picture: Picture, made: Thumbnail | None) -> None:
        self._is_busy = False
        self._known[picture.digest] = made
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)
        self._show(entry, picture)
        self._next()

    def _show(self, entry: UserEntry, picture: Picture) -> None:
        found = self._known[picture.digest]
        if found is not None:
            entry.thumbnails[picture.digest] = found
            entry.changed()
            self.transcript.update()
