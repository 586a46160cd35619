"""The host memory behind the slots of `engine/cache/offload.py`, and whether bringing blocks back pays."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from threading import Thread
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from engine.cache.copies import STATES, HostCopy, Logged, OffloadStates, Restore, RestoreStates
from engine.cache.offload import HostTier
from engine.events import OffloadFigures
from engine.kernels.recording import wait_for
from models.weights.memory import on_device
from models.weights.staging import pin

PIECE_BYTES = 64 * 1024**2
"""Memory is taken in pieces of this size, because the device gets no new work while a piece is pinned."""
AHEAD_BYTES = 1024**3
"""Pin this much ahead of need: pinning takes about 0.3 s per GB, and no request should wait for it."""
FASTER = 1.2
"""Bringing a token back must be this many times as fast as computing it."""
ENOUGH_ROWS = 256
"""The fewest rows from which the speed of computing or bringing back prompts is measured."""
_LOOK_S = 0.001
"""Seconds between two looks for a piece that is being pinned."""


class HostKV:
    """Copies of KV blocks in host memory: pinned memory for a GPU, plain memory for a CPU (which is for tests).

    A slot has room for a block of the primary group. What a block has in another group takes as many slots as it needs.
    Every copy is enqueued on the current stream, like everything that reads and writes the cache. So copies happen in
    the order in which they are requested, and nothing waits for them.
    """

    def __init__(
        self,
        block: Callable[[int, int], Sequence[Tensor]],
        block_size: int,
        most_bytes: int,
        groups: Sequence[int] = (0,),
        states: Callable[[Logged], Iterable[tuple[Tensor | None, int]]] = lambda states: (),
        state_bytes: Callable[[int], int] = lambda row: 0,
    ) -> None:
        """`block` is that of the cache, and `groups` are its groups; at most `most_bytes` of memory are used.

        `states` returns the memory of states as `engine/cache/state_bytes.py` does, `state_bytes` the size of those
        after a row.
        """
        self._states = states
        self._state_bytes = state_bytes
        self._block = block
        self._size = block_size
        self._device = block(0, 0)[0].device
        each = [sum(rows.nbytes for rows in block(0, group)) for group in groups]
        self.block_bytes = each[0]
        """Bytes of a slot."""
        self._group_bytes = dict(zip(groups, each, strict=True))
        self._staging_bytes = max(each)
        self._most = most_bytes // self.block_bytes
        self._each = max(PIECE_BYTES // self.block_bytes, 1)
        self._pieces: list[Tensor] = []
        self._taken = 0
        """Slots in all pieces, including those in `_ready`."""
        self._ready: deque[Tensor] = deque()
        """Pieces that are pinned but not used yet."""
        self._pinned = self._device.type == "cuda"
        self._pinning = Thread()
        self._over = False
        self._staging: Tensor | None = None
        self.costs = PromptCosts()
        self.tell: Callable[[HostCopy | None], None] = lambda copy: None
        """Called before a block or states are copied, so that the other processes of a divided model copy theirs, too;
        with None when nothing will be copied any more."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory in use."""
        return self._taken * self.block_bytes

    def size(self, group: int, row: int) -> int:
        """Return how many slots a block takes in a group, or STATES after a row of their path."""
        nbytes = self._state_bytes(row) if group == STATES else self._group_bytes[group]
        return -(-nbytes // self.block_bytes)

    def prepare(self, wait: bool = False) -> None:
        """Start a thread that pins memory, because blocks will soon be evicted. Returns at once unless `wait`."""
        if self._pinned and not self._pinning.is_alive() and not self._is_far_ahead:
            self._pinning = Thread(target=self._pin_ahead, name="pin", daemon=True)
            with suppress(RuntimeError):  # the system can start no more threads now
                self._pinning.start()
        if wait and self._pinning.is_alive():
            self._pinning.join()

    def grow(self) -> int:
        """Add a piece and return its number of slots; 0 if none is ready, the limit is reached or memory is refused."""
        self._over = self._over or not self._can_stage()
        if self._over:
            return 0
        self.prepare()
        piece = self._ready.popleft() if self._ready else None if self._pinned else self._take()
        if piece is None:
            return 0
        self._pieces.append(piece)
        return len(piece)

    def _can_stage(self) -> bool:
        """Allocate the staging block of a GPU; return whether there is room for it."""
        if self._pinned and self._staging is None:
            try:
                self._staging = torch.empty(self._staging_bytes, dtype=torch.uint8, device=self._device)
            except RuntimeError:
                return False
        return True

    def _take_until(self, piece: int) -> None:
        """Take pieces until the numbered one is there: in a divided model rank 0 decides what is offloaded.

        Where the system refuses to pin memory, take what is not pinned. Raises RuntimeError if there is none.
        """
        while len(self._pieces) <= piece:
            self._can_stage()  # without it, copies are slower
            self.prepare()
            while not self._ready and self._pinning.is_alive():
                self._pinning.join(_LOOK_S)
            if self._ready:
                self._pieces.append(self._ready.popleft())
            else:
                self._pieces.append(torch.empty((self._each, self.block_bytes), dtype=torch.uint8))

    @property
    def _is_far_ahead(self) -> bool:
        enough = len(self._ready) * self._each * self.block_bytes >= AHEAD_BYTES
        return self._over or enough or self._taken >= self._most

    def _pin_ahead(self) -> None:
        with on_device(self._device):
            while not self._is_far_ahead and (piece := self._take()) is not None:
                self._ready.append(piece)

    def _take(self) -> Tensor | None:
        """Allocate the memory of one more piece; None if there is none."""
        count = min(self._each, self._most - self._taken)
        if count <= 0:
            return None
        try:
            # Writing to it first makes the system find the pages without holding up the device.
            piece = torch.empty((count, self.block_bytes), dtype=torch.uint8).zero_()
            refused = self._pinned and not pin(piece)
        except (RuntimeError, MemoryError):
            refused = True
        if refused:
            self._most = self._taken
            return None
        self._taken += count
        return piece

    def carry_out(self, copy: HostCopy) -> None:
        """Copy all rows of a block in a group, or states, from or to host memory."""
        self.tell(copy)
        self._take_until(max(slot // self._each for slot in copy.slots))
        if isinstance(copy, OffloadStates | RestoreStates):
            self._copy_states(copy)
            return
        block = self._block(copy.block, copy.group)
        host = self._places(copy.slots, 0, sum(rows.nbytes for rows in block))
        if isinstance(copy, Restore):
            self._restore(host, block)
            return
        self._offload(block, host)
        if self._staging is not None and self.costs.brought is None and copy.group == 0:
            self._measure(host, block)

    # A block lies in 2 * layers places of each part. Gathered on the device, they cross the bus in a copy a slot.

    def _offload(self, block: Sequence[Tensor], host: Sequence[Tensor]) -> None:
        staged = self._staged(host)
        for part, rows in zip(split(staged, block), block, strict=True):
            part.copy_(rows, non_blocking=True)
        if staged is not host[0]:
            for place, held in _side_by_side(host, staged):
                place.copy_(held, non_blocking=True)

    def _restore(self, host: Sequence[Tensor], block: Sequence[Tensor]) -> None:
        staged = self._staged(host)
        if staged is not host[0]:
            for place, held in _side_by_side(host, staged):
                held.copy_(place, non_blocking=True)
        for part, rows in zip(split(staged, block), block, strict=True):
            rows.copy_(part, non_blocking=True)

    def _staged(self, host: Sequence[Tensor]) -> Tensor:
        """Return where a block lies in one piece on its way: on the device if there is room for that."""
        if self._staging is not None:
            return self._staging
        return host[0] if len(host) == 1 else torch.empty(self._staging_bytes, dtype=torch.uint8)

    def _copy_states(self, copy: OffloadStates | RestoreStates) -> None:
        """Copy each run of memory by itself: those of states are long."""
        at = 0
        for run, nbytes in self._states(copy.states):
            if run is not None:
                for place, held in _side_by_side(self._places(copy.slots, at, nbytes), run):
                    target, source = (held, place) if isinstance(copy, RestoreStates) else (place, held)
                    target.copy_(source, non_blocking=True)
            at += nbytes

    def _places(self, slots: Sequence[int], start: int, nbytes: int) -> list[Tensor]:
        """Return the memory of so many bytes of `slots` from `start` on, uint8 [bytes] in each slot."""
        found, end, size = [], start + nbytes, self.block_bytes
        while start < end:
            number, begin = divmod(start, size)
            piece, place = divmod(slots[number], self._each)
            found.append(self._pieces[piece][place, begin : min(size, begin + end - start)])
            start += len(found[-1])
        return found

    def _measure(self, host: Sequence[Tensor], block: Sequence[Tensor]) -> None:
        """Measure the seconds to bring back a token, using the block just offloaded; once, in some milliseconds."""
        times = []
        for _ in range(3):
            wait_for(self._device)
            began = perf_counter()
            for _ in range(4):
                self._restore(host, block)
            wait_for(self._device)
            times.append((perf_counter() - began) / 4)
        self.costs.brought = min(times) / self._size

    def figures(self, tier: HostTier) -> OffloadFigures:
        """Return what `tier`, the index of this memory, holds, and what bringing it back costs."""
        return OffloadFigures(
            blocks=len(tier),
            bytes=self.nbytes,
            restored_tokens=tier.restored_rows,
            brought_s=self.costs.brought,
            computed_s=self.costs.computed,
            is_used=self.costs.worth_it,
            states=tier.num_states,
        )

    def close(self) -> None:
        """Free the memory."""
        self._over = True
        if self._pinning.is_alive():
            self._pinning.join()
        if self._staging is not None:
            with suppress(RuntimeError):  # a device that has failed copies nothing more
                wait_for(self._device)
        if self._pinned:
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            with on_device(self._device):
                for piece in [*self._pieces, *self._ready]:
                    if piece.is_pinned():
                        cudart.cudaHostUnregister(piece.data_ptr())
        self._pieces.clear()
        self._ready.clear()
        self._taken = self._most = 0


def _side_by_side(places: Sequence[Tensor], data: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return each of `places`, uint8 [bytes], with its part of `data`, in which they lie side by side."""
    ends = list(accumulate(map(len, places), initial=0))
    return [(place, data[begin:end]) for place, (begin, end) in zip(places, pairwise(ends), strict=True)]


def split(data: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return a block stored as uint8 [bytes] as tensors of the shapes and dtypes of `like`, which lie side by side."""
    ends = list(accumulate((part.nbytes for part in like), initial=0))
    own = [data[start:end] for start, end in pairwise(ends)]
    return [rows.view(part.dtype).view(part.shape) for rows, part in zip(own, like, strict=True)]


@dataclass(slots=True)
class PromptCosts:
    """The time per token of a prompt, in seconds; None: not measured yet."""

    brought: float | None = None
    """To bring it back from host memory, or from a file."""
    computed: float | None = None
    """To compute it, in the fastest chunk so far."""
    cold: float | None = None
    """To bring it back from a file that the system does not hold in memory."""

    @property
    def worth_it(self) -> bool:
        """Whether blocks should be brought back, as far as measurements say."""
        return self.brought is None or self.computed is None or self.brought * FASTER <= self.computed

    @property
    def if_cold(self) -> "PromptCosts":
        """The costs that count for a file that the system does not hold in memory."""
        return replace(self, brought=self.cold)

    def learn(self, earlier: "PromptCosts") -> None:
        """Take over what an earlier run measured and this one has not, and the fastest computing."""
        self.brought, self.cold = self.brought or earlier.brought, self.cold or earlier.cold
        self.computed = min(filter(None, (self.computed, earlier.computed)), default=None)

    def differ(self, others: "PromptCosts", share: float) -> bool:
        """Return whether any time known here is unknown in `others`, or differs by more than `share` of itself."""
        names = "brought", "computed", "cold"
        pairs = [(getattr(self, name), getattr(others, name)) for name in names]
        return any(mine is not None and abs(mine - (theirs or 0.0)) > share * mine for mine, theirs in pairs)

    def brought_back(self, rows: int, seconds: float, cold: bool = False) -> None:
        """Note that `rows` rows were brought back in this many seconds, from a `cold` file or not.

        Few rows count for little, because most of their time is spent waiting, for example for other requests' steps.
        """
        share, known = min(rows / ENOUGH_ROWS, 1.0), self.cold if cold else self.brought
        if known is not None:
            known += (seconds / rows - known) * share / 2
        elif share == 1.0:
            known = seconds / rows
        self.brought, self.cold = (self.brought, known) if cold else (known, self.cold)

    def saw(self, rows: int, seconds: float) -> None:
        """Note that a chunk of `rows` rows was computed in this many seconds."""
        if rows >= ENOUGH_ROWS:
            self.computed = min(seconds / rows, self.computed or seconds)
