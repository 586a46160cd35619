"""The state common to every Backend: the settings of the conversation and what is known of the model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from chatterm.backends.backend import (
    ChatOptions,
    Document,
    EngineError,
    Exchange,
    Figures,
    ModelInfo,
    Part,
    ThinkCache,
    ThinkMode,
    Tool,
)
from chatterm.backends.documents import with_documents
from engine.params import SamplingParams

OURS: Mapping[str, Any] = {"speculation": "auto", "stop_repetition": True}
"""Sampling defaults of a local engine."""


class BackendBase:
    """The part of a Backend that needs no engine."""

    def __init__(self, model: str, options: ChatOptions) -> None:
        self._model = model
        self._options = options
        self._system = options.system
        self._documents = options.documents
        self._think: ThinkMode = options.think
        self._think_cache: ThinkCache = options.think_cache
        self._sampling: Mapping[str, Any] = dict(options.sampling)
        self._tools: tuple[Tool, ...] = options.tools
        self._kept_as = options.kept_as
        self._path: tuple[Exchange, ...] = ()
        """The history to start with once a model is loaded."""
        self._info: ModelInfo | None = None
        self._used = 0

    @property
    def model(self) -> str:
        return self._model

    @property
    def info(self) -> ModelInfo | None:
        return self._info

    @property
    def used_tokens(self) -> int:
        return self._used

    @property
    def system(self) -> str | None:
        return self._system

    @property
    def documents(self) -> tuple[Document, ...]:
        return self._documents

    @property
    def _begins(self) -> str | None:
        """The system prompt as the model receives it."""
        return with_documents(self._system, self._documents)

    @property
    def think(self) -> ThinkMode:
        return self._think

    @property
    def think_cache(self) -> ThinkCache:
        return self._think_cache

    def figures(self) -> Figures | None:
        raise NotImplementedError

    def notes(self) -> Sequence[str]:
        figures = self.figures()
        return figures.notes if figures is not None else ()

    def waiting(self, index: int = 0) -> str:
        return ""

    def compare(self, text: str, model: str, path: Sequence[Exchange]) -> Iterator[tuple[int, Part]]:
        raise EngineError("No other model can be asked from here; /model switches to another model.")

    @property
    def options(self) -> ChatOptions:
        """The options as first given, with all changes since."""
        return replace(
            self._options,
            system=self._system,
            documents=self._documents,
            think=self._think,
            think_cache=self._think_cache,
            sampling=dict(self._sampling),
            tools=self._tools,
            kept_as=self._kept_as,
        )

    def know(self, exchanges: Sequence[Exchange]) -> None:
        """Do nothing: this backend has no suffix speculation."""

    def keep_as(self, name: str | None) -> None:
        self._kept_as = name

    def models(self) -> list[str]:
        from models.hub.sources import local_models

        return [model.name for model in local_models()]

    def has_loaded(self, model: str) -> bool:
        """Return False: no server is known that may have loaded further models."""
        return False


def checked(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `sampling`. Raises EngineError if it has an unknown field or a value out of range."""
    try:
        SamplingParams(**sampling)
    except TypeError:
        raise EngineError(f"Unknown sampling setting among {', '.join(sampling)}.") from None
    return dict(sampling)


def no_tools(info: ModelInfo | None) -> EngineError:
    """Return the error for using tools with a model that does not support them."""
    name = info.name if info is not None else "This model"
    return EngineError(f"{name} does not support tools; /model chooses another model.")


def no_model() -> EngineError:
    """Return the error for asking before a model is loaded."""
    return EngineError("No model is loaded; load one with /model NAME.")


def no_guesses(sampling: Mapping[str, Any], figures: Figures) -> list[str]:
    """Return notes for a user who asked for speculation that is unavailable."""
    asked = sampling.get("speculation")
    if asked in ("suffix", "draft") and figures.speculation.startswith("off: "):
        return [f"Speculation is {figures.speculation}; answers are made without it."]
    if asked == "draft" and not figures.draft_bytes:
        return [
            "There is no draft model, so nothing is guessed; name one with --draft, or use /set speculation auto."
        ]
    return []
