"""The copies of rows that a change of blocks needs."""

from dataclasses import dataclass


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


Copy = RowCopy | Offload | Restore
