"""Writes states of recurrent layers to disk: of a path the few from which it is likely to be continued."""

from collections.abc import Sequence

from engine.cache.block import Block
from engine.cache.blocks import BlockManager
from engine.cache.kv_cache import KVCache
from engine.cache.live_state import Mark
from engine.cache.marks import Marks
from engine.cache.state_bytes import gather
from engine.store.digests import NAME, Digest, after
from engine.store.folder import Folder
from engine.store.jobs import StateCopy, WriteRequest
from engine.store.path_digests import PathDigests
from engine.store.record_writer import RecordWriter


def worth_keeping(marks: Marks, line: Sequence[Block], write: WriteRequest) -> list[Mark]:
    """Return the marks of a path whose states are written: its end, the starts of its last two messages and of its
    last answer, and the end of the system prompt. The first three are the last marks that are not after them.

    `line` are the root and the full blocks of the path.
    """
    found = [mark for mark in marks.along(line, write.keys) if marks.is_usable(mark)]
    if not found:
        return []
    answers, messages = write.edges[-2:-1], write.edges[1::2][-3:-1]
    rows = [len(write.keys), *answers, *reversed(messages)]
    kept = [next((mark for mark in found if mark.row <= row), found[-1]) for row in rows]
    return list(dict.fromkeys([*kept, found[-1]]))


class StateWriter:
    """The states of paths that are being written. For the loop's thread."""

    def __init__(
        self, cache: KVCache, blocks: BlockManager, marks: Marks, digests: PathDigests, records: RecordWriter
    ) -> None:
        """Take the parts; `marks` are those of the blocks, `records` takes what is to be written."""
        self._cache = cache
        self._blocks = blocks
        self._marks = marks
        self._digests = digests
        self._records = records

    def next(self, folder: Folder, write: WriteRequest) -> bool:
        """Hand over the next record of the states of a path whose full blocks are written. Return False if none is
        ready; `write.is_done` says that there is no other."""
        state = write.state
        if state is None:
            return self._begin(folder, write)
        if not self._records.put_piece(folder, write.owner, state):
            return False
        if state.done == len(state.pieces):
            write.state = None
        return True

    def _begin(self, folder: Folder, write: WriteRequest) -> bool:
        """Copy the next state that is not on disk, or hand over the rows after the full block before it. Return False
        if there is none, or no memory."""
        index, marks = self._blocks.index, self._marks
        if self._blocks.match(write.keys) < len(write.keys):
            return False  # idle work will compute the rest, and then there is a state at the end
        path = index.chain(write.keys)
        digests = [self._digests.root]
        for block in path:
            digests.append(self._digests.digest(block, digests[-1]))
        wanted = {}
        for mark in worth_keeping(marks, [index.root, *path], write):
            digest = digests[mark.parent.depth]
            wanted[mark] = after(digest, mark.keys), self._digests.state(digest, mark.keys, mark.row)
        keep = frozenset(pieces[0][:NAME] for _, pieces in wanted.values())

        def has(digest: Digest) -> bool:
            return digest in write.handed or folder.holds(write.owner, digest)

        for mark, (prefix, pieces) in wanted.items():
            if all(map(has, pieces)):
                continue
            ends = [block for block in marks.support(mark)[0] if block.id in marks.log] if mark.keys else []
            if ends and not has(prefix):
                write.handed.add(prefix)
                return self._records.put_block(folder, write.owner, prefix, ends[0], len(mark.keys))
            blocks = [*path[marks.first(mark.row) : mark.parent.depth], *ends[:1]]
            try:
                data = gather(self._cache, mark.slot, [block.id for block in blocks], mark.row)
            except RuntimeError:  # the device has no room for the copy
                return False
            write.handed.update(pieces)
            write.state = StateCopy(pieces, data, keep)
            return True
        write.is_done = True
        return False
