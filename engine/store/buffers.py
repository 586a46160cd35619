"""Host memory that blocks go through between their files and the device, and the threads that fill it."""

import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import torch

from engine.store.digests import Digest
from engine.store.folder import Folder
from engine.store.readers import Readers
from models.weights.staging import Slot, slots_of

COUNT = 4
AHEAD = 2
"""So many buffers are filled while what was read before is copied from the others."""
GROUP_BYTES = {"cuda": 32 * 1024**2, "cpu": 4 * 1024**2}
"""Blocks are brought back in groups of about so many bytes, one buffer each; of one block at least."""
READERS = {"cuda": 12, "cpu": 1}
"""Threads that read, at most: the cores of a CPU are for computing."""


class Buffers:
    """`take_now` and `give` are for any thread, all else for that of the disk."""

    def __init__(self, block_bytes: int, device: torch.device) -> None:
        self.block_bytes = block_bytes
        self._device = device
        self.each = max(GROUP_BYTES[device.type] // block_bytes, 1)
        """Blocks of a buffer."""
        self._free: SimpleQueue[Slot] = SimpleQueue()
        self._readers: Readers | None = None
        self._memory = ExitStack()

    def open(self) -> None:
        """Take the memory, which is pinned beside a GPU. Raises RuntimeError where the system refuses."""
        cores = (os.cpu_count() or 1) - 2
        self._readers = Readers(max(min(cores, READERS[self._device.type]), 1))
        nbytes = self.each * self.block_bytes
        for slot in self._memory.enter_context(slots_of(COUNT, nbytes, self._device)):
            self._free.put(slot)

    def take_now(self) -> Slot | None:
        """A buffer, if one is free; what the device copied from it before comes before what it copies now."""
        try:
            return self._free.get_nowait()
        except Empty:
            return None

    def give(self, slot: Slot) -> None:
        """It is free again, once the device has done the copies that were noted."""
        self._free.put(slot)

    def read(self, folder: Folder, digests: Sequence[Digest]) -> Generator[tuple[Slot, int]]:
        """Buffers with the blocks of `digests`, in order, and how many; whoever gets one gives it back. It ends before
        the first block that is not whole. Raises OSError."""
        reading: deque[_Group] = deque()
        starts = iter(range(0, len(digests), self.each))
        try:
            while True:
                if len(reading) < AHEAD and (first := next(starts, None)) is not None:
                    reading.append(_Group(self._free.get()))
                    self._begin(reading[-1], folder, digests[first : first + self.each])
                elif reading:
                    asked, count = len(reading[0].pending), reading[0].wait()
                    yield reading.popleft().slot, count
                    if count < asked:
                        return
                else:
                    return
        finally:
            for group in reading:
                while group.pending:
                    with suppress(OSError):  # nobody asks for it any more
                        group.wait()
                self._free.put(group.slot)

    def _begin(self, group: "_Group", folder: Folder, digests: Sequence[Digest]) -> None:
        assert self._readers is not None
        group.slot.wait()
        for place, digest in enumerate(digests):
            into = group.slot.view[place * self.block_bytes : (place + 1) * self.block_bytes]
            group.pending.append(folder.read(digest, into, self._readers))

    def close(self) -> None:
        """Give the memory back, which nobody may use any more."""
        if self._readers is not None:
            self._readers.close()
        with suppress(RuntimeError):  # a device that has failed copies nothing any more
            while (slot := self.take_now()) is not None:
                slot.wait()
        self._memory.close()


@dataclass(slots=True, eq=False)
class _Group:
    """Blocks on their way into a buffer."""

    slot: Slot
    pending: deque[Callable[[], bool]] = field(default_factory=deque)

    def wait(self) -> int:
        """Until all are read; how many of the first are whole. Raises OSError."""
        count, goes_on = 0, True
        while self.pending:
            goes_on = self.pending.popleft()() and goes_on
            count += goes_on
        return count
