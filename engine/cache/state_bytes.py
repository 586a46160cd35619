"""The states after a row of a path, with the rows of the log that go with them, as bytes: what the disk has of a mark.

The states of the recurrent layers come first, in the order of the layers, then the rows of the log, layer by layer: all
those before the state in the blocks that the convolutions see.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.batch import NONE
from engine.cache.kv_cache import KVCache


def state_bytes(cache: KVCache, row: int) -> int:
    """Return how many bytes `gather` returns for the states after the first `row` rows of a path."""
    states = cache.states
    assert states is not None
    first = max(row - states.tail, 0) // cache.block_size
    log = cache.group_bytes(cache.log) if cache.log is not None else 0
    return states.nbytes // states.slots + (row - first * cache.block_size) * log


def gather(cache: KVCache, slot: int, blocks: Sequence[int], row: int) -> Tensor:
    """Return a copy of a state and the log that goes with it, uint8 [state_bytes(row)] on the device of the cache.

    The state is that after `row` rows and lies in `slot`. `blocks` are those of the log up to that row. Raises what
    torch raises without memory.
    """
    return torch.cat([part for part, _ in runs(cache, slot, blocks, row) if part is not None])


def scatter(cache: KVCache, data: Tensor, slot: int, blocks: Sequence[int], row: int) -> None:
    """Write what `gather` returned into `slot` and `blocks`; NONE stands for a block that is in the log already."""
    at = 0
    for part, nbytes in runs(cache, slot, blocks, row):
        if part is not None:
            part.copy_(data[at : at + nbytes])
        at += nbytes


def runs(cache: KVCache, slot: int, blocks: Sequence[int], row: int) -> Iterator[tuple[Tensor | None, int]]:
    """Yield each run of memory that `gather` copies, uint8 [bytes], or None for NONE, with its size in bytes."""
    states, size = cache.states, cache.block_size
    assert states is not None
    for layer in states.layers.values():
        state = layer[slot].view(torch.uint8).flatten()
        yield state, state.nbytes
    assert cache.log is not None
    counts = [size] * (len(blocks) - 1) + [(row - 1) % size + 1]
    for index in states.layers:
        rows = cache.k[index]
        for block, count in zip(blocks, counts, strict=True):
            if block == NONE:
                yield None, count * rows[0].nbytes
                continue
            (place,) = cache.table((block,), cache.log)
            run = rows[place * size : place * size + count].view(torch.uint8).flatten()
            yield run, run.nbytes
