"""What tests do with the blocks of an engine, between two of its steps."""

from engine.core import EngineCore


def evict_all(engine: EngineCore) -> None:
    """Empty the cache, as far as nobody holds it."""
    engine.loop.call(engine.pieces.blocks.evict_all)


def check_blocks(engine: EngineCore) -> None:
    """Check the invariants of the blocks."""
    engine.loop.call(engine.pieces.blocks.check)
