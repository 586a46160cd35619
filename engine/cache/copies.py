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
    """Copy a device block to a slot in host memory."""

    block: int
    slot: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Copy a slot in host memory to a device block."""

    slot: int
    block: int


Copy = RowCopy | Offload | Restore
