"""Finds the next record of a path that is not on disk yet."""

from engine.cache.blocks import BlockManager
from engine.store.digests import after, without_windows
from engine.store.folder import Folder
from engine.store.jobs import WriteRequest
from engine.store.path_digests import PathDigests
from engine.store.record_writer import RecordWriter
from engine.store.state_writer import StateWriter


class PathWriter:
    """For the loop's thread."""

    def __init__(
        self, blocks: BlockManager, digests: PathDigests, records: RecordWriter, states: StateWriter | None
    ) -> None:
        """`states` writes the states of recurrent layers, if there are any."""
        self._blocks = blocks
        self._digests = digests
        self._records = records
        self._states = states
        self._size = blocks.block_size

    def next(self, folder: Folder, write: WriteRequest) -> bool:
        """Hand over the next record of a path. Return False if none is ready; `is_done` says that there is no other."""
        owner = write.owner
        path = self._blocks.index.chain(write.keys)
        for block in path[write.done :]:
            if block.is_gone:
                return False
            digest = self._digests.digest(block, write.digest or self._digests.root)
            is_whole = self._blocks.groups.have(block.id, but_log=True)
            name = digest if is_whole else without_windows(digest)
            has = folder.holds(owner, digest) or folder.holds(owner, name)
            if not has and not self._records.put_block(folder, owner, name, block, self._size):
                return False
            write.done, write.digest = write.done + 1, digest
            if not has:
                return True
        if write.done < len(write.keys) // self._size:
            return False
        if self._states is not None:
            return self._states.next(folder, write)
        tail = write.keys[write.done * self._size : write.until]
        if tail:
            held = self._blocks.path(write.keys[: write.until])
            if len(held) <= write.done:  # it, or the rows before it that it needs, is not there now
                return False
            block = self._blocks.every[held[-1]]
            if block.keys[: len(tail)] != tail:
                return False
            digest = after(write.digest or self._digests.root, tail)
            has = folder.holds(owner, digest)
            if not has and not self._records.put_block(folder, owner, digest, block, len(tail)):
                return False
        write.is_done = True
        return bool(tail)
