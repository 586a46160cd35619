"""The host memory behind the slots of `engine/spill.py`, and whether bringing blocks back is worth it."""

from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.spill import Restore, Spill
from models.staging import pin

T = TypeVar("T")

PIECE_BYTES = 256 * 1024**2
"""Memory is taken in such pieces when it is needed: pinning takes some 0.3 s a GB."""
FASTER = 1.2
"""So much faster than computing a token must bringing it back be."""
ENOUGH_ROWS = 256
"""Chunks of fewer rows do not tell how fast prompts are computed."""


class HostKV:
    """Copies of KV blocks in host memory: pinned beside a GPU, plain beside a CPU (which is for tests).

    Every copy is enqueued on the current stream, as all that reads and writes the cache: the order in which they
    are asked for is the order in which they happen, and nobody waits.
    """

    def __init__(self, kv: Tensor, block_size: int, most_bytes: int) -> None:
        """`kv` is the cache [2, layers, slots, heads, dim]; at most `most_bytes` of host memory are taken."""
        self._kv = kv
        self._size = block_size
        self._shape = (*kv.shape[:2], block_size, *kv.shape[3:])
        self.block_bytes = kv[:, :, :block_size].nbytes
        self._most = most_bytes // self.block_bytes
        self._each = max(PIECE_BYTES // self.block_bytes, 1)
        self._pieces: list[Tensor] = []
        self._blocks = 0
        self._staging: Tensor | None = None
        self.costs = Costs()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that are taken."""
        return self._blocks * self.block_bytes

    def grow(self) -> int:
        """Take one more piece. Returns its slots; 0 when all is taken that may be, or the system refuses."""
        count = min(self._each, self._most - self._blocks)
        if count <= 0:
            return 0
        on_gpu = self._kv.device.type == "cuda"
        try:
            if on_gpu and self._staging is None:
                self._staging = torch.empty(self._shape, dtype=self._kv.dtype, device=self._kv.device)
            piece = torch.empty((count, *self._shape), dtype=self._kv.dtype)
            refused = on_gpu and not pin(piece)
        except (RuntimeError, MemoryError):
            refused = True
        if refused:
            self._most = self._blocks
            return 0
        self._pieces.append(piece)
        self._blocks += count
        return count

    def carry_out(self, copy: Spill | Restore) -> None:
        """Copy a block one way or the other, all its rows."""
        block = self._kv[:, :, copy.block * self._size : (copy.block + 1) * self._size]
        piece, place = divmod(copy.slot, self._each)
        host = self._pieces[piece][place]
        if isinstance(copy, Restore):
            self._copy(host, block)
            return
        self._copy(block, host)
        if self._staging is not None and self.costs.brought is None:
            self._measure(host, block)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        # A block lies in 2 * layers parts: put together on the device, they cross the bus as one.
        if self._staging is not None:
            source = self._staging.copy_(source, non_blocking=True)
        target.copy_(source, non_blocking=True)

    def _measure(self, host: Tensor, block: Tensor) -> None:
        """What it takes to bring back a token, from a block that has just been spilled; once, some milliseconds."""
        times = []
        for _ in range(3):
            torch.cuda.synchronize(self._kv.device)
            began = perf_counter()
            for _ in range(4):
                self._copy(host, block)
            torch.cuda.synchronize(self._kv.device)
            times.append((perf_counter() - began) / 4)
        self.costs.brought = min(times) / self._size

    def close(self) -> None:
        """Give the memory back."""
        if self._staging is not None:
            with suppress(RuntimeError):  # a device that has failed copies nothing any more
                torch.cuda.synchronize(self._kv.device)
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            for piece in self._pieces:
                cudart.cudaHostUnregister(piece.data_ptr())
        self._pieces.clear()
        self._blocks = self._most = 0


class Costs:
    """What a token of a prompt takes, in seconds; None: not measured yet."""

    def __init__(self) -> None:
        self.brought: float | None = None
        """Brought back from host memory."""
        self.computed: float | None = None
        """Computed, in the fastest chunk so far."""
        self._running: tuple[Any, Any, int] | None = None

    @property
    def worth_it(self) -> bool:
        """Whether blocks shall be brought back, as far as is known."""
        return self.brought is None or self.computed is None or self.brought * FASTER <= self.computed

    def of_chunk(self, rows: int, compute: Callable[[], T]) -> T:
        """Do `compute`, which enqueues the work of a chunk of `rows` rows on a GPU, and have it timed there."""
        self._read()
        if rows < ENOUGH_ROWS or self._running is not None:
            return compute()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        result = compute()
        end.record()
        self._running = start, end, rows
        return result

    def _read(self) -> None:
        """Note how long the last chunk took, if it is done."""
        if self._running is not None and self._running[1].query():
            start, end, rows = self._running
            spent = start.elapsed_time(end) / 1e3 / rows
            self.computed = spent if self.computed is None else min(spent, self.computed)
            self._running = None
