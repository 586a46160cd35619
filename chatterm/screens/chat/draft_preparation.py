"""What is done for a draft while it is typed: its rows are warmed, and its tokens counted."""

from collections.abc import Callable
from time import monotonic

from chatterm.backends.backend import Backend, DraftCost
from chatterm.commands.registry import is_command
from chatterm.screens.chat.base import ChatBase
from chatterm.screens.chat.drafts import Writing
from chatterm.screens.chat.parts import ScreenPart

_PAUSE = 0.6
"""Seconds without a key after which the cost of a draft is shown."""
_WARM_PAUSE, _WARM_LATEST = 0.1, 0.25
"""Seconds without a key, and since the first key, after which a draft is warmed: Enter may be the next one."""


class DraftPreparation(ScreenPart):
    def __init__(self, screen: ChatBase, writing: Writing) -> None:
        super().__init__(screen)
        self._writing = writing
        self.cost: DraftCost | None = None
        """The cost of the draft, once it is known."""
        self._count_at: float | None = None
        self._warm_at: float | None = None
        self._warm_latest = 0.0

    def typed(self) -> bool:
        """Note that the draft has changed. Return whether the cost of the earlier one was known."""
        was_known, self.cost = self.cost is not None, None
        text, now = self.screen.composer.text, monotonic()
        if not text.strip() or is_command(text):
            self._count_at = self._warm_at = None
            return was_known
        self._count_at = now + _PAUSE
        if self.screen.settings.composer.prepare_drafts:
            if self._warm_at is None:
                self._warm_latest = now + _WARM_LATEST
            self._warm_at = now + _WARM_PAUSE
        return was_known

    def tick(self, now: float) -> None:
        """Warm or count the draft once nothing was typed for a moment."""
        if self._warm_at is not None and now > min(self._warm_at, self._warm_latest):
            self._warm_at = None
            self._submit(Backend.prepare)
        if self._count_at is not None and now > self._count_at:
            self._count_at = None
            self._submit(Backend.count)

    def _submit(self, method: Callable[[Backend, str], object]) -> None:
        screen = self.screen
        if self.conversation.turn is None and screen.info is not None and not screen.is_loading:
            self._writing.aim()
            screen.submit(method, screen.composer.sending_text)

    def counted(self, draft: str, cost: DraftCost) -> None:
        """Note what a draft costs, if it is still the one that is typed."""
        if draft == self.screen.composer.sending_text:
            self.cost = cost
