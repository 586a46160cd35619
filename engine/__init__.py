"""The inference engine: KV blocks, scheduling, execution, sampling, and conversations as tokens."""

from typing import TYPE_CHECKING, Any

from engine.errors import ContextFullError, EngineError
from engine.events import FinishReason, TokenEvent, TurnStats
from engine.params import Constraint, SamplingParams

if TYPE_CHECKING:
    from engine.engine import Engine

__all__ = [
    "Constraint",
    "ContextFullError",
    "Engine",
    "EngineError",
    "FinishReason",
    "SamplingParams",
    "TokenEvent",
    "TurnStats",
]


def __getattr__(name: str) -> Any:
    # Engine imports torch. The names above must not, so that the screen appears before torch is loaded.
    if name == "Engine":
        from engine.engine import Engine

        return Engine
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
