"""The state common to every Backend: the settings of the conversation and what is known of the model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from chatterm.backends.backend import (
    ChatOptions,
    ConversationSettings,
    EngineError,
    Exchange,
    Figures,
    ModelInfo,
    Part,
)
from chatterm.backends.documents import with_documents
from engine.params import SamplingParams

OURS: Mapping[str, Any] = {"speculation": "auto", "stop_repetition": True}
"""Sampling defaults of a local engine."""


class BackendBase:
    """The part of a Backend that needs no engine."""

    def __init__(self, model: str, options: ChatOptions) -> None:
        self.model = model
        self.options = options
        self.info: ModelInfo | None = None
        self.used_tokens = 0
        self._path: tuple[Exchange, ...] = ()
        """The history to start with once a model is loaded."""

    @property
    def _begins(self) -> str | None:
        """The system prompt as the model receives it."""
        return with_documents(self.options.system, self.options.documents)

    def figures(self) -> Figures | None:
        raise NotImplementedError

    def notes(self) -> Sequence[str]:
        figures = self.figures()
        return figures.notes if figures is not None else ()

    def waiting(self, index: int = 0) -> str:
        return ""

    def compare(self, text: str, model: str, path: Sequence[Exchange]) -> Iterator[tuple[int, Part]]:
        raise EngineError("No other model can be asked from here; /model switches to another model.")

    def configure(self, settings: ConversationSettings) -> None:
        self.options = changed(self.options, settings)

    def know(self, exchanges: Sequence[Exchange]) -> None:
        """Do nothing: this backend has no suffix speculation."""

    def models(self) -> list[str]:
        from models.hub.sources import local_models

        return [model.name for model in local_models()]

    def has_loaded(self, model: str) -> bool:
        """Return False: no server is known that may have loaded further models."""
        return False


def changed(options: ChatOptions, settings: ConversationSettings) -> ChatOptions:
    """Return the options with these settings. Raises EngineError for an unknown sampling setting or a value out of
    range.
    """
    sampling = settings.get("sampling", {})
    try:
        SamplingParams(**sampling)
    except TypeError:
        raise EngineError(f"Unknown sampling setting among {', '.join(sampling)}.") from None
    return replace(options, **settings)


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
