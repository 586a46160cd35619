"""Stream files to a device in pieces, through a few buffers: host memory holds only these buffers.

Threads read ahead while the device copies earlier pieces. They only fill buffers: every torch operation stays on the
calling thread.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from models.errors import ModelError
from models.weights.memory import on_device


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the bytes of a tensor lie, and how to decode them."""

    path: Path
    offset: int
    nbytes: int
    numbers: int
    unit: int
    """Bytes that are decoded together; a piece is a multiple of it."""
    decode: Callable[[Tensor], Tensor]
    """uint8 [k * unit] on any device -> the numbers [m] that they encode, on the same device."""
    order: Tensor | None = None
    """int64 [rows]: the file row for each place; None if they are in order."""
    finish: Callable[[Tensor], None] | None = None
    """Called with the target once it is complete."""

    @property
    def packed(self) -> bool:
        """Whether numbers are packed below a byte or two each, so that decoding needs many times the space."""
        return self.unit > 8


@dataclass(frozen=True, slots=True)
class Staging:
    """How files are read ahead, with `pieces` * `piece_bytes` of host memory, pinned if there is a GPU."""

    piece_bytes: int = 16 << 20
    pieces: int = 6
    readers: int = 4
    """Threads; one alone copies from the page cache at a fraction of what PCIe carries."""

    def stream(
        self, transfers: Iterable[tuple[Extent, Tensor]], device: torch.device, report: Callable[[int], None]
    ) -> None:
        """Write every extent to its tensor, which is contiguous, on `device` and of any float dtype.

        If a tensor has k times as many numbers as the extent, they are written k times. Decoding and conversion happen
        on the device. `report` receives the bytes of each piece that is on its way; an exception from it ends the
        transfer. Raises ModelError if a file cannot be read or has become shorter.
        """
        with (
            staging_buffers(self.pieces, self.piece_bytes, device) as slots,
            ThreadPoolExecutor(self.readers, "weights") as readers,
        ):
            free = cycle(slots)
            reading: deque[tuple[_Piece, StagingBuffer, Future[None]]] = deque()
            try:
                for piece in _pieces(transfers, self.piece_bytes):
                    # One fewer than there are slots: the device is still copying from the last one delivered.
                    if len(reading) >= max(1, len(slots) - 1):
                        report(_deliver(*reading.popleft(), device))
                    slot = next(free)
                    slot.wait()
                    reading.append((piece, slot, readers.submit(piece.read, slot.view)))
                while reading:
                    report(_deliver(*reading.popleft(), device))
            finally:
                # The memory must stay until no reader writes to it and no copy reads from it.
                readers.shutdown(cancel_futures=True)
                for slot in slots:
                    slot.wait()


@dataclass(frozen=True, slots=True)
class _Piece:
    extent: Extent
    target: Tensor
    start: int
    """First byte within the extent."""
    nbytes: int

    def read(self, view: memoryview) -> None:
        """Fill the beginning of `view`; runs in a reader thread."""
        path, rest = self.extent.path, view[: self.nbytes]
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(self.extent.offset + self.start)
                while len(rest):
                    if not (count := file.readinto(rest)):
                        raise ModelError(f"{path} ended too early; it is incomplete: download it again.")
                    rest = rest[count:]
        except OSError as error:
            reason = error.strerror or "read error"
            raise ModelError(
                f"{path} cannot be read ({reason}); check the disk, or download it again."
            ) from None

    def copy(self, staged: Tensor) -> None:
        """Decode the bytes [nbytes] and write the numbers to their place; on a GPU this only enqueues."""
        extent, target = self.extent, self.target
        numbers = extent.decode(staged.to(target.device, non_blocking=True))
        first = self.start * extent.numbers // extent.nbytes
        target.view(-1, extent.numbers)[:, first : first + len(numbers)] = numbers
        if self.start + self.nbytes == extent.nbytes:
            if extent.order is not None:
                target.copy_(target[extent.order.to(target.device)])
            if extent.finish is not None:
                extent.finish(target)


class StagingBuffer:
    """A buffer, uint8 [n] in host memory, and the event after which the device has finished copying from or to it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.view = memory.numpy().data
        self.copied: torch.cuda.Event | None = None

    def note_copy(self, device: torch.device) -> None:
        """Record that copies from it or to it were enqueued."""
        if device.type == "cuda":
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copied.record()

    def wait(self) -> None:
        """Wait until these copies are done."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None


def _deliver(piece: _Piece, slot: StagingBuffer, read: Future[None], device: torch.device) -> int:
    """Wait until a piece is read, enqueue its copy, and return its bytes."""
    read.result()
    piece.copy(slot.memory[: piece.nbytes])
    slot.note_copy(device)
    return piece.nbytes


def _pieces(transfers: Iterable[tuple[Extent, Tensor]], most: int) -> Iterator[_Piece]:
    for extent, target in transfers:
        # Packed numbers grow to eight times their size or more while they are decoded.
        step = max((most // 4 if extent.packed else most) // extent.unit, 1) * extent.unit
        for start in range(0, extent.nbytes, step):
            yield _Piece(extent, target, start, min(step, extent.nbytes - start))


@contextmanager
def staging_buffers(count: int, nbytes: int, device: torch.device) -> Iterator[list[StagingBuffer]]:
    """Provide `count` buffers of `nbytes` and up to 63 more, pinned for a GPU. All copies must end before the exit."""
    size = -(-nbytes // 64) * 64  # align every slot for any dtype
    memory = torch.empty(count * size, dtype=torch.uint8)
    with on_device(device):
        pinned = device.type == "cuda" and pin(memory)
    try:
        yield [StagingBuffer(memory[n * size : (n + 1) * size]) for n in range(count)]
    finally:
        # torch's own pinned memory would stay in its cache forever.
        if pinned:
            with on_device(device):
                torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]


def pin(memory: Tensor) -> bool:
    """Page-lock host memory, so that a GPU copies from it without waiting. Return False if the system refuses."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    with suppress(RuntimeError):
        # CUDA reports a failed call at the next call: make that call here, not in an unrelated kernel launch.
        torch.ones(1, device="cuda")
    return False
