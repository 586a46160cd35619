"""The one backend, of which all conversations of an editor have answers: one at a time, from a thread of its own."""

import asyncio
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

from chatterm.acp.dialogue import Dialogue
from chatterm.backends.backend import Backend, EngineError, Outcome, TokenEvent
from chatterm.conversation.session_writer import session_info
from chatterm.conversation.visible_history import seen
from chatterm.sessions.records import SessionInfo

_PATIENCE = 5.0
"""Seconds for the last answer to be saved."""


class EditorEngine:
    """Its methods may be called on the loop."""

    def __init__(self, backend: Backend, sampling: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """`sampling` is what new conversations are given; `settings` is that of all, where they say nothing."""
        self.backend = backend
        self._settings = settings
        self.fresh: SessionInfo = session_info(backend, sampling)
        """What a new session is like."""
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "answers")
        self._is_open = False
        self._is_over = False
        self._held: Dialogue | None = None
        self._offered: tuple[str, ...] = ()

    def load(self) -> None:
        """Begin to load the model; what is wrong with it is told by the first answer."""
        self._thread.submit(self._open)

    async def answer(
        self,
        dialogue: Dialogue,
        begin: Callable[[], Generator[TokenEvent, None, None]],
        show: Callable[[str, str], Any],
    ) -> Outcome | None:
        """The next answer of a conversation, which `show` gets in pieces; None where it was stopped before it began.

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
        """End the running answer where it is this conversation's."""
        dialogue.stopped.set()
        if self._held is dialogue:
            self.backend.stop()

    def forget(self, dialogue: Dialogue) -> None:
        """The conversation is closed, or begins anew from the disk."""
        if self._held is dialogue:
            self._held = None

    def end(self) -> None:
        """Nothing more is answered, and what was is saved. Blocks for some seconds at most: a model that is being read
        cannot be interrupted."""
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
            self._held = None  # who knows how much of it the history holds
            raise
        finally:
            say(None)
        self.backend.settle()
        return self.backend.last if began else None

    def _take_up(self, dialogue: Dialogue) -> None:
        """The history, and what belongs to it, are those of this conversation."""
        offered = dialogue.tools.box.offered()
        names = tuple(tool.name for tool in offered)
        if names != self._offered:
            self.backend.set_tools(offered)
            self._offered = names
            self._held = None
        if self._held is dialogue:
            return
        info = dialogue.talk.info
        self.backend.set_system(info.system)
        if info.documents != self.backend.documents:
            self.backend.set_documents(info.documents)
        self.backend.set_think(info.think)
        self.backend.set_think_cache(info.think_cache)
        self.backend.set_sampling({**self._settings, **info.sampling})
        self.backend.load_path(seen(dialogue.talk.path))
        self._held = dialogue
