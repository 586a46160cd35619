"""The engine in this process as a Backend."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from chatterm.backend import (
    ChatOptions,
    EngineError,
    Figures,
    ModelInfo,
    OnProgress,
    Outcome,
    ThinkMode,
    TokenEvent,
)
from engine.params import SamplingParams

if TYPE_CHECKING:
    from engine.chat import Chat
    from engine.engine import Engine
    from models.sources import ModelFiles


class LocalBackend:
    """Implements Backend. Nothing is read or fetched before `open`, and what is slow to import waits for it."""

    def __init__(self, model: str, options: ChatOptions) -> None:
        self._model = model
        self._options = options
        self._system = options.system
        self._think: ThinkMode = options.think
        self._engine: Engine | None = None
        self._chat: Chat | None = None
        self._params: SamplingParams | None = None
        self._info: ModelInfo | None = None
        self._used = 0

    @property
    def model(self) -> str:
        return self._model

    @property
    def info(self) -> ModelInfo | None:
        return self._info

    @property
    def last(self) -> Outcome | None:
        chat = self._chat
        answer = chat.last if chat is not None else None
        if answer is None:
            return None
        return Outcome(answer.text, answer.reasoning, answer.finish_reason, answer.stats)

    @property
    def used_tokens(self) -> int:
        return self._used

    @property
    def system(self) -> str | None:
        return self._system

    @property
    def think(self) -> ThinkMode:
        return self._think

    def figures(self) -> Figures | None:
        engine = self._engine
        return engine.figures() if engine is not None else None

    def stop(self) -> None:
        if (chat := self._chat) is not None:
            chat.stop()

    def open(self, on_progress: OnProgress | None = None) -> None:
        from models.sources import resolve

        self._load(resolve(self._model, on_progress=on_progress), on_progress)

    def switch(self, model: str, on_progress: OnProgress | None = None) -> None:
        from models.load import load_config
        from models.sources import resolve

        files = resolve(model, on_progress=on_progress)
        load_config(files)  # a model that cannot run is refused while the present one is still there
        self.close()
        self._model = model
        self._load(files, on_progress)

    def _load(self, files: "ModelFiles", on_progress: OnProgress | None) -> None:
        from engine.engine import Engine  # brings torch: not before the first frame stands

        options = self._options
        engine = Engine.load(
            files,
            device=options.device,
            dtype=options.dtype,
            context=options.context,
            attention=options.attention,
            graphs=options.graphs,
            on_progress=on_progress,
        )
        try:
            params = engine.default_params(**options.sampling)
            chat = engine.chat(system=self._system, think=self._think, think_cache=options.think_cache)
        except BaseException:
            engine.close()
            raise
        self._engine, self._chat, self._params = engine, chat, params
        self._info = ModelInfo(
            name=engine.model_name,
            device=str(engine.device),
            dtype=str(engine.dtype).removeprefix("torch."),
            context_length=engine.context_length,
            thinks=chat.thinks,
        )
        self._count()

    def send(self, text: str) -> Iterator[TokenEvent]:
        return self._counted(self._loaded().send(text, self._params))

    def retry(self) -> Iterator[TokenEvent]:
        return self._counted(self._loaded().retry(self._params))

    def undo(self) -> bool:
        dropped = self._loaded().undo()
        self._count()
        return dropped

    def reset(self) -> None:
        if self._chat is not None:
            self._chat.reset()
            self._count()

    def set_system(self, system: str | None) -> None:
        if self._chat is not None:
            self._chat.system = system
            self._count()
        self._system = system

    def set_think(self, think: ThinkMode) -> None:
        if self._chat is not None:
            self._chat.think = think
        self._think = think

    def settle(self) -> None:
        if (chat := self._chat) is not None:
            chat.settle()

    def prepare(self, draft: str) -> None:
        if (chat := self._chat) is not None:
            chat.prepare(draft)

    def models(self) -> list[str]:
        from models.sources import local_models

        return [model.name for model in local_models()]

    def close(self) -> None:
        engine = self._engine
        self._engine = self._chat = self._params = self._info = None
        self._used = 0
        if engine is not None:
            engine.close()

    def _counted(self, events: Iterator[TokenEvent]) -> Iterator[TokenEvent]:
        try:
            yield from events
        finally:
            self._count()

    def _count(self) -> None:
        """Count the history once per change: it is rendered for that, which a screen cannot wait for."""
        if self._chat is not None:
            self._used = self._chat.used_tokens

    def _loaded(self) -> "Chat":
        if self._chat is None:
            raise EngineError("No model is loaded; choose one with /model NAME.")
        return self._chat
