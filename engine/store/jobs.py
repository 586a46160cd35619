"""What the tier on disk has to do: paths that are to be written, and blocks that are on their way."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from threading import Timer
from time import perf_counter

from engine.cache.blocks import BlockTable
from engine.cache.prefix_index import Key
from engine.store.digests import Digest


@dataclass(slots=True, eq=False)
class Wish:
    """A path of a conversation to be written, and how far that is: blocks, and the digest of the last."""

    owner: str
    keys: list[Key]
    until: int
    """Rows before this one cannot be made again by computing those after them: a last block that is not full is written
    up to here."""
    done: int = 0
    digest: Digest = b""


@dataclass(slots=True, eq=False)
class Bringing:
    """Blocks on their way."""

    table: BlockTable
    keys: Sequence[Hashable]
    idle: bool
    wanted: list[Callable[[], bool]]
    """Whether each of those who wait for it still does."""
    then: list[Callable[[], None]]
    missing: list[Digest]
    asked: int
    """Rows that were to come, and those that have."""
    rows: int = 0
    timer: Timer = field(default_factory=lambda: Timer(0.0, int))
    """Who waits does so no longer than computing takes."""
    is_over: bool = False
    began: float = field(default_factory=perf_counter)
