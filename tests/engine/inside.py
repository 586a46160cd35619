"""What tests do with the blocks of an engine, between two of its steps."""

from engine.cache.blocks import BlockManager
from engine.core import EngineCore


def evict_all(engine: EngineCore) -> None:
    """Empty the cache, as far as nobody holds it."""
    engine.loop.call(engine.pieces.blocks.evict_all)


def check_blocks(engine: EngineCore) -> None:
    """Check the invariants of the blocks."""
    engine.loop.call(engine.pieces.blocks.check)


def offload(blocks: BlockManager, most: int | None = None) -> None:
    """Evict up to `most` cached blocks (None: all) as somebody who needs room does: they go to the host tier, if there
    is one. For the thread of the blocks."""
    for _ in range(blocks.num_cached if most is None else min(most, blocks.num_cached)):
        blocks._pool.evict_next(offload=True)
