"""Which sequences of a decode step read a common prefix together (`engine/kernels/triton/attention_mma.py`).

Up to FEW rows share nothing: what kernels with the bits of a row alone gained was little.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from engine.execute.cuda.tiles import FEW

LEAST = 1024
"""Rows of a prefix that is worth sharing."""
WORTH = 8 << 20
"""Bytes of K and V that a layer must read less; with fewer, who shares is not worth looking for."""
DEPTH = 3
"""How often a group may be divided into such that have more in common: a bound for the time that it takes."""
QUERIES = 32
"""Query heads of a KV head that a program of `parts_kernel` takes at once, those of two sequences at least. With 64
shared rows are read half as often, but fewer programs fit on a multiprocessor: it took 9 to 30% longer on an H200."""
MOST_QUERIES = 64
"""The most that it can take."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What sharing has to know of a model's attention and its cache."""

    group: int
    """Query heads of a KV head."""
    block_size: int
    row_bytes: int
    """K and V of a row in one layer."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the shared rows of a step are cut: it belongs to the size of the step, not to who is in it."""

    members: int
    """Sequences of a tile."""
    tiles: int


def choose_sharing(rows: int, group: int) -> Sharing | None:
    """For steps of so many rows and models of `group` query heads a KV head; None where sharing has no kernel.

    All its tiles have at most `most_members(rows)` members.
    """
    members = min(max(QUERIES // _power(group), 2), _power(rows))
    if rows <= FEW or members * _power(group) > MOST_QUERIES:
        return None
    return Sharing(members, min(rows // 2, -(-rows // members) + 3))


def most_members(rows: int) -> int:
    """Members of all tiles together of a step of up to `rows` rows, whatever the model."""
    return rows + 4 * QUERIES


def pays(members: int, rows: int, row_bytes: int) -> bool:
    """Whether so many sequences should read `rows` common rows together; `row_bytes`: K and V of one in one layer."""
    return rows >= LEAST and (members - 1) * rows * row_bytes >= WORTH


def share(
    tables: Sequence[list[int]], rows: Sequence[int], kv: KVShape, sharing: Sharing
) -> tuple[list[int], list[list[int]]]:
    """`shared` (rows that each sequence shares) and `members` (of each tile, -1 for none), by rows of the batch.

    tables: blocks of each; rows: how many of its rows are final, i.e. before that of its newest token. Whoever shares
    is in one tile; all of a tile share the same rows. It holds for as long as the same sequences decode, since
    full blocks that several have stay where they are.
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
    """Those of `group`, who begin alike, that should read together, and how many rows: all, or some of them more."""
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
    """The power of two from `number` on."""
    return 1 << (number - 1).bit_length()
