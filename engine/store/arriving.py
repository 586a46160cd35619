"""Puts what was read from disk into the cache: blocks, and the state of recurrent layers after them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.cache.blocks import BlockManager
from engine.cache.host_memory import split
from engine.cache.kv_cache import KVCache
from engine.cache.state_bytes import scatter, state_bytes
from engine.store.jobs import RestoreRequest


def arrive(restore: RestoreRequest, cache: KVCache, blocks: BlockManager, data: Tensor) -> None:
    """Put the next block or piece of a restore into the cache. `data` has it, uint8 [bytes] in host memory.

    Raises OutOfBlocksError without room, and what a failed copy raises.
    """
    if restore.arrived < len(restore.is_bare):
        _block(restore, cache, blocks, data)
    else:
        _piece(restore, cache, blocks, data)
    restore.arrived += 1


def _block(restore: RestoreRequest, cache: KVCache, blocks: BlockManager, data: Tensor) -> None:
    table, size = restore.table, blocks.block_size
    rows = min(size, len(restore.keys) - table.length)
    blocks.reserve(table, rows, restore.idle, restore.is_bare[restore.arrived])
    targets = cache.block(table.blocks[table.length // size])
    for target, held in zip(targets, split(data, targets), strict=True):
        target.copy_(held, non_blocking=True)  # zeros, where the block has only the blank slot
    blocks.commit(table, restore.keys[table.length : table.length + rows])
    if not restore.has_state:
        restore.rows += rows


def _piece(restore: RestoreRequest, cache: KVCache, blocks: BlockManager, data: Tensor) -> None:
    row = len(restore.keys)
    if restore.state is None:
        restore.state = torch.empty(state_bytes(cache, row), dtype=torch.uint8, device=cache.device)
    whole = restore.state
    start = (restore.arrived - len(restore.is_bare)) * len(data)
    own = whole[start : start + len(data)]
    own.copy_(data[: len(own)], non_blocking=True)
    if start + len(data) >= len(whole):

        def fill(slot: int, places: Sequence[int]) -> None:
            scatter(cache, whole, slot, places, row)

        blocks.states.adopt(restore.table, restore.idle, fill)
        restore.state, restore.rows = None, restore.asked
