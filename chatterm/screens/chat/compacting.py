"""Compaction of a nearly full context: /compact, and the summary that the model writes when idle."""

from chatterm.backends.backend import Backend, Compaction, EngineError
from chatterm.backends.documents import with_documents
from chatterm.conversation.compaction import COMPACTED, Room, checked_summary, summary_request, ways
from chatterm.conversation.visible_history import summarised
from chatterm.screens.chat.parts import ScreenPart
from chatterm.screens.compact import CompactScreen, Draft
from chatterm.terminal.sanitize import cleaned
from chatterm.widgets.meter import FULL
from models.units import counted

_PAUSE = 2.0
"""Idle seconds before a summary is begun."""
_ATTEMPTS = 3


class Compacting(ScreenPart):
    _draft: Draft | None = None
    """The summary being written, or the last one."""
    _next_at = 0.0
    _attempts = 0
    _for: int | None = None
    """The id of the last exchange when the attempts were made."""

    def compact(self, what: str) -> None:
        room, path = self._room(), self.conversation.path
        if not path:
            raise EngineError("There is nothing to compact yet.")
        if not self.screen.is_idle:
            raise EngineError(
                "Wait until the answer is finished, or press Esc to stop it; then /compact makes room."
            )
        if what:
            self.use(what)
        else:
            room.check_pinned()
            self.screen.app.push_screen(CompactScreen(room, self._draft_for(room), self))

    def context_is_full(self, too_many: int) -> None:
        """Offer ways to make room after a message was refused for having `too_many` tokens too many.

        Do nothing if no way frees enough.
        """
        if self.screen.settings.chat.when_full == "stop" or self.screen.app.screen is not self.screen:
            return
        room = self._room()
        if max((way.frees for way in ways(room, room.default_count)), default=0) >= too_many:
            self.compact("")

    # --- callbacks of the /compact screen ---

    def summarise(self, count: int) -> Draft:
        """Have the model summarise the first `count` exchanges."""
        room = self._room()
        self._draft = Draft(room.path[count - 1].id, count)
        self.screen.submit(Backend.answers, [summary_request(room, count)])
        return self._draft

    def stop_summary(self) -> None:
        self.screen.worker_thread.stop_aside()

    def read(self, count: int, text: str) -> None:
        """Warm the cache with this summary while the person reads it."""
        self.conversation.try_compaction(self.conversation.path[count - 1], Compaction(text.strip()))

    def leave(self) -> None:
        """Stop the summary and restore the history: nothing was chosen."""
        self.stop_summary()
        self.conversation.aim(None)

    def use_summary(self, count: int, text: str) -> None:
        """Compact the first `count` exchanges to this summary. Raise EngineError if that makes no room."""
        room = self._room()
        compaction = checked_summary(room, count, cleaned(text))
        self._draft = None
        said = (
            f"The model sees a summary of the first {counted(count, 'message')}; /compact off changes that."
        )
        self.conversation.summarise(room.path[count - 1], compaction)
        self.screen.say(said)
        self.transcript.follow()

    def use(self, kind: str) -> None:
        """Make room in this way: "files", "start", or "off" (or "again") to show everything again."""
        what = "off" if kind == "again" else kind
        self.conversation.compact(what)
        self.screen.say(COMPACTED[what])
        if what != "off":  # there is a mark to see
            self.transcript.follow()

    # --- the summary ---

    def summary_grows(self, text: str) -> None:
        if self._draft is not None:
            self._draft.text = cleaned(text)

    def summary_is_over(self, *, is_whole: bool, problem: str = "") -> None:
        draft = self._draft
        if draft is None or draft.is_over:
            return
        draft.is_over, draft.is_whole, draft.problem = True, is_whole, problem
        if is_whole and draft.text.strip() and self.screen.app.screen is self.screen:
            counted_messages = counted(draft.count, "message")
            self.screen.say(
                f"A summary of the first {counted_messages} is ready to be read: /compact shows it."
            )

    def offer_summary(self, now: float) -> None:
        """Have a summary written while the chat is idle, if the settings ask for it and the context is nearly full."""
        screen = self.screen
        if screen.settings.chat.when_full != "summarise" or not screen.is_idle or now < self._next_at:
            return
        self._next_at = now + _PAUSE
        room = self._room()
        head = self.conversation.tree.head
        if head != self._for:
            self._for, self._attempts = head, 0
            return
        is_full = room.context and room.used >= FULL * room.context  # 0: the server does not tell
        if not is_full or not room.least_count or self._attempts == _ATTEMPTS:
            return
        typing = screen.composer.text.strip() or screen.app.screen is not screen
        if not typing and self._draft_for(room) is None:
            self._attempts += 1
            self.summarise(room.default_count)

    def _draft_for(self, room: Room) -> Draft | None:
        """Return the summary of the present branch, finished or not; None if there is none."""
        draft = self._draft
        if draft is None or draft.count > len(room.path) or draft.is_failed:
            return None
        fits = room.path[draft.count - 1].id == draft.exchange and summarised(room.path) < draft.count
        return draft if fits else None

    def _room(self) -> Room:
        screen = self.screen
        info = screen.info
        context = info.context_length if info is not None else 0
        return Room(
            self.conversation.path,
            with_documents(screen.backend.options.system, screen.backend.options.documents) or "",
            screen.backend.used_tokens,
            context,
        )
