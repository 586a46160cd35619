"""The jobs of the disk tier: paths to be written, and blocks to be brought back."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from threading import Timer
from time import perf_counter

from torch import Tensor

from engine.cache.block import Key
from engine.cache.block_table import BlockTable
from engine.cache.host_memory import PromptCosts
from engine.store.digests import Digest


@dataclass(slots=True, eq=False)
class StateCopy:
    """A copy of a state that is being written, piece by piece."""

    pieces: list[Digest]
    data: Tensor
    """uint8 [bytes] (see `engine/cache/state_bytes.py`)."""
    keep: frozenset[bytes]
    """The names of the states that must stay in the same file."""
    done: int = 0
    """Pieces handed over so far."""


@dataclass(slots=True, eq=False)
class WriteRequest:
    """A path of a conversation to be written, and how much of it is."""

    owner: str
    keys: list[Key]
    until: int
    """Rows before this one are masked and cannot be computed again: a last block that is not full is written up to
    here."""
    edges: Sequence[int] = ()
    """As in `Rows.edges`: where states are worth keeping."""
    done: int = 0
    """Blocks written so far."""
    digest: Digest = b""
    """The digest of the last of them; empty if there are none."""
    state: StateCopy | None = None
    """The state that is being written."""
    handed: set[Digest] = field(default_factory=set)
    """What was handed over for states, which may not be written yet."""
    is_done: bool = False


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
    """The blocks, and then the pieces of the state after them."""
    is_bare: list[bool]
    """For each of the blocks, whether it lacks the rows of groups with a window."""
    asked: int
    """The number of rows to bring back."""
    read: float
    """How many rows take as long to read as one of these: more than 1 with a state."""
    arrived: int = 0
    """How many blocks and pieces have arrived."""
    rows: int = 0
    """The number of rows that have arrived."""
    state: Tensor | None = None
    """The pieces that have arrived, uint8 [bytes]; None before the first."""
    timer: Timer = field(default_factory=lambda: Timer(0.0, int))
    """Ends the wait after the time that computing would take."""
    is_over: bool = False
    is_cold: bool = False
    """Whether the disk itself has to be read: the system does not hold the blocks in memory."""
    began: float = field(default_factory=perf_counter)

    @property
    def has_state(self) -> bool:
        """Whether a state comes after the blocks."""
        return len(self.missing) > len(self.is_bare)


def pays(costs: PromptCosts, read: float) -> bool:
    """Return whether it pays to read as much as `read` rows for each row that need not be computed then."""
    return replace(costs, brought=costs.brought and costs.brought * read).worth_it
