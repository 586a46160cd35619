"""Chooses the sequences of a decode step that read a common prefix together (`engine/kernels/triton/attention_mma.py`).

Steps of up to FEW rows share nothing: with kernels that keep the bits of a row alone, the gain was small.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from engine.execute.cuda.tiles import FEW

LEAST = 1024
"""Rows of the shortest prefix worth sharing."""
WORTH = 8 << 20
"""Bytes of K and V that sharing must save per layer; below that, looking for sharers is not worthwhile."""
DEPTH = 3
"""How often a group may be divided into groups with more in common; it bounds the time of the search."""
QUERIES = 32
"""Query heads per KV head that a program of `parts_kernel` takes at once, from at least two sequences. With 64, shared
rows are read half as often, but fewer programs fit on a multiprocessor: it took 9 to 30% longer on an H200."""
MOST_QUERIES = 64
"""The most query heads that a program can take."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """The properties of a model's attention and its cache that sharing depends on."""

    group: int
    """Query heads per KV head."""
    block_size: int
    row_bytes: int
    """Bytes of K and V of a row in one layer."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the shared rows of a step are cut. It depends on the size of the step, not on its sequences."""

    members: int
    """Sequences per tile."""
    tiles: int


def choose_sharing(rows: int, group: int) -> Sharing | None:
    """Return the cut for steps of `rows` rows and `group` query heads per KV head; None if there is no kernel for it.

    All its tiles together have at most `most_members(rows)` members.
    """
    members = min(max(QUERIES // _power(group), 2), _power(rows))
    if rows <= FEW or members * _power(group) > MOST_QUERIES:
        return None
    return Sharing(members, min(rows // 2, -(-rows // members) + 3))


def most_members(rows: int) -> int:
    """Return the most members that all tiles of a step of up to `rows` rows have together, for any model."""
    return rows + 4 * QUERIES


def pays(members: int, rows: int, row_bytes: int) -> bool:
    """Return whether `members` sequences should read `rows` common rows together; `row_bytes` as in `KVShape`."""
    return rows >= LEAST and (members - 1) * rows * row_bytes >= WORTH


def share(
    tables: Sequence[list[int]], rows: Sequence[int], kv: KVShape, sharing: Sharing
) -> tuple[list[int], list[list[int]]]:
    """Return `shared`, the number of rows each sequence shares, and `members`, the sequences of each tile, -1 for none.

    tables: the blocks of each sequence; rows: its number of final rows, i.e. those before its newest token's. A
    sequence that shares is in exactly one tile, and all members of a tile share the same rows. The result holds as long
    as the same sequences decode, because full blocks that several sequences hold do not move.
    """
    shared = [0] * len(tables)
    members: list[list[int]] = []
    alike: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    least = -(-LEAST // kv.block_size)
    for index, table in enumerate(tables):
        if rows[index] >= LEAST:
            alike[tuple(table[:least])].append(index)
    groups = [found for group in alike.values() for found in _split(group, tables, rows, kv.block_size)]
    for group, common in sorted(groups, key=lambda found: len(found[0]), reverse=True):
        if not pays(len(group), common, kv.row_bytes):
            continue
        parts = -(-len(group) // sharing.members)
        for part in range(parts):
            tile = group[part::parts]
            if len(tile) > 1 and len(members) < sharing.tiles:
                members.append([*tile, *[-1] * (sharing.members - len(tile))])
                for index in tile:
                    shared[index] = common
    members += [[-1] * sharing.members] * (sharing.tiles - len(members))
    return shared, members


def _split(
    group: list[int], tables: Sequence[list[int]], rows: Sequence[int], block_size: int, depth: int = DEPTH
) -> list[tuple[list[int], int]]:
    """Return the groups of `group`, whose members begin alike, that should read together, and their number of common
    rows: all members as one group, or smaller groups that share more."""
    if len(group) < 2:
        return []
    low, high = (choose(tables[index] for index in group) for choose in (min, max))
    blocks = next(
        (i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high))
    )
    common = min(blocks * block_size, *(rows[index] for index in group))
    common -= common % block_size
    branches: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for index in group:
        branches[tuple(tables[index][blocks : blocks + 1])].append(index)
    if len(branches) > 1 and depth > 0:
        found = [
            part
            for branch in branches.values()
            for part in _split(branch, tables, rows, block_size, depth - 1)
        ]
        if sum((len(part) - 1) * shared for part, shared in found) > (len(group) - 1) * common:
            return found
    return [(group, common)]


def _power(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
