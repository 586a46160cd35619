"""The copies of rows and states that a change of blocks needs."""

from dataclasses import dataclass

STATES = -1
"""Stands for a group: the states of recurrent layers after the rows of a block, with the log that goes with them."""


@dataclass(frozen=True, slots=True)
class RowCopy:
    """Rows to copy, from the start of one block to the start of another."""

    source: int
    target: int
    rows: int


@dataclass(frozen=True, slots=True)
class Offload:
    """Copy the rows that a device block has in a group to slots in host memory."""

    block: int
    slots: tuple[int, ...]
    group: int = 0


@dataclass(frozen=True, slots=True)
class Restore:
    """Copy slots in host memory to the rows of a device block in a group."""

    slots: tuple[int, ...]
    block: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class Logged:
    """States of recurrent layers, and the rows of the log that go with them (`engine/cache/state_bytes.py`)."""

    state: int
    """The slot of the states."""
    blocks: tuple[int, ...]
    """The last blocks before them, whose rows in the log the convolutions see; NONE for one that is not copied."""
    row: int
    """After how many rows of their path they are."""


@dataclass(frozen=True, slots=True)
class OffloadStates:
    """Copy states to slots in host memory."""

    states: Logged
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RestoreStates:
    """Copy slots in host memory to states."""

    slots: tuple[int, ...]
    states: Logged


HostCopy = Offload | Restore | OffloadStates | RestoreStates
Copy = RowCopy | HostCopy
