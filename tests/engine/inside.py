"""The one place that knows how tests get between two steps of an engine."""

from collections.abc import Callable
from typing import TypeVar

from engine.core import EngineCore

T = TypeVar("T")


def between_steps(engine: EngineCore, work: Callable[[], T]) -> T:
    """Run `work` on the engine's thread, between two steps, and return what it returns."""
    return engine._loop.call(work)


def evict_all(engine: EngineCore) -> None:
    """Empty the cache, as far as nobody holds it."""
    between_steps(engine, engine._blocks.evict_all)


def check_blocks(engine: EngineCore) -> None:
    """Check the invariants of the blocks."""
    between_steps(engine, engine._blocks.check)
