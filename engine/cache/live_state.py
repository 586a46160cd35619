"""The state of recurrent layers with which a block table goes on. See `engine/cache/marks.py`."""

from dataclasses import dataclass, field

from engine.batch import NONE, StateMoves
from engine.cache.block import Block, Key


@dataclass(slots=True, eq=False)
class Mark:
    """A state at one exact row of a path. Its slot is never written to again."""

    slot: int
    row: int
    parent: Block
    """The last full block before its row; the root if there is none."""
    keys: tuple[Key, ...]
    """The keys of the rows after that block, fewer than a block has."""
    last_used: int = 0
    degree: int = 0
    """1 on a kept path, 2 on that of the conversation in use, otherwise 0."""
    is_minor: bool = False
    """Whether it is only for going a few rows back, or one of many in a long text: it is not offloaded."""
    worth: float = 0.0
    """On such a path: how many rows it saves, compared with how far it is from the end."""


@dataclass(frozen=True, slots=True)
class StatePlan:
    """The marks that a step takes of a table."""

    rows: int
    """How many rows the step computes, without those of guesses."""
    at: tuple[int, ...] = ()
    """After how many rows of the table there are marks, as far as there are slots for them."""
    idle: bool = False
    """Whether it is idle work, which gives up no marks of pinned or kept paths."""
    is_brief: bool = False
    """Whether the mark at its end is only for going a few rows back, so that later ones replace it."""
    keeps: bool = False
    """Whether the state it goes on from stays as it is, because the step may be taken back."""
    spaced: tuple[int, ...] = ()
    """The same as `at` for minor marks."""


@dataclass(slots=True, eq=False)
class LiveState:
    """The state of one table: `slot` has it after the first `row` rows, NONE being the zeros before the first row.

    The rows after it are in the log. A step that is planned reads it, writes `target` with the state after `stop` rows,
    and copies on its way to slots of `saves`.
    """

    slot: int = NONE
    row: int = 0
    fork: int = 0
    """How many rows of the prompt were known when the table was opened: others may part from them there as well, so a
    mark is taken."""
    target: int = NONE
    """NONE: no step is planned. It is `slot` itself if no mark has that."""
    stop: int = 0
    saves: list[tuple[int, int]] = field(default_factory=list)
    """The row and the slot of each mark that the step takes before its end."""
    minor: frozenset[int] = frozenset()
    """The rows of the step after which marks are minor."""
    marks_stop: bool = False
    """Whether the state at the step's end becomes a mark as well."""
    is_brief: bool = False
    """As in `StatePlan`."""
    brief: list[Mark] = field(default_factory=list)

    @property
    def moves(self) -> StateMoves:
        """What the planned step does with states."""
        return StateMoves(self.slot, self.row, (*self.saves, (self.stop, self.target)))
