"""Host memory through which blocks pass between their files and the device, and the threads that fill it."""

import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from engine.cache.host_memory import split
from engine.store.digests import Digest
from engine.store.folder import Folder
from engine.store.readers import Readers
from models.weights.staging import StagingBuffer, staging_buffers

COUNT = 4
AHEAD = 3
"""Number of buffers that are filled while earlier ones are copied to the device."""
GROUP_BYTES = {"cuda": 32 * 1024**2, "cpu": 4 * 1024**2}
"""The size of a buffer, in bytes: it holds as many blocks as fit, but at least one."""
READERS = {"cuda": 12, "cpu": 1}
"""The most threads that read. On a CPU the cores are needed for computing."""


class Buffers:
    """COUNT buffers. Any thread may call `take_now` and `give`; the rest belongs to the disk's thread."""

    def __init__(self, block_bytes: int, device: torch.device) -> None:
        """Blocks take `block_bytes` each and are copied from and to `device`. Memory is allocated by `open`."""
        self.block_bytes = block_bytes
        self._device = device
        self.each = max(GROUP_BYTES[device.type] // block_bytes, 1)
        """Blocks per buffer."""
        self._free: SimpleQueue[StagingBuffer] = SimpleQueue()
        self._readers: Readers | None = None
        self._memory = ExitStack()

    def open(self) -> None:
        """Allocate the memory, pinned for a GPU, and start the threads. Raises RuntimeError if the system refuses."""
        cores = (os.cpu_count() or 1) - 2
        self._readers = Readers(max(min(cores, READERS[self._device.type]), 1))
        nbytes = self.each * self.block_bytes
        for slot in self._memory.enter_context(staging_buffers(COUNT, nbytes, self._device)):
            self._free.put(slot)

    def take_now(self) -> StagingBuffer | None:
        """Return a free buffer, or None. The device may still be copying from it; copies enqueued now come later."""
        try:
            return self._free.get_nowait()
        except Empty:
            return None

    def give(self, slot: StagingBuffer) -> None:
        """Return a buffer. `StagingBuffer.wait` waits for the copies that were noted in it."""
        self._free.put(slot)

    def block(self, slot: StagingBuffer, place: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Return block `place` of a buffer as tensors of the shapes and dtypes of `like`."""
        return split(self.record(slot, place), like)

    def record(self, slot: StagingBuffer, place: int) -> Tensor:
        """Return record `place` of a buffer, uint8 [block_bytes]."""
        return slot.memory[place * self.block_bytes : (place + 1) * self.block_bytes]

    def read(self, folder: Folder, digests: Sequence[Digest]) -> Generator[tuple[StagingBuffer, int]]:
        """Yield buffers with the blocks of `digests`, in order, and the number of blocks in each.

        The caller must `give` each buffer back. Ends before the first block that is missing or damaged. Raises OSError.
        """
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
                    with suppress(OSError):  # it is not needed any more
                        group.wait()
                self._free.put(group.slot)

    def _begin(self, group: "_Group", folder: Folder, digests: Sequence[Digest]) -> None:
        assert self._readers is not None
        group.slot.wait()
        for place, digest in enumerate(digests):
            into = group.slot.view[place * self.block_bytes : (place + 1) * self.block_bytes]
            group.pending.append(folder.read(digest, into, self._readers))

    def close(self) -> None:
        """End the threads and free the memory. Buffers must not be used afterwards."""
        if self._readers is not None:
            self._readers.close()
        with suppress(RuntimeError):  # a device that has failed copies nothing more
            while (slot := self.take_now()) is not None:
                slot.wait()
        self._memory.close()


@dataclass(slots=True, eq=False)
class _Group:
    """Blocks that are being read into a buffer."""

    slot: StagingBuffer
    pending: deque[Callable[[], bool]] = field(default_factory=deque)

    def wait(self) -> int:
        """Wait for all reads. Return the number of intact blocks before the first that is not. Raises OSError."""
        count, goes_on = 0, True
        while self.pending:
            goes_on = self.pending.popleft()() and goes_on
            count += goes_on
        return count
