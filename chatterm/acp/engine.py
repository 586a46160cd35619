"""The one backend for all conversations of an editor. It answers one prompt at a time, on a thread of its own."""

import asyncio
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

from chatterm.acp.dialogue import Dialogue
from chatterm.backends.backend import Backend, EngineError, Outcome, TokenEvent
from chatterm.conversation.session_tree import session_info
from chatterm.sessions.records import SessionInfo

_PATIENCE = 5.0
"""Seconds for the last answer to be saved."""


class EditorEngine:
    """Runs the backend on a thread. Its methods are called on the event loop."""

    def __init__(self, backend: Backend, sampling: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Start without loading the model. `sampling` is for new conversations, `settings` the defaults of all."""
        self.backend = backend
        self._settings = settings
        self.fresh: SessionInfo = session_info(backend, sampling)
        """The template of a new session."""
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "answers")
        self._is_open = False
        self._is_over = False
        self._held: Dialogue | None = None
        self._offered: tuple[str, ...] = ()

    def load(self) -> None:
        """Start loading the model. Errors are raised by the first answer, not here."""
        self._thread.submit(self._open)

    async def answer(
        self,
        dialogue: Dialogue,
        begin: Callable[[], Generator[TokenEvent, None, None]],
        show: Callable[[str, str], Any],
    ) -> Outcome | None:
        """Generate the next answer of a conversation, in pieces for `show`; return None if stopped before it began.

        Raises EngineError and ModelError.
        """
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[str, str] | None] = asyncio.Queue()

        def say(piece: tuple[str, str] | None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        async with self._turn:
            if dialogue.stopped.is_set():
                return None
            work = loop.run_in_executor(self._thread, self._answer, dialogue, begin, say)
            try:
                while (piece := await pieces.get()) is not None:
                    kind, texts = piece[0], [piece[1]]
                    follow: tuple[str, str] | None = piece
                    while not pieces.empty() and (follow := pieces.get_nowait()) is not None:
                        if follow[0] != kind:
                            await show(kind, "".join(texts))
                            kind, texts = follow[0], []
                        texts.append(follow[1])
                    await show(kind, "".join(texts))
                    if follow is None:
                        break
                return await work
            finally:
                if not work.done():
                    dialogue.stopped.set()
                    self.backend.stop()

    def stop(self, dialogue: Dialogue) -> None:
        """Stop the running answer if it is this conversation's."""
        dialogue.stopped.set()
        if self._held is dialogue:
            self.backend.stop()

    def forget(self, dialogue: Dialogue) -> None:
        """Forget a conversation that is closed or will be loaded from the disk again."""
        if self._held is dialogue:
            self._held = None

    def end(self) -> None:
        """Stop answering and save what was answered. Blocks for `_PATIENCE` at most, as loading a model cannot be
        interrupted."""
        self._is_over = True
        self.backend.stop()
        ended = self._thread.submit(lambda: None)
        self._thread.shutdown(wait=False)
        with suppress(TimeoutError):
            ended.result(_PATIENCE)

    # --- on the thread ---

    def _open(self) -> None:
        if self._is_over:
            raise EngineError("The conversation is over.")
        if not self._is_open:
            self.backend.open()
            self._is_open = True

    def _answer(
        self,
        dialogue: Dialogue,
        begin: Callable[[], Generator[TokenEvent, None, None]],
        say: Callable[[tuple[str, str] | None], None],
    ) -> Outcome | None:
        began = False
        try:
            self._open()
            self._take_up(dialogue)
            with closing(begin()) as events:
                for event in events:
                    began = True
                    if event.text and event.kind != "call":
                        say((event.kind, event.text))
                    if dialogue.stopped.is_set():
                        break
        except BaseException:
            self._held = None  # the backend's history may be incomplete
            raise
        finally:
            say(None)
        self.backend.settle()
        return self.backend.last if began else None

    def _take_up(self, dialogue: Dialogue) -> None:
        """Load the history, tools and settings of this conversation into the backend, unless they are loaded."""
        offered = dialogue.tools.box.offered()
        names = tuple(tool.name for tool in offered)
        if names != self._offered:
            self.backend.configure({"tools": tuple(offered)})
            self._offered = names
            self._held = None
        if self._held is dialogue:
            return
        info = dialogue.talk.saved.info
        if info.documents != self.backend.options.documents:
            self.backend.configure({"documents": info.documents})
        sampling = {**self._settings, **info.sampling}
        self.backend.configure(
            {
                "system": info.system,
                "think": info.think,
                "think_cache": info.think_cache,
                "sampling": sampling,
            }
        )
        dialogue.talk.forget()
        dialogue.talk.hold_again()
        self._held = dialogue
