"""Copies what is to be written into buffers, a record each, and hands them to the disk's thread."""

from collections.abc import Callable
from functools import partial

import torch

from engine.cache.block import Block
from engine.cache.kv_cache import KVCache
from engine.store.buffers import Buffers
from engine.store.digests import Digest
from engine.store.folder import Folder
from engine.store.jobs import StateCopy
from models.weights.staging import StagingBuffer

MOST_STATES = 8
"""The most states in the file of a conversation: those of its latest turn, and some of other branches."""

Store = Callable[[memoryview], bool]
"""Writes a payload on the disk's thread. Returns False if it may not be written; raises OSError."""


class RecordWriter:
    """For the loop's thread."""

    def __init__(
        self, cache: KVCache, buffers: Buffers, hand_over: Callable[[str, Store, StagingBuffer, int], None]
    ) -> None:
        """`hand_over` gets the owner of each record, what writes it, its buffer, and how many rows it adds."""
        self._cache = cache
        self._buffers = buffers
        self._hand_over = hand_over

    def put_block(self, folder: Folder, owner: str, digest: Digest, block: Block, count: int) -> bool:
        """Have the first `count` rows of a block written, with zeros in place of the rest, which may belong to others.
        Return False if there is no memory for that now."""
        slot = self._buffers.take_now()
        if slot is None:
            return False
        try:
            stored = self._cache.block(block.id)
            for rows, held in zip(stored, self._buffers.block(slot, 0, stored), strict=True):
                # Gathered on the GPU, they cross the bus in one copy.
                whole = torch.empty_like(held, device=rows.device) if rows.is_cuda else held
                whole.copy_(rows)[:, :, count:] = 0
                if whole is not held:
                    held.copy_(whole, non_blocking=True)
        except RuntimeError:  # the device has no room for `whole`
            self._buffers.give(slot)
            return False
        slot.note_copy(self._cache.device)
        self._hand_over(owner, partial(folder.append, owner, digest), slot, count)
        return True

    def put_piece(self, folder: Folder, owner: str, state: StateCopy) -> bool:
        """Have the next piece of a state written. Return False if there is no memory for that now."""
        slot = self._buffers.take_now()
        if slot is None:
            return False
        nbytes = self._buffers.block_bytes
        piece = state.data[state.done * nbytes : (state.done + 1) * nbytes]
        slot.memory[: len(piece)].copy_(piece, non_blocking=True)
        slot.memory[len(piece) : nbytes] = 0
        slot.note_copy(self._cache.device)
        digest, most = state.pieces[state.done], MOST_STATES * len(state.pieces)
        state.done += 1
        self._hand_over(owner, partial(folder.put, owner, digest, most=most, keep=state.keep), slot, 0)
        return True
