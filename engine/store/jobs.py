"""The jobs of the disk tier: paths to be written, and blocks to be brought back."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from threading import Timer
from time import perf_counter

from engine.cache.block import Key
from engine.cache.block_table import BlockTable
from engine.store.digests import Digest


@dataclass(slots=True, eq=False)
class WriteRequest:
    """A path of a conversation to be written, and how much of it is."""

    owner: str
    keys: list[Key]
    until: int
    """Rows before this one are masked and cannot be computed again: a last block that is not full is written up to
    here."""
    done: int = 0
    """Blocks written so far."""
    digest: Digest = b""
    """The digest of the last of them; empty if there are none."""


@dataclass(slots=True, eq=False)
class RestoreRequest:
    """Blocks that are being brought back."""

    table: BlockTable
    """Holds the blocks that are there, and those that arrive."""
    keys: Sequence[Hashable]
    """The rows up to the last one on disk."""
    idle: bool
    wanted: list[Callable[[], bool]]
    """For each request that waits, whether it still does."""
    then: list[Callable[[], None]]
    """What to call at the end, for each of them."""
    missing: list[Digest]
    is_bare: list[bool]
    """For each of them, whether it lacks the rows of groups with a window."""
    asked: int
    """The number of rows to bring back."""
    rows: int = 0
    """The number of rows that have arrived."""
    timer: Timer = field(default_factory=lambda: Timer(0.0, int))
    """Ends the wait after the time that computing would take."""
    is_over: bool = False
    is_cold: bool = False
    """Whether the disk itself has to be read: the system does not hold the blocks in memory."""
    began: float = field(default_factory=perf_counter)
