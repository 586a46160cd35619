"""Our side of `benchmarks.multi_turn`: the engine is used as the screen uses it."""

import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.cpu_chat import serve
from benchmarks.scripted_chat import Turn, follow_script, strokes, thinking_tokenizer
from engine import Engine, SamplingParams
from engine.conversation.chat import ThinkCache
from engine.conversation.chat import Turn as ChatTurn
from models.files import ModelFiles

CONTEXT = 8192
RATE = 6.0
"""Characters that a person types per second."""


class OurChat:
    """An engine, its conversation, and every exchange that it has answered in it."""

    def __init__(
        self, gguf: Path, store: Path | None, think_cache: str, stride: int, ahead: bool, waits: bool
    ) -> None:
        """Load the model. With `waits`, the person is so slow that all that can be prepared is done before each key."""
        self._waits = waits
        self._gguf, self._store, self._stride = gguf, store, stride
        self._think_cache: ThinkCache = "mask" if think_cache == "mask" else "exact"
        self._params = SamplingParams(temperature=0.0, speculation="auto")  # as the screen sets it
        self._ahead = self._params if ahead else None
        self._chats = 0
        self._turns: list[ChatTurn] = []
        self._path: tuple[int, ...] = ()
        self._load()

    def _load(self) -> None:
        files = ModelFiles(self._gguf.name, gguf=self._gguf)
        self.engine = Engine.load(files, device="cpu", context=CONTEXT, disk=self._store, disk_gb=10)
        self.engine.tokenizer = thinking_tokenizer(self._gguf)
        self._scripted = follow_script(self.engine, self._stride)

    def open(self, system: str) -> str:
        """Begin a conversation; return the dtype of the engine."""
        self._chats += 1
        self._turns, self._path = [], ()
        self._begin(system)
        return str(self.engine.dtype).removeprefix("torch.")

    def _begin(self, system: str | None) -> None:
        self._chat = self.engine.chat(system=system, think_cache=self._think_cache)
        self._chat.owner = f"chat-{self._chats}" if self._store is not None else None

    def _restart(self) -> None:
        """End the engine as the program does, and load it again."""
        self.engine.save(self._chat.owner, self._chat.history)
        self.engine.close()
        self._load()
        self._begin(self._chat.system)
        self._path = ()

    def _go(self, path: tuple[int, ...]) -> None:
        """Make these exchanges the history."""
        if path != self._path:
            self._chat.load([self._turns[number] for number in path])
            self._chat.settle(self._waits)
            self._path = path

    def ask(self, turn: Turn, reading_s: float, typing_s: float) -> dict[str, Any]:
        """Do what the person does; return the tokens computed after Enter and the seconds to the first token.

        Another branch is read before anything is typed, as is the conversation after a restart.
        """
        if turn.way == "restart":
            self._restart()
        if turn.way in ("restart", "switch"):
            self._go(turn.path)
        chat, self._scripted.answer = self._chat, turn.stream
        time.sleep(reading_s)
        began = time.perf_counter()
        self._go(turn.path)
        if turn.way != "retry":
            for at, draft in strokes(turn.user, typing_s, RATE):
                time.sleep(max(at - (time.perf_counter() - began), 0.0))
                chat.prepare(draft, self._waits, self._ahead)
            time.sleep(max(typing_s - (time.perf_counter() - began), 0.0))
            began = time.perf_counter()
        events = chat.send(turn.user, self._params)
        next(events)
        ttft_s = time.perf_counter() - began
        asked = chat._asked
        assert asked is not None
        for _ in events:
            pass
        chat.settle(self._waits)
        assert chat.last is not None
        same = (
            chat.last.token_ids == turn.stream and chat.history.token_ids[: len(turn.prompt)] == turn.prompt
        )
        computed = self._scripted.rows_between(began, asked.first_token)
        self._scripted.steps.clear()
        self._turns.append(chat.turns[-1])
        self._path = (*turn.path, len(self._turns) - 1)
        return {"computed": computed, "ttft_s": ttft_s, "same": same}


def our_side(pipe: Connection, *given: Any) -> None:
    """Serve chats with the engine; the parent process says what is typed and what is answered."""
    chat = OurChat(*given)
    serve(pipe, {"open": chat.open, "ask": chat.ask})
    chat.engine.close()
