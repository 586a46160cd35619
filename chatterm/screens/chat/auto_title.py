"""The title of a new conversation, made by the model while nothing else is to be done."""

from dataclasses import dataclass

from chatterm.backends import worker
from chatterm.screens.chat.parts import ScreenPart
from chatterm.sessions.titles import made_title, make_title

_PAUSE = 2.0
"""Seconds between two attempts: whoever reads or thinks should find the machine quiet most of the time."""
_ATTEMPTS = 20


@dataclass(slots=True)
class _Wanted:
    session: str
    first_words: str
    question: str
    answer: str
    attempts: int = 0
    next_at: float = 0.0


class Titling(ScreenPart):
    is_on = True
    _wanted: _Wanted | None = None

    def answered(self, now: float) -> None:
        """An answer has ended: the first one of a session says what that is about."""
        path, session = self.conversation.path, self.screen.keeper.session
        if not self.is_on or session is None or len(self.conversation.tree) != 1:
            return
        if not path or not path[0].text.strip():  # it may have been undone while it ran
            return
        words = make_title(path[0].user)
        if self.conversation.title == words:
            self._wanted = _Wanted(session, words, path[0].user, path[0].text, next_at=now + _PAUSE)

    def tick(self, now: float) -> None:
        """Ask for the title while nobody does anything, and take it once it is there."""
        wanted, screen = self._wanted, self.screen
        if wanted is None or now < wanted.next_at or not screen.is_idle:
            return
        renamed = self.conversation.title != wanted.first_words
        if screen.keeper.session != wanted.session or renamed or wanted.attempts == _ATTEMPTS:
            self._wanted = None
        elif (said := screen.backend.made_title()) is not None and wanted.attempts:
            self._wanted = None
            if title := made_title(said):
                self._retitle(wanted, title)
        elif not screen.composer.text.strip():
            wanted.attempts, wanted.next_at = wanted.attempts + 1, now + _PAUSE
            screen.submit(worker.MakeTitle(wanted.question, wanted.answer))

    def _retitle(self, wanted: _Wanted, title: str) -> None:
        """The model has made a title; one that a person gave stays."""
        store = self.screen.keeper.store
        if store is not None:
            store.retitle(wanted.session, wanted.first_words, title)
            self.conversation.given_title = title

    def refused(self) -> None:
        """The model is too small: the first words stay."""
        self._wanted = None
