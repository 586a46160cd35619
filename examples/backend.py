"""Your own backend: whatever answers can be chatted with. This one has no model; it says your words backwards."""

from collections.abc import Iterable, Iterator, Sequence
from threading import Event

from chatterm.app import run_app
from chatterm.backends.backend import (
    ChatOptions,
    Document,
    DraftCost,
    EngineError,
    Exchange,
    Figures,
    FinishReason,
    ModelChoice,
    ModelInfo,
    OnProgress,
    Outcome,
    Part,
    Request,
    TokenEvent,
    ToolResult,
    TurnStats,
)
from chatterm.backends.base import BackendBase
from engine.cache.block_map import BlockMap


class BackwardsBackend(BackendBase):
    """Implements Backend: all that the screen, the shell and the editors need of a model."""

    def __init__(self) -> None:
        super().__init__("backwards", ChatOptions())
        self.last: Outcome | None = None
        self._stopped = Event()

    # --- what it is all about: an answer, word by word ---

    def send(self, text: str) -> Iterator[TokenEvent]:
        self._stopped.clear()
        said, reason = "", FinishReason.EOS
        for number, word in enumerate(reversed(text.split())):
            if self._stopped.is_set():
                reason = FinishReason.CANCELLED
                break
            said += word if not number else f" {word}"
            self.last = self._outcome(said, None)
            yield TokenEvent(word if not number else f" {word}", number, "answer")
        self.last = self._outcome(said, reason)

    def _outcome(self, said: str, reason: FinishReason | None) -> Outcome:
        """Return the answer so far; at its end it has a reason."""
        count = len(said.split())
        return Outcome(said, "", reason, TurnStats(generated_tokens=count), range(count))

    def stop(self, but: int | None = None) -> None:
        self._stopped.set()

    # --- the model and the history: there is nothing to load, and it remembers nothing ---

    def open(self, on_progress: OnProgress | None = None) -> None:
        self.info = ModelInfo(self.model, "here", "", 0, thinks=False, is_remote=True, resumes=frozenset())

    def switch(self, model: str, on_progress: OnProgress | None = None) -> None:
        raise EngineError("There is no other model.")

    def models(self) -> list[str]:
        return [self.model]

    def catalogue(self) -> list[ModelChoice]:
        return [ModelChoice(self.model, 0, True, True)]

    def load_path(self, exchanges: Sequence[Exchange]) -> None:
        self.last = None
        for exchange in exchanges[-1:]:
            self.last = self._outcome(exchange.text, FinishReason(exchange.finish_reason or "cancelled"))

    def reset(self) -> None:
        self.load_path([])

    def close(self) -> None:
        self.info = None

    # --- what it cannot do, it says ---

    def tell(self, results: Sequence[ToolResult]) -> Iterator[TokenEvent]:
        raise EngineError("It calls no tools.")

    def resume(self) -> Iterator[TokenEvent]:
        raise EngineError("It cannot continue an answer.")

    def candidates(self, text: str, count: int) -> Iterator[tuple[int, Part]]:
        raise EngineError("It would say the same every time.")

    def answers(self, requests: Iterable[Request]) -> Iterator[tuple[int, Part]]:
        raise EngineError("It answers in a chat only.")

    # --- what a backend without a cache has no answer to ---

    def figures(self) -> Figures | None:
        return None

    def blocks(self) -> BlockMap | None:
        return None

    def count(self, draft: str) -> DraftCost | None:
        return None

    def token_text(self, token_id: int) -> str | None:
        return None

    def read(self, document: Document) -> int | None:
        return None

    def begin_title(self, question: str, answer: str) -> bool:
        return False

    def made_title(self) -> str | None:
        return None

    def answer_now(self) -> None: ...

    def settle(self) -> None: ...

    def prepare(self, draft: str) -> None: ...


if __name__ == "__main__":
    raise SystemExit(run_app(BackwardsBackend(), theme=None))
